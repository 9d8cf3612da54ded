"""The watchdogs for this launcher's directories: checkpoints, logs, synchronised directories."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edl.adapters.disk_probe import DiskProbe
from edl.adapters.file_systems import local_path
from edl.launch.settings import LaunchSettings
from edl.ports import Clock
from edl.tasks import end
from edl.threads import Threads
from edl.types import NodeId
from edl.watch import disks, raising
from edl.watch.readings import Reading
from edl.watch.table import WatchLimits
from edl.wire.alarm import Alarm
from edl.wire.messages import Kept

LOOK_S = 30.0
"""Seconds between two looks."""
WRITES_EVERY = 2
"""Every how many looks a file is written: on a shared file system all nodes do that."""
ANSWER_S = 5.0
"""Seconds that a look waits for the file systems."""


@dataclass(frozen=True, slots=True)
class WatchedDirectory:
    """One directory to watch."""

    what: str
    """Its purpose, for people."""
    path: str
    shared: bool = False
    """See ``DirectorySample``."""
    checkpoints: bool = False
    """Whether checkpoints are written there."""

    @property
    def about(self) -> str:
        """See ``DirectorySample``."""
        return f"{self.what} {self.path}"


def directories_of(settings: LaunchSettings, log_folder: str) -> tuple[WatchedDirectory, ...]:
    """The directories of this launcher that are on file systems; checkpoints on an object store are not.
    ``log_folder``: of this launch (``outputs.claim``); that of an earlier one may be deleted at any time."""
    found = []
    folder = local_path(settings.state.checkpoint_dir)
    if folder:
        found.append(WatchedDirectory("checkpoint directory", folder, shared=True, checkpoints=True))
    if log_folder:
        found.append(WatchedDirectory("log directory", log_folder))
    found += [WatchedDirectory("synchronised directory", root) for root in settings.sync.roots]
    return tuple(found)


class DiskWatch:
    """Looks at directories until ``leave``. ``changed``: called with all alarms after the first look, and when they are
    others."""

    def __init__(
        self,
        directories: Sequence[WatchedDirectory],
        limits: WatchLimits,
        node: NodeId,
        clock: Clock,
        threads: Threads,
        changed: Callable[[tuple[Alarm, ...]], None],
    ) -> None:
        self._directories = [(one, DiskProbe(one.path, f".edl-probe-{node}", threads)) for one in directories]
        self._limits = limits
        self._clock = clock
        self._changed = changed
        self._memories = [disks.DiskMemory() for _ in directories]
        self._raised: raising.Raised | None = None
        self._written: tuple[str, ...] = ()
        """Locations of the checkpoint that was written last, until it is measured."""
        self._written_s: float | None = None
        self._size_bytes, self._every_s = 0, 0.0
        self._task: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Start to look, on the running event loop."""
        self._task = asyncio.ensure_future(self._run())

    def drain(self) -> None:
        """Go on: the last checkpoint may still be written."""

    def hurry(self) -> None:
        """Go on: ``leave`` does not wait for anything."""

    async def leave(self) -> None:
        """Stop looking. A thread that a file system blocks stays behind."""
        if self._task is not None:
            await end(self._task)

    def kept(self, message: Kept) -> None:
        """Take note of a checkpoint that this node has written, for the rate at which the disk fills up."""
        if not message.error:
            now_s = self._clock.now_s()
            self._every_s = now_s - self._written_s if self._written_s is not None else 0.0
            self._written, self._written_s = (message.where,), now_s

    async def _run(self) -> None:
        for number in itertools.count():
            await self._look(write=number % WRITES_EVERY == 0)
            await asyncio.sleep(LOOK_S)

    async def _look(self, *, write: bool) -> None:
        loop = asyncio.get_running_loop()
        answers = []
        for watched, probe in self._directories:
            answer = asyncio.Event()
            answers.append(asyncio.ensure_future(answer.wait()))
            measure = self._written[0] if watched.checkpoints and self._written else ""
            probe.begin(_calls(loop, answer), write=write, measure=measure)
        _, late = await asyncio.wait(answers, timeout=ANSWER_S)
        for one in late:
            one.cancel()
        now_s = self._clock.now_s()
        readings: list[Reading] = []
        for index, (watched, probe) in enumerate(self._directories):
            self._memories[index], found = self._read(self._memories[index], watched, probe, now_s)
            readings += found
        before, after = self._raised, raising.update(self._raised or raising.Raised(), readings, now_s)
        self._raised = after
        if before is None or before.sorted != after.sorted:
            self._changed(after.sorted)

    def _read(
        self, memory: disks.DiskMemory, watched: WatchedDirectory, probe: DiskProbe, now_s: float
    ) -> tuple[disks.DiskMemory, tuple[Reading, ...]]:
        result = probe.result()
        if result.size_bytes and watched.checkpoints:
            self._size_bytes, self._written = result.size_bytes, ()
        sample = disks.DirectorySample(
            watched.about,
            now_s,
            watched.shared,
            result.error,
            result.free_bytes,
            result.total_bytes,
            result.free_inodes,
            result.total_inodes,
            result.write_error,
            result.write_s,
            self._size_bytes if watched.checkpoints else 0,
            self._every_s if watched.checkpoints else 0.0,
        )
        return disks.look(memory, sample, self._limits)


def _calls(loop: asyncio.AbstractEventLoop, answer: asyncio.Event) -> Callable[[], None]:
    """A function for another thread that sets an event of this loop, if the loop still runs."""

    def done() -> None:
        try:
            loop.call_soon_threadsafe(answer.set)
        except RuntimeError:
            return  # the launcher has ended

    return done
