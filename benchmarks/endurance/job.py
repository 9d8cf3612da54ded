"""The job under test: its launchers, their resources, and the faults."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.common import processes
from benchmarks.common.etcd import healthy
from benchmarks.common.launchers import REPOSITORY
from benchmarks.endurance.disk import CHECKPOINTS, LOGS, TEMPORARY, Disk
from benchmarks.endurance.verdict import Steps

NODES = ("a", "b", "c")
SPARED = "c"
"""The launcher of this node is stopped, and its worker and its member of the store are killed; it is never killed
itself. So one process lives for the whole run, and any leak in it shows."""
TAKES_A_MEMBER = ("launcher", "Master", "member")
LEASE_S = 3.0
STOPPED_S = (1.0, 6.0)
AWAY_S = (0.5, 4.0)
"""Seconds before a killed launcher is started again."""
DEPOSED_S = LEASE_S + 4.0
MEMBER = b"--initial-cluster-state="
"""Part of the command line of a member of the store."""


@dataclass(frozen=True, slots=True)
class Held:
    """Resources held by one launcher."""

    rss_mb: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Configuration of the run. ``options``: additional options for the launcher."""

    disk: Disk
    work: Path
    """Outside the small disk, so that the measurement does not use the measured disk."""
    nofile: int
    workers: int
    options: tuple[str, ...]
    script_arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class Worker:
    """The last report of a worker."""

    pid: int
    step: int
    world: int


class Endurance:
    """Launchers of one job, each with a member of the store. Leaves no process behind."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.draw = random.Random(seed)
        self.run = uuid.uuid4().hex
        self.job = f"endurance-{self.run[:8]}"
        self.ports = processes.free_store_ports(len(NODES))
        self.faults: Counter[str] = Counter()
        self.steps = Steps()
        self.world = 0
        self.ending = False
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}
        self.starts: Counter[str] = Counter()
        self.ended: list[str] = []
        """Launchers that ended without being killed."""
        self.left: set[processes.Found] = set()
        """Processes of killed launchers, seen just afterwards."""
        self._workers: dict[str, dict[int, Worker]] = {}
        self._read_bytes: Counter[str] = Counter()
        self._early: list[dict[str, object]] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._kinds: list[str] = []

    def __enter__(self) -> Endurance:
        (self.plan.work / "steps").mkdir()
        for node in NODES:
            self.start(node)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        processes.end_run(self.run)
        for process in self.launchers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)

    # --- launchers -----------------------------------------------------------------------------------------------

    @property
    def endpoints(self) -> str:
        return ",".join(f"{processes.LOOPBACK}:{port}" for port in self.ports)

    def _environment(self, **more: str) -> dict[str, str]:
        ours = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(self.plan.disk.folder / TEMPORARY),
        }
        return processes.clean_environment(ours | more)

    def start(self, node: str) -> None:
        """Start the launcher of a node with few descriptors (soft and hard limit)."""
        command = [sys.executable, "-m", "edl.launch", f"--nnodes=1:{len(NODES)}"]
        command += [f"--nproc-per-node={self.plan.workers}", f"--rdzv-id={self.job}", "--rdzv-backend=etcd-embedded"]
        command += [f"--rdzv-endpoint={self.endpoints}", f"--node-id={node}", f"--lease-ttl={LEASE_S:g}"]
        command += ["--max-restarts=1000000", "--slot-strikes=0", "--redirects=3", "--tee=0:2"]
        command += [f"--log-dir={self.plan.disk.folder / LOGS}"]
        command += [f"--checkpoint-dir={self.plan.disk.folder / CHECKPOINTS}", *self.plan.options]
        command += [str(REPOSITORY / "benchmarks" / "scripts" / "endure_torch.py"), f"--workdir={self.plan.work}"]
        limited = ["sh", "-c", f'ulimit -n {self.plan.nofile}; exec "$@"', "sh", *command, *self.plan.script_arguments]
        marks = {processes.RUN_MARK: self.run, processes.NODE_MARK: str(NODES.index(node))}
        log = self.plan.work / f"launcher-{node}.log"
        self.launchers[node] = processes.start(limited, self._environment(**marks), log, self.plan.work)
        self.starts[node] += 1

    def held(self, node: str) -> Held | None:
        """Resources held by a node's launcher; ``None`` while it is down."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.launchers[node].pid)
            return Held(process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())
        return None

    def processes_now(self) -> int:
        """Number of running processes of the whole run."""
        return len(processes.find(self.run))

    def leftovers(self) -> list[int]:
        """Processes of killed launchers that are still running."""
        self.left &= set(processes.find(self.run))
        return [found.pid for found in self.left]

    def master(self) -> str:
        """The Master's node; empty while none can be queried."""
        command = [sys.executable, "-m", "edl.cli", "status", "--json"]
        command += [f"--rdzv-endpoint={self.endpoints}", f"--rdzv-id={self.job}"]
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError, KeyError):
            done = subprocess.run(
                command, env=self._environment(), capture_output=True, timeout=15.0, check=False, cwd=self.plan.work
            )
            return str(json.loads(done.stdout)["master"])
        return ""

    # --- what workers say ------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read the workers' new lines, and execute what is due."""
        lines, now_s = self._early, time.monotonic()
        for path in sorted((self.plan.work / "steps").glob("*.steps")):
            with path.open("rb") as file:
                file.seek(self._read_bytes[path.stem])
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read_bytes[path.stem] += whole
            lines += map(json.loads, data[:whole].splitlines())
        # Lines that were written while the files were read: an earlier line of another worker may be read later.
        self._early = [line for line in lines if float(str(line["t"])) >= now_s]
        for line in sorted(lines, key=lambda line: float(str(line["t"]))):
            if float(str(line["t"])) < now_s:
                self._take(line)
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        for node, process in self.launchers.items() if not self.ending else ():
            if process.returncode is None and process.poll() is not None:
                self.ended.append(f"{node} with {process.returncode}")

    def _take(self, line: dict[str, object]) -> None:
        rank, step, pid, node = int(str(line["rank"])), int(str(line["step"])), int(str(line["pid"])), str(line["node"])
        self.steps.take(rank, step, int(str(line["chain"])))
        self.world = int(str(line["world"]))
        self._workers.setdefault(node, {})[rank] = Worker(pid, step, self.world)

    def _worker_pids(self) -> list[int]:
        found = (worker.pid for ranks in self._workers.values() for worker in ranks.values())
        living = {one.pid for one in processes.find(self.run)}
        return sorted(set(found) & living)

    # --- faults ----------------------------------------------------------------------------------------------------

    def strike(self) -> str:
        """Inject one fault; each kind occurs once before any is repeated. Returns a description, empty for no fault."""
        self._kinds = self._kinds or self.draw.sample(KINDS, len(KINDS))
        kind = self._kinds.pop()
        if kind in TAKES_A_MEMBER and not self._store_is_whole():
            self._kinds.insert(0, kind)  # a store does not survive the loss of two of three members
            kind = "worker"
        done = _FAULTS[kind](self)
        if done:
            self.faults[kind] += 1
        return done

    def _store_is_whole(self) -> bool:
        return all(healthy(f"{processes.LOOPBACK}:{port}") for port in self.ports)

    def _later_on(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + delay_s, next(self._order), action))

    def _kill_worker(self) -> str:
        pids = self._worker_pids()
        if not pids:
            return ""
        pid = self.draw.choice(pids)
        self._send(pid, signal.SIGKILL)
        return f"killed worker {pid}"

    def _stop_worker(self) -> str:
        pids = self._worker_pids()
        return self._stop(self.draw.choice(pids), "worker") if pids else ""

    def _stop_launcher(self) -> str:
        node = self.draw.choice(NODES)
        return self._stop(self.launchers[node].pid, f"launcher {node}") if self._running(node) else ""

    def _stop(self, pid: int, what: str, for_s: float = 0.0) -> str:
        delay_s = for_s or self.draw.uniform(*STOPPED_S)
        found = next((one for one in processes.find(self.run) if one.pid == pid), None)
        if found is None:
            return ""
        processes.send(found, signal.SIGSTOP)
        self._later_on(delay_s, lambda: _go_on(found))
        return f"stopped {what} ({pid}) for {delay_s:.1f} s"

    def _kill_launcher(self) -> str:
        return self._kill(self.draw.choice([node for node in NODES if node != SPARED]))

    def _kill_master(self) -> str:
        node = self.master()
        if node == SPARED:
            return self._stop(self.launchers[node].pid, f"launcher {node}, the Master,", DEPOSED_S)
        return self._kill(node) if node in NODES else ""

    def _kill(self, node: str) -> str:
        if not self._running(node):
            return ""
        process = self.launchers[node]
        own = processes.find(self.run, NODES.index(node))
        process.kill()
        process.wait()
        self._later_on(self.draw.uniform(*AWAY_S), lambda: self._again(node, own))
        return f"killed launcher {node} ({process.pid})"

    def _again(self, node: str, own: list[processes.Found]) -> None:
        self.left |= set(own)
        self.start(node)

    def _kill_member(self) -> str:
        node = self.draw.choice(NODES)
        for found in processes.find(self.run, NODES.index(node)):
            if MEMBER in processes.command(found.pid):
                processes.send(found, signal.SIGKILL)
                return f"killed {node}'s member of the store ({found.pid})"
        return ""

    def _running(self, node: str) -> bool:
        return self.launchers[node].poll() is None

    def _send(self, pid: int, number: signal.Signals) -> None:
        for found in processes.find(self.run):
            if found.pid == pid:
                processes.send(found, number)

    # --- the end ---------------------------------------------------------------------------------------------------

    def finish(self, within_s: float) -> dict[str, int | None]:
        """Restore everything, let the script end, and wait. Returns the exit statuses of the launchers; ``None`` for
        one that is still running."""
        deadline_s = time.monotonic() + within_s
        for _ in self._until(lambda: not self._later, deadline_s):
            pass
        self.ending = True
        written = self.plan.work / "last-step.new"
        written.write_text(str(self.steps.last + 100))
        written.rename(self.plan.work / "last-step")
        for _ in self._until(lambda: not any(map(self._running, NODES)), deadline_s):
            pass
        return {node: process.poll() for node, process in self.launchers.items()}

    def _until(self, condition: Callable[[], bool], deadline_s: float) -> Iterator[None]:
        while not condition() and time.monotonic() < deadline_s:
            self.poll()
            time.sleep(0.1)
            yield


def _go_on(found: processes.Found) -> None:
    processes.send(found, signal.SIGCONT)


_FAULTS: dict[str, Callable[[Endurance], str]] = {
    "worker": Endurance._kill_worker,
    "launcher": Endurance._kill_launcher,
    "Master": Endurance._kill_master,
    "member": Endurance._kill_member,
    "worker stopped": Endurance._stop_worker,
    "launcher stopped": Endurance._stop_launcher,
}
KINDS = tuple(_FAULTS)
