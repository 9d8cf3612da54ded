"""One job under test: its launchers, its hosts, its disk, and what can be seen of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.common import processes
from benchmarks.common.etcd import healthy
from benchmarks.common.hosts import Network, enter
from benchmarks.common.launchers import REPOSITORY
from benchmarks.endurance.disk import CHECKPOINTS, LOGS, Disk
from benchmarks.endurance.job import MEMBER, Held
from benchmarks.soak.clock import Clock
from benchmarks.soak.faults import Need
from benchmarks.soak.history import newest_master
from benchmarks.soak.kinds import Kind, filled
from benchmarks.soak.plan import NEVER_S, JobView

LAUNCHER, EDL = "edl.launch", "edl.cli"
STORE_PORT = 2379
STATUS_EVERY_S = 3.0
HEALTH_EVERY_S = 1.0
SIZE_MB = 300


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job runs."""

    folder: Path
    disk: Disk
    network: Network | None
    allowed: frozenset[Need]
    lease_s: float
    pause_s: float
    seed: int
    clock_library: Path | None
    """What gives a node a clock of its own; ``None``: no node has one."""


@dataclass(slots=True)
class Node:
    """One node: its launcher, and how often it was started."""

    name: str
    index: int
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    killed: bool = False
    """Whether the soak has killed its launcher."""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(slots=True)
class Sample:
    """Resources of one launcher process over time; times in seconds since it was started."""

    begun_s: float
    rss_mb: list[tuple[float, float]] = field(default_factory=list)
    descriptors: list[tuple[float, float]] = field(default_factory=list)
    threads: list[tuple[float, float]] = field(default_factory=list)


class Job:
    """Launchers of one job. ``close`` leaves no process behind."""

    def __init__(self, name: str, kind: Kind, place: Place) -> None:
        self.name, self.kind, self.place = name, kind, place
        self.run = uuid.uuid4().hex
        draw = random.Random(f"{place.seed} {name}")
        self.nodes = {node: Node(node, index) for index, node in enumerate(kind.nodes)}
        self.spared = draw.choice(kind.nodes)
        self.clock_node = draw.choice(kind.nodes) if place.clock_library is not None else ""
        self.members = kind.trainers  # launchers with pservers alone run no member of the store
        self.begun_s = time.monotonic()
        self.ending = False
        self.wrong: list[str] = []
        self.samples: dict[tuple[str, int], Sample] = {}
        self.said = place.folder / "steps"
        self.history = place.folder / "history"
        for folder in (self.said, self.history, place.folder / "tmp", place.folder / "data"):
            folder.mkdir(parents=True)
        self.endpoints = self._endpoints()
        self._watch = _StoreWatch(self.endpoints, place.network)
        self._status = _Question(self._ask_status) if kind.pservers else None

    def _endpoints(self) -> list[str]:
        if self.place.network is not None:
            return [f"{self.place.network.hosts[node]}:{STORE_PORT}" for node in self.members]
        return [f"{processes.LOOPBACK}:{port}" for port in processes.free_store_ports(len(self.members))]

    # --- launchers -----------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start every launcher."""
        for node in self.kind.nodes:
            self.start(node)

    def start(self, name: str) -> None:
        """Start the launcher of a node."""
        node = self.nodes[name]
        marks = {processes.RUN_MARK: self.run, processes.NODE_MARK: str(node.index)}
        log = self.place.folder / f"launcher-{name}.log"
        words = self.place.network.on(name) if self.place.network is not None else []
        words += [sys.executable, "-m", LAUNCHER, *self._options(name)]
        if name in self.kind.trainers:
            words += [str(self.kind.path), *self._filled(self.kind.arguments)]
        clock = self.clock.environment() if name == self.clock_node and self.clock is not None else {}
        node.process = processes.start(words, self.environment(**marks, **clock), log, self.place.folder)
        node.starts += 1
        node.killed = False
        self.samples[name, node.process.pid] = Sample(time.monotonic())

    def _options(self, name: str) -> list[str]:
        disk, lease_s = self.place.disk.folder, self.place.lease_s
        words = [f"--nnodes=1:{len(self.kind.trainers)}", "--nproc-per-node=1", f"--rdzv-id={self.name}"]
        words += ["--rdzv-backend=etcd-embedded", f"--rdzv-endpoint={','.join(self.endpoints)}", f"--node-id={name}"]
        words += [f"--lease-ttl={lease_s:g}", "--max-restarts=1000000", "--slot-strikes=0", "--redirects=3"]
        words += [f"--log-dir={disk / LOGS / name}", f"--history-dir={self.history}", "--shutdown-timeout=60"]
        words += self._filled(self.kind.options)
        if self.kind.pservers:
            words.append(f"--role={'pserver' if name in self.kind.pservers else 'trainer'}")
        return words

    def _filled(self, words: tuple[str, ...]) -> list[str]:
        return filled(
            words,
            folder=self.said,
            data=self.data,
            checkpoints=self.place.disk.folder / CHECKPOINTS,
            pause=self.place.pause_s,
            records=self.kind.records,
        )

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of every process of this job."""
        ours = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "eth0" if self.place.network is not None else "lo",
            "TMPDIR": str(self.place.folder / "tmp"),
        }
        return processes.clean_environment(ours | more)

    @property
    def clock(self) -> Clock | None:
        """The clock of the one node that has its own."""
        library = self.place.clock_library
        return Clock(library, self.place.folder / "clock") if library is not None else None

    @property
    def data(self) -> Path:
        """The folder of the data set."""
        return self.place.folder / "data"

    # --- what can be seen ------------------------------------------------------------------------------------------

    def found(self, node: str) -> list[processes.Found]:
        """Running processes of a node, without the launcher itself."""
        launcher = self.nodes[node].process
        return [
            one for one in processes.find(self.run, self.nodes[node].index) if one.pid != getattr(launcher, "pid", 0)
        ]

    def process_of(self, node: str, mark: bytes) -> processes.Found | None:
        """The process of a node whose command line contains these bytes."""
        return next((one for one in self.found(node) if mark in processes.command(one.pid)), None)

    def member(self, node: str) -> processes.Found | None:
        """A node's member of the store."""
        return self.process_of(node, MEMBER)

    def pserver(self, node: str) -> processes.Found | None:
        """A node's pserver."""
        return self.process_of(node, b"\0-m\0ps\0server")

    def view(self, now_s: float, whole_at_s: float, copied_at_s: float) -> JobView:
        """What the course of the faults has to know."""
        copied_s = self._replicated_at_s() if self._status is not None else copied_at_s
        return JobView(
            name=self.name, trainers=self.kind.trainers, pservers=self.kind.pservers, members=self.members,
            spared=self.spared, clock=self.clock_node, master=newest_master(self.history), allowed=self.place.allowed,
            whole_at_s=whole_at_s, store_whole=self._watch.whole, ending=self.ending,
            copied_at_s=copied_s if self.kind.needs_copies else now_s,
        )  # fmt: skip

    def replicated_since(self, moment_s: float) -> bool:
        """Whether the pservers have been seen with all replicas in place after a moment."""
        return self._status is None or self._replicated_at_s() > moment_s

    def _replicated_at_s(self) -> float:
        assert self._status is not None
        self._status.ask()
        return self._status.true_at_s

    def _ask_status(self) -> bool:
        """Whether all pservers hold all rows, each twice."""
        prefix = ["ip", "netns", "exec", self.place.network.switch] if self.place.network is not None else []
        words = [*prefix, sys.executable, "-m", EDL, "status", "--json", f"--rdzv-id={self.name}"]
        words.append(f"--rdzv-endpoint={','.join(self.endpoints)}")
        try:
            done = subprocess.run(
                words, env=self.environment(), capture_output=True, timeout=60.0, check=False, cwd=self.place.folder
            )
            services = json.loads(done.stdout)["services"]
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            return False
        for view in services:
            if view["service"] == "ps" and view["name"] == "pservers":
                counts = {one["name"]: one["value"] for one in view["counts"]}
                busy = counts.get("moving_buckets", 1) or counts.get("bare_buckets", 1)
                return counts.get("pservers") == len(self.kind.pservers) and not busy
        return False

    def sample(self, now_s: float) -> None:
        """Take one sample of every launcher's resources."""
        for name, node in self.nodes.items():
            if node.process is None or not node.running:
                continue
            with contextlib.suppress(psutil.Error):
                one = psutil.Process(node.process.pid)
                held = Held(one.memory_info().rss / 1e6, one.num_fds(), one.num_threads())
                series = self.samples[name, node.process.pid]
                t = now_s - series.begun_s
                series.rss_mb.append((t, held.rss_mb))
                series.descriptors.append((t, held.descriptors))
                series.threads.append((t, held.threads))

    def ended_by_themselves(self) -> list[str]:
        """Launchers that ended without being killed, with their status."""
        return [
            f"the launcher of {name} ended with status {node.process.poll()}"
            for name, node in self.nodes.items()
            if node.process is not None and not node.running and not node.killed
        ]

    def statuses(self) -> dict[str, int | None]:
        """The exit status of each launcher; ``None`` while it runs."""
        return {name: node.process.poll() if node.process is not None else None for name, node in self.nodes.items()}

    def left(self) -> list[str]:
        """Processes that are still running."""
        return [
            processes.command(one.pid).replace(b"\0", b" ").decode(errors="replace")[:120]
            for one in processes.find(self.run)
        ]

    def close(self) -> None:
        """End everything."""
        self._watch.close()
        processes.end_run(self.run)
        for node in self.nodes.values():
            if node.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.process.wait(timeout=5.0)


class _StoreWatch:
    """Follows whether all members of the store answer, in a thread that has the switch's network."""

    def __init__(self, endpoints: list[str], network: Network | None) -> None:
        self.whole = False
        self._endpoints, self._network = endpoints, network
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        if self._network is not None:
            enter(self._network.switch)
        while not self._over.wait(HEALTH_EVERY_S):
            self.whole = all(map(healthy, self._endpoints))

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()


class _Question:
    """Asks something that takes long, in a thread, and remembers when the answer was last yes."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self.true_at_s = NEVER_S
        self._ask, self._thread, self._asked_s = ask, threading.Thread(), NEVER_S

    def ask(self) -> None:
        """Ask again, unless that was done a moment ago."""
        now_s = time.monotonic()
        if not self._thread.is_alive() and now_s - self._asked_s > STATUS_EVERY_S:
            self._asked_s = now_s
            self._thread = threading.Thread(target=self._answer, args=(now_s,), daemon=True)
            self._thread.start()

    def _answer(self, asked_s: float) -> None:
        if self._ask():
            self.true_at_s = asked_s


def lines(folder: Path, suffix: str, read: dict[str, int]) -> Iterator[dict[str, object]]:
    """New complete lines of all files with this suffix. ``read``: bytes read of each so far; is changed."""
    for name in sorted(os.listdir(folder)):
        if not name.endswith(suffix):
            continue
        with (folder / name).open("rb") as file:
            file.seek(read.get(name, 0))
            data = file.read()
        whole = data.rfind(b"\n") + 1
        read[name] = read.get(name, 0) + whole
        yield from map(json.loads, data[:whole].splitlines())
