"""Real jobs for tests: launchers, stores and signals, and proof that nothing of them stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil

from edl.adapters.etcd_plan import plan_members
from edl.adapters.etcd_server import QUOTA_BYTES, EtcdMember
from tests.process import forking
from tests.process.free_ports import free_endpoints

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).resolve().parent / "workers"
PLAIN = WORKERS / "plain.py"
DEADLINE_S = float(os.environ.get("TEST_DEADLINE_S", "120"))
ASK_S = 0.5
"""Pause between two questions to a Master: each is a process, and they would take a quarter of a core."""
MARK = forking.MARK
SHARED_MEMORY = Path("/dev/shm")

T = TypeVar("T")
J = TypeVar("J", bound="Job")


def until(condition: Callable[[], T], what: str, limit_s: float = DEADLINE_S, pause_s: float = 0.05) -> T:
    """Wait until the condition is true; returns its value. ``pause_s``: between two looks."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came in {limit_s:g} s: {what}"
        time.sleep(pause_s)
    return value


def stragglers(status: Any) -> list[Any]:
    """The alarms about stragglers in a status."""
    return [alarm for alarm in status["alarms"] if alarm["name"] == "straggler"]


def alive(pid: int) -> bool:
    """True if the process runs. False for a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def lone_member(folder: Path, quota_bytes: int = QUOTA_BYTES, endpoint: str = "") -> EtcdMember:
    """A cluster of one that belongs to no launcher, ready when this returns. ``endpoint``: where it listens, for a
    process of a test, whose own ports would be free for others when it ends; by default a free one."""
    (plan,) = plan_members([endpoint] if endpoint else free_endpoints(1))
    member = EtcdMember(plan, folder, quota_bytes=quota_bytes)
    member.start()
    await member.wait_ready(60)
    return member


class OutsideEtcd:
    """An etcd that belongs to no launcher."""

    def __init__(self, folder: Path, quota_bytes: int = QUOTA_BYTES) -> None:
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._member: EtcdMember | None = None

    def __enter__(self) -> OutsideEtcd:
        self._member = asyncio.run(lone_member(self._folder, self._quota_bytes))
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run(self.member.stop())

    @property
    def member(self) -> EtcdMember:
        assert self._member is not None
        return self._member

    @property
    def endpoint(self) -> str:
        return self.member.endpoint

    def kill(self) -> None:
        """Kill the member with SIGKILL; its data stay."""
        assert self.member.pid is not None
        os.kill(self.member.pid, signal.SIGKILL)
        asyncio.run(self.member.stop(0))

    def restart(self) -> None:
        """Again on the same port, with the data."""
        self.member.start()
        asyncio.run(self.member.wait_ready(60))


@dataclass(frozen=True)
class Step:
    """One line of a worker's step log."""

    t: float
    step: int
    rank: int
    world: int
    round: int
    pid: int
    node: str
    loss: float = 0.0


@dataclass(frozen=True)
class Seen:
    """A round as its workers' step logs show it."""

    round: int
    world: int
    pids: Mapping[int, int]
    """By rank."""
    nodes: Mapping[int, str]
    """By rank."""

    def ranks(self, node: str) -> list[int]:
        return [rank for rank, other in sorted(self.nodes.items()) if other == node]

    def pids_of(self, node: str) -> list[int]:
        return [self.pids[rank] for rank in self.ranks(node)]


class Node:
    """A launcher process and its output."""

    def __init__(self, name: str, process: forking.Process, log: Path, folder: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.folder = folder
        """Where it writes logs and its error report."""

    @property
    def text(self) -> str:
        """Everything the launcher and its workers have written so far."""
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: int = signal.SIGKILL) -> float:
        """Send a signal to the launcher alone; returns when."""
        at = time.monotonic()
        self.process.send_signal(number)
        return at

    def kill(self) -> float:
        """SIGKILL the launcher, wait for its end, return when the signal was sent."""
        at = self.send(signal.SIGKILL)
        self.process.wait()
        return at

    def exit_code(self, limit_s: float = DEADLINE_S) -> int:
        """Wait for the launcher to end."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"launcher {self.name} still runs after {limit_s:g} s") from None

    def says(self, text: str, limit_s: float = DEADLINE_S) -> None:
        """Wait for a text in what it writes."""
        self.says_one_of(text, limit_s=limit_s)

    def says_one_of(self, *texts: str, limit_s: float = DEADLINE_S) -> None:
        """Wait for one of these texts in what it writes."""
        until(lambda: any(one in self.text for one in texts), f"{' or '.join(texts)!r} from {self.name}", limit_s)

    def report(self) -> Any:
        """The content of the launcher's ``error.json``."""
        (path,) = self.folder.glob("*/error.json")
        return json.loads(path.read_text())


@dataclass
class Job:
    """Launchers of one job. On exit everything is killed, and it is checked that nothing has stayed."""

    folder: Path
    endpoints: Sequence[str]
    backend: str = "etcd"
    name: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    nnodes: str = "1:4"
    options: Sequence[str] = ()
    script: Sequence[str] = (str(PLAIN),)
    """The script, or what stands in its place, such as ``-m`` and a module."""
    arguments: Sequence[str] = ()
    """The script's arguments, after ``--folder``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()
    """Put before the launcher's command, such as ``ip netns exec NAME``."""
    nodes: dict[str, Node] = field(default_factory=dict)
    _offsets: dict[Path, int] = field(default_factory=dict)
    _steps: list[Step] = field(default_factory=list)

    def __enter__(self: J) -> J:
        self.mark = uuid.uuid4().hex
        self.steps_folder = self.folder / f"steps-{self.name}"
        self.temporary = self.folder / f"tmp-{self.name}"
        for folder in (self.steps_folder, self.temporary):
            folder.mkdir(parents=True)
        self._shared_memory = _shared_memory()
        self._launched: list[Node] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.dump()
        for node in self._launched:
            if node.running:
                node.send(signal.SIGCONT)
                node.kill()
        try:
            self.check_nothing_left()
        except AssertionError:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if error is None:
                self.dump()
                raise

    # --- launching -------------------------------------------------------------------------------------------------

    def command(self, node: str, *options: str, nproc: int = 1, nnodes: str = "") -> list[str]:
        """The command line of a launcher."""
        return [
            *self.prefix,
            sys.executable,
            "-m",
            "edl.launch",
            f"--nnodes={nnodes or self.nnodes}",
            f"--nproc-per-node={nproc}",
            f"--rdzv-id={self.name}",
            f"--rdzv-backend={self.backend}",
            f"--rdzv-endpoint={','.join(self.endpoints)}",
            # With the default of 3 s, a launcher that a busy machine does not run for 2 s would end its workers.
            "--lease-ttl=10",
            f"--node-id={node}",
            f"--log-dir={self.folder / f'logs-{self.name}' / node}",
            *self.options,
            *options,
            *self.script,
            f"--folder={self.steps_folder}",
            *self.arguments,
        ]

    def base_environment(self) -> dict[str, str]:
        ours = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), MARK: self.mark, "OMP_NUM_THREADS": "1"}
        ours["XDG_CACHE_HOME"] = str(self.folder / f"cache-{self.name}")
        return {**forking.plain_environment(), **ours, **self.environment}

    def start(self, *names: str, nproc: int = 1, options: Sequence[str] = (), command: Sequence[str] = ()) -> Node:
        """Start launchers with these node ids, each in a session of its own; returns the last one."""
        node = None
        for name in names:
            log = self.folder / f"{self.name}-{name}-{len(self._launched)}.log"
            with log.open("wb") as file:
                words = command or self.command(name, *options, nproc=nproc)
                process = forking.start(words, self.base_environment(), self.folder, file, file)
            node = Node(name, process, log, self.folder / f"logs-{self.name}" / name)
            self.nodes[name] = node
            self._launched.append(node)
        assert node is not None
        return node

    def kill(self, name: str) -> float:
        """SIGKILL a node's launcher; returns when."""
        return self.nodes[name].kill()

    def exit_codes(self) -> dict[str, int]:
        """Wait for every launcher that was not killed."""
        return {name: node.exit_code() for name, node in self.nodes.items()}

    # --- looking ---------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """Every step that any worker has logged, in order of time."""
        for path in self.steps_folder.glob("*.steps"):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._offsets[path] = offset + whole
            self._steps += [Step(**json.loads(line)) for line in data[:whole].splitlines()]
        self._steps.sort(key=lambda step: step.t)
        return self._steps

    def rounds(self) -> Iterator[Seen]:
        """Rounds in which every rank has made a step, the newest first."""
        rounds: dict[int, dict[int, Step]] = {}
        for step in self.steps():
            rounds.setdefault(step.round, {})[step.rank] = step
        for number, ranks in sorted(rounds.items(), reverse=True):
            world = next(iter(ranks.values())).world
            if len(ranks) == world:
                pids = {rank: step.pid for rank, step in ranks.items()}
                yield Seen(number, world, pids, {rank: step.node for rank, step in ranks.items()})

    def seen(self) -> Seen | None:
        """The newest round that was seen, or None."""
        return next(self.rounds(), None)

    def wait_world(self, size: int, *, after: int = 0, limit_s: float = DEADLINE_S) -> Seen:
        """Wait until all ranks of a world of this size make steps.

        ``after``: in a round above this one, be it over already: on a busy machine a world may come and go between two
        looks.
        """

        def look() -> Seen | None:
            newest = itertools.takewhile(lambda seen: seen.round > after, self.rounds())
            candidates = newest if after else itertools.islice(newest, 1)
            return next((seen for seen in candidates if seen.world == size), None)

        return until(look, f"a world of {size} after round {after} in {self.name}", limit_s) or _never()

    def wait_steps(self, count: int, world: int | None = None) -> Seen:
        """Wait until all ranks of the newest round have made so many more steps than now."""
        start = time.monotonic()

        def look() -> Seen | None:
            seen = self.seen()
            if seen is None or (world is not None and seen.world != world):
                return None
            fresh = [step.rank for step in self.steps() if step.round == seen.round and step.t > start]
            return seen if all(fresh.count(rank) >= count for rank in range(seen.world)) else None

        return until(look, f"{count} more steps of all ranks in {self.name}") or _never()

    def pause_s(self, after: float, size: int, rounds_after: int) -> float:
        """Seconds from a moment to the first step that all ranks of the next world have made."""
        seen = self.wait_world(size, after=rounds_after)
        first: dict[int, float] = {}
        for step in self.steps():
            if step.round == seen.round:
                first.setdefault(step.rank, step.t)
        return max(first.values()) - after

    def cli(self, *words: str, limit_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """Run ``edl WORDS…`` for this job."""
        where = [f"--rdzv-endpoint={','.join(self.endpoints)}", f"--rdzv-id={self.name}"]
        return self.edl(*words, *where, limit_s=limit_s)

    def edl(self, *words: str, limit_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """Run ``edl WORDS…`` in this job's environment."""
        command = [*self.prefix, sys.executable, "-m", "edl.cli", *words]
        return forking.run(command, self.base_environment(), self.folder, limit_s)

    def status(self) -> Any:
        """``edl status --json``, asked again while there is no Master."""

        def ask() -> Any:
            done = self.cli("status", "--json")
            return json.loads(done.stdout) if done.returncode == 0 else None

        return until(ask, f"a status of {self.name}", pause_s=ASK_S)

    def events(self) -> list[Any]:
        """The output of ``edl events --json``."""
        done = self.cli("events", "--json")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def wait_status(self, condition: Callable[[Any], bool], what: str) -> Any:
        """Wait for a status of which the condition is true."""
        last: list[Any] = [None]

        def look() -> bool:
            last[0] = self.status()
            return condition(last[0])

        until(look, what, pause_s=ASK_S)
        return last[0]

    def end_soon(self, more: int = 30) -> int:
        """Have the script end some steps from now; returns the number of its last step."""
        last = max(step.step for step in self.steps()) + more
        self.stop_at(last)
        return last

    def stop_at(self, step: int) -> None:
        """Have the script end after this step. Workers may be reading the file: they see all of it or nothing."""
        file = self.steps_folder / "last-step"
        file.with_suffix(".new").write_text(str(step))
        file.with_suffix(".new").replace(file)

    # --- the end ---------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started by this job's launchers, directly or not."""
        found = []
        wanted = f"{MARK}={self.mark}".encode()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if wanted in environment.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def check_nothing_left(self, limit_s: float = 30.0) -> None:
        """All processes gone, and with them their sockets; no shared memory, no note for ``edl status``."""
        deadline = time.monotonic() + limit_s
        # One by one in this order, but up to one deadline: a process that ends gives up its memory, in which we find
        # the mark, before its sockets.
        while left := [*map(_describe, self.processes())] or self._held_outside():
            assert time.monotonic() < deadline, f"left over: {left}"
            time.sleep(0.05)

    def _held_outside(self) -> list[str]:
        """Sockets and shared memory of the job that outlive its processes, or may for a moment."""
        embedded = self.backend == "etcd-embedded"
        endpoints = [one for one in self.endpoints if embedded and one.startswith("127.") and _answers(one)]
        return [
            *(f"somebody still listens at {endpoint}" for endpoint in endpoints),
            *(f"shared memory {name}" for name in sorted(_shared_memory() - self._shared_memory)),
        ]

    def dump(self) -> None:
        """Print what every launcher has written; pytest shows it when a test fails."""
        for node in self._launched:
            print(f"----- {node.log.name} (status {node.process.poll()})")
            print(node.text[-20_000:])


def _never() -> Any:
    raise AssertionError("unreachable")


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} (parent {process.ppid()}): {' '.join(process.cmdline())[:200]}"
    return str(process.pid)


def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob("*edl*")} if SHARED_MEMORY.is_dir() else set()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[float]:
    """SIGSTOP for the time of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
