"""``--scheduler=process``: nodes are launchers on the Master's host.

Each launcher that it starts has its own session, so that it outlives the launcher that started it. A file in the job's
runtime folder, with its pid and start time, lets the next Master on this host find it; because of the start time
another process with the same pid is never mistaken for it. Launchers that were started by hand are counted as well, but
never signalled.
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
from edl.schedulers.deps import SchedulerDeps, with_options
from edl.schedulers.port import Observation, SchedulerSize, Sized

WATCH_S = 0.5
"""Seconds between two checks of the processes."""
BY_THEMSELVES_S = 10.0
"""Seconds that launchers which were asked to leave may take before they get a SIGTERM."""
DEAD = "dead"
"""A start time that no process has."""
EARLY_S = 30.0
"""A launcher that fails within this many seconds after its start is reported."""


def check(wanted: SchedulerChoice) -> None:
    """Does nothing: there is nothing to check."""


def make(deps: SchedulerDeps) -> ProcessScheduler:
    """Create the adapter for one Master's term."""
    return ProcessScheduler(deps)


@dataclass(frozen=True, slots=True)
class Started:
    """A running launcher, according to its file."""

    path: Path
    node: str
    index: int
    pid: int
    since: str
    """Its start time, in the kernel's ticks."""
    starting: bool = False
    """``pid`` is that of the process that is about to start the launcher."""

    @property
    def alive(self) -> bool:
        """Whether that same process is still running."""
        return started_at(self.pid) == self.since

    def send(self, number: int) -> None:
        """Signal the launcher, if that same process is still running."""
        if self.alive and not self.starting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def started_at(pid: int) -> str:
    """A process's start time in ticks since boot; empty when it is not running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
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
        self.name = f"processes on {socket.gethostname()}"

    async def current(self) -> SchedulerSize:
        """The number of the job's launchers that run here."""
        return self._size()

    async def request(self, nodes: int, reason: str) -> None:
        """Start as many launchers as are missing. Raises ``SchedulerError``."""
        self._failed = ""
        for _ in range(nodes - self._size().nodes):
            self._launch()

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Send SIGTERM to launchers that do not leave in time when asked, and to surplus ones that have not joined the
        job yet."""
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
            self._deps.log(f"{one.node} has not left by itself: SIGTERM to its launcher (process {one.pid})")
            one.send(signal.SIGTERM)
            surplus -= 1
        for one in sorted(yet_to_come, key=lambda one: -one.index)[: max(0, surplus)]:
            one.send(signal.SIGTERM)

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

    # --- processes -------------------------------------------------------------------------------------------------

    def _size(self) -> SchedulerSize:
        ours, beside = self._started(), self._deps.beside()
        pids = {one.pid for one in ours} | set(beside)
        return SchedulerSize(len(pids), len(beside), self._failed)

    def _started(self) -> list[Started]:
        """The running launchers; files of ended ones are removed."""
        found = []
        for path in sorted(self._deps.runtime_folder.glob("*.json")):
            one = _read(path)
            if one is not None and one.alive:
                found.append(one)
            elif one is not None:
                path.unlink(missing_ok=True)
        return found

    def _launch(self) -> None:
        """Start one launcher, with the lowest free number above those of the launchers started by hand."""
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
        # This launcher has to reap it. asyncio would, but it kills its child processes when it ends.
        threading.Thread(target=self._reap, args=(process, node, log), daemon=True).start()

    def _reserve(self, path: Path, node: str, index: int) -> None:
        """Reserve the name: an older Master that has not noticed its replacement may be starting it as well. Raises
        ``SchedulerError``."""
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
        how = f"{node} exited with status {code}" if code >= 0 else f"{node} was killed by signal {-code}"
        self._deps.log(f"the launcher of {how}")
        if code and self._deps.clock.now_s() - begun_s < EARLY_S:
            self._failed = f"{how} soon after its start: see {log}"


def _read(path: Path) -> Started | None:
    """Parse a launcher's file; None: it has just been removed."""
    try:
        fields = json.loads(path.read_text())
        node, since = str(fields["node"]), str(fields["since"])
        return Started(path, node, int(fields["index"]), int(fields["pid"]), since, bool(fields["starting"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):  # not a file of ours
        return Started(path, "", -1, -1, DEAD)


def _write(path: Path, one: Started) -> None:
    """Write the file atomically."""
    fields = {"node": one.node, "index": one.index, "pid": one.pid, "since": one.since, "starting": one.starting}
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps(fields))
    draft.replace(path)
