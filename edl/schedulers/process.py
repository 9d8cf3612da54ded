"""``--scheduler=process``: nodes are launchers on the Master's host.

Each launcher that it starts has its own session, so that it outlives the launcher that started it. A file in the job's
runtime folder, with pid and start time, lets the next Master on this host find it; the start time tells it from another
process with the same pid. Launchers that a user started are counted as well, but never signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edl.errors import SchedulerError
from edl.job_records import SchedulerChoice
from edl.programs import ending
from edl.schedulers.deps import SchedulerDeps, with_options
from edl.schedulers.port import Observation, SchedulerSize, Sized

WATCH_S = 0.5
"""Seconds between two checks of the processes."""
BY_THEMSELVES_S = 10.0
"""Seconds that launchers which were ordered to leave may take before they get SIGTERM."""
DEAD = "dead"
"""A start time that no process has."""
EARLY_S = 30.0
"""A launcher that fails within this many seconds of its start is reported in the status."""


def check(wanted: SchedulerChoice) -> None:
    """Does nothing: the kind has no settings."""


def make(deps: SchedulerDeps) -> ProcessScheduler:
    """Create the adapter for one Master's term."""
    return ProcessScheduler(deps)


@dataclass(frozen=True, slots=True)
class Started:
    """A launcher, according to its file."""

    path: Path
    """The file."""
    node: str
    index: int
    pid: int
    since: str
    """Its start time, see ``started_at``."""
    starting: bool = False
    """Whether ``pid`` is still that of the process that is about to start the launcher."""

    @property
    def alive(self) -> bool:
        """Whether the process is still running; another one with the same pid does not count."""
        return started_at(self.pid) == self.since

    def send(self, number: int) -> None:
        """Send a signal to the launcher, if it is still running."""
        if self.alive and not self.starting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def started_at(pid: int) -> str:
    """A process's start time in clock ticks since boot; empty if it is not running. Raises ``OSError`` if that cannot
    be found out."""
    try:
        # The name before the parenthesis can be any bytes.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class ProcessScheduler:
    """Implements ``port.Scheduler`` with processes on this host."""

    indexed = False
    ask_none_at_end = False

    def __init__(self, deps: SchedulerDeps, start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        self._deps = deps
        self._start = start
        self._failed = ""
        self._signalled: set[tuple[int, str]] = set()
        """Pid and start of the launchers that were sent SIGTERM. A second one would cut short what they write."""
        self.name = f"processes on {socket.gethostname()}"

    async def current(self) -> SchedulerSize:
        """The number of the job's launchers on this host."""
        return self._size()

    async def request(self, nodes: int, reason: str) -> None:
        """Start as many launchers as are missing. Raises ``SchedulerError``."""
        self._failed = ""
        for _ in range(nodes - self._size().nodes):
            self._launch()

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Send SIGTERM to launchers in ``names`` that have not left after ``BY_THEMSELVES_S``, and to surplus ones that
        have not joined the job yet."""
        deadline_s = self._deps.clock.now_s() + BY_THEMSELVES_S
        while self._deps.clock.now_s() < deadline_s:
            leaving = [one for one in self._started() if one.node in names]
            if not leaving:
                break
            await asyncio.sleep(WATCH_S / 5)
        registered = set(self._deps.beside())
        yet_to_come = [one for one in self._started() if one.pid not in registered and one.node not in names]
        surplus = self._size().nodes - nodes
        for one in [one for one in self._started() if one.node in names]:
            if self._tell(one):
                late = f"{one.node} has not left within {BY_THEMSELVES_S:g} s"
                self._deps.log(f"{late}: sent SIGTERM to its launcher (pid {one.pid})")
            surplus -= 1
        for one in sorted(yet_to_come, key=lambda one: -one.index)[: max(0, surplus)]:
            self._tell(one)

    async def watch(self) -> AsyncIterator[Observation]:
        """Yields the size whenever a launcher starts or ends."""
        last = None
        while True:
            size = self._size()
            if size != last:
                last = size
                yield Sized(size)
            await asyncio.sleep(WATCH_S)

    async def close(self) -> None:
        """Does nothing: launchers keep running."""

    def _tell(self, one: Started) -> bool:
        """Send SIGTERM; False if that was done before, or is too early."""
        key = (one.pid, one.since)
        if key in self._signalled or one.starting:
            return False
        self._signalled.add(key)
        one.send(signal.SIGTERM)
        return True

    # --- processes -------------------------------------------------------------------------------------------------

    def _size(self) -> SchedulerSize:
        ours, beside = self._started(), self._deps.beside()
        pids = {one.pid for one in ours} | set(beside)
        return SchedulerSize(len(pids), len(beside), self._failed)

    def _started(self) -> list[Started]:
        """The running launchers that have a file. Deletes the files of launchers that have ended. Raises
        ``SchedulerError``."""
        found = []
        try:
            for path in sorted(self._deps.runtime_folder.glob("*.json")):
                one = _read(path)
                if one is not None and one.alive:
                    found.append(one)
                elif one is not None:
                    path.unlink(missing_ok=True)
        except OSError as error:  # such as no descriptor: that says nothing about the launchers
            text = f"cannot look at the launchers on this host: {error.strerror}"
            raise SchedulerError(text, retry=True) from error
        return found

    def _launch(self) -> None:
        """Start one launcher with the lowest free index; as many low indexes as there are launchers without a file stay
        unused. Raises ``SchedulerError``."""
        deps, ours = self._deps, self._started()
        by_hand = set(deps.beside()) - {one.pid for one in ours}
        index = next(n for n in range(len(by_hand), 1_000_000) if n not in {one.index for one in ours})
        node = f"{socket.gethostname()[:100]}-p{index}"
        path = deps.runtime_folder / f"{index}.json"
        log = deps.log_folder / f"{deps.job}_{node}.launcher.log"
        try:
            deps.runtime_folder.mkdir(parents=True, exist_ok=True)
            deps.log_folder.mkdir(parents=True, exist_ok=True)
            self._reserve(path, node, index)
            with log.open("ab") as file:
                process = self._start(
                    with_options(deps.launcher, f"--node-id={node}", f"--node-index={index}"),
                    env=dict(deps.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            _write(path, Started(path, node, index, process.pid, started_at(process.pid) or DEAD))
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise SchedulerError(f"cannot start a launcher on this host: {error}", retry=True) from error
        # A thread reaps it, because asyncio would kill its child processes when the event loop ends.
        threading.Thread(target=self._reap, args=(process, node, log), daemon=True).start()

    def _reserve(self, path: Path, node: str, index: int) -> None:
        """Reserve the name by creating its file: an older Master that does not know of its replacement may be starting
        the same one. Raises ``SchedulerError`` if the file exists."""
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        _write(draft, Started(path, node, index, os.getpid(), started_at(os.getpid()), starting=True))
        try:
            os.link(draft, path)
        except FileExistsError as error:
            raise SchedulerError(f"another Master is starting {node} on this host", retry=True) from error
        finally:
            draft.unlink()

    def _reap(self, process: subprocess.Popen[bytes], node: str, log: Path) -> None:
        begun_s = self._deps.clock.now_s()
        code = process.wait()
        how = f"{node} {ending(code)}"
        self._deps.log(f"the launcher of {how}")
        if code and self._deps.clock.now_s() - begun_s < EARLY_S:
            self._failed = f"{how} soon after its start: see {log}"


def _read(path: Path) -> Started | None:
    """Parse a launcher's file; None: it has just been deleted. An invalid file gives a dead launcher. Raises
    ``OSError``."""
    try:
        fields = json.loads(path.read_text())
        node, since = str(fields["node"]), str(fields["since"])
        return Started(path, node, int(fields["index"]), int(fields["pid"]), since, bool(fields["starting"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):  # edl did not write it
        return Started(path, "", -1, -1, DEAD)


def _write(path: Path, one: Started) -> None:
    """Write the file atomically."""
    fields = {"node": one.node, "index": one.index, "pid": one.pid, "since": one.since, "starting": one.starting}
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps(fields))
    draft.replace(path)
