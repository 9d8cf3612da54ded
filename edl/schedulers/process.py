"""``--scheduler=process``: nodes are launchers on the Master's host.

Each that is started has a session of its own, so that it outlives the launcher that started it, and a file in the job's
runtime folder by which the next Master on this host finds it: its process, and when that was started, so that another
process with the same number is never taken for it. Launchers that were started by hand count as well, but are never
signalled.
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
from edl.schedulers.order import Order, with_options
from edl.schedulers.port import Observation, Size, Sized

WATCH_S = 0.5
"""Between two looks at the processes."""
BY_THEMSELVES_S = 10.0
"""Launchers that were told to leave may take so long before they get a SIGTERM."""
DEAD = "dead"
"""No process has been started at this time."""
EARLY_S = 30.0
"""A launcher that fails so soon after its start is mentioned."""


def check(wanted: SchedulerChoice) -> None:
    """Nothing can be wrong with it."""


def make(order: Order) -> ProcessScheduler:
    """For one rule."""
    return ProcessScheduler(order)


@dataclass(frozen=True, slots=True)
class Started:
    """A launcher that runs, by its file."""

    path: Path
    node: str
    index: int
    pid: int
    since: str
    """When it was started, in the kernel's ticks."""
    starting: bool = False
    """That is the process that is about to start it."""

    @property
    def alive(self) -> bool:
        """Whether it is this very process that runs."""
        return started_at(self.pid) == self.since

    def send(self, number: int) -> None:
        """Signal it, if it is still this very process."""
        if self.alive and not self.starting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def started_at(pid: int) -> str:
    """When a process was started, in ticks since the boot; empty when it does not run (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class ProcessScheduler:
    """See ``port.Scheduler``."""

    indexed = False
    ask_none_at_end = False

    def __init__(self, order: Order, start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        self._order = order
        self._start = start
        self._failed = ""
        self.name = f"processes on {socket.gethostname()}"

    async def current(self) -> Size:
        """All launchers of the job that run here."""
        return self._size()

    async def request(self, nodes: int, reason: str) -> None:
        """Start as many as are missing. Raises ``SchedulerError``."""
        self._failed = ""
        for _ in range(nodes - self._size().nodes):
            self._launch()

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """They have been told to leave; those that do not, and those that are not in the job yet, get a SIGTERM."""
        deadline_s = self._order.clock.now_s() + BY_THEMSELVES_S
        while self._order.clock.now_s() < deadline_s:
            leaving = [one for one in self._started() if one.node in names]
            if not leaving:
                break
            await asyncio.sleep(WATCH_S / 5)
        registered = set(self._order.beside())
        yet_to_come = [one for one in self._started() if one.pid not in registered and one.node not in names]
        surplus = self._size().nodes - nodes
        for one in [one for one in self._started() if one.node in names]:
            self._order.log(f"{one.node} has not left by itself: SIGTERM to its launcher (process {one.pid})")
            one.send(signal.SIGTERM)
            surplus -= 1
        for one in sorted(yet_to_come, key=lambda one: -one.index)[: max(0, surplus)]:
            one.send(signal.SIGTERM)

    async def watch(self) -> AsyncIterator[Observation]:
        """Launchers come and go by themselves as well."""
        last = None
        while True:
            size = self._size()
            if size != last:
                last = size
                yield Sized(size)
            await asyncio.sleep(WATCH_S)

    async def close(self) -> None:
        """Launchers go on."""

    # --- processes -------------------------------------------------------------------------------------------------

    def _size(self) -> Size:
        ours, beside = self._started(), self._order.beside()
        pids = {one.pid for one in ours} | set(beside)
        return Size(len(pids), len(beside), self._failed)

    def _started(self) -> list[Started]:
        """Those that run; what others have left behind is removed."""
        found = []
        for path in sorted(self._order.runtime_folder.glob("*.json")):
            one = _read(path)
            if one is not None and one.alive:
                found.append(one)
            elif one is not None:
                path.unlink(missing_ok=True)
        return found

    def _launch(self) -> None:
        """One more, with the lowest number that is free above those of the launchers started by hand."""
        order, ours = self._order, self._started()
        by_hand = set(order.beside()) - {one.pid for one in ours}
        index = next(n for n in range(len(by_hand), 1_000_000) if n not in {one.index for one in ours})
        node = f"{socket.gethostname()[:100]}-p{index}"
        path = order.runtime_folder / f"{index}.json"
        log = order.log_folder / f"{order.job}_{node}.launcher.log"
        try:
            order.runtime_folder.mkdir(parents=True, exist_ok=True)
            order.log_folder.mkdir(parents=True, exist_ok=True)
            self._reserve(path, node, index)
            with log.open("ab") as file:
                process = self._start(
                    with_options(order.launcher, f"--node-id={node}", f"--node-index={index}"),
                    env=dict(order.environment),
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
        # Nobody else reaps it while this launcher lives. asyncio would, but it kills what it has started when it ends.
        threading.Thread(target=self._reap, args=(process, node, log), daemon=True).start()

    def _reserve(self, path: Path, node: str, index: int) -> None:
        """An older Master that has not noticed yet may be at it as well. Raises ``SchedulerError``."""
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        _write(draft, Started(path, node, index, os.getpid(), started_at(os.getpid()), starting=True))
        try:
            os.link(draft, path)
        except FileExistsError as error:
            raise SchedulerError(f"another Master starts {node} on this host", retry=True) from error
        finally:
            draft.unlink()

    def _reap(self, process: subprocess.Popen[bytes], node: str, log: Path) -> None:
        begun_s = self._order.clock.now_s()
        code = process.wait()
        how = f"{node} ended with status {code}" if code >= 0 else f"{node} was killed by signal {-code}"
        self._order.log(f"the launcher of {how}")
        if code and self._order.clock.now_s() - begun_s < EARLY_S:
            self._failed = f"{how} soon after its start: see {log}"


def _read(path: Path) -> Started | None:
    """None: it has just been removed."""
    try:
        told = json.loads(path.read_text())
        node, since = str(told["node"]), str(told["since"])
        return Started(path, node, int(told["index"]), int(told["pid"]), since, bool(told["starting"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):  # not ours
        return Started(path, "", -1, -1, DEAD)


def _write(path: Path, one: Started) -> None:
    """At once, or not at all."""
    told = {"node": one.node, "index": one.index, "pid": one.pid, "since": one.since, "starting": one.starting}
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps(told))
    draft.replace(path)
