"""Saves a sharded state: each node writes its own workers' parts, in the background.

All workers request a save at the same step boundary. A part that a node does not write would leave the checkpoint
incomplete, so no save is skipped: parts are written in order, and each commit stays in memory until its part is
written. If the disk cannot keep up, memory runs short and the workers wait before their next commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass

from edl.checkpoint.memory.snapshot_pool import Loan
from edl.errors import CheckpointError
from edl.ports import CheckpointStorage
from edl.tasks import AGAIN_S, Backoff, end
from edl.wire.records import Holding, Version

log = logging.getLogger(__name__)

OTHERS_S = 2.0
"""Seconds that a node about to enter another world waits for other nodes' parts after its own are written: on a network
file system they may become visible late."""
COMPLETE_S = 120.0
"""Seconds after which the node that looks after a checkpoint gives it up if other parts are missing."""

LONGEST_PAUSE_S = 1.0
"""Longest pause between two looks for the parts of other nodes."""

Run = Callable[[Callable[[], "str | None"]], Awaitable["str | None"]]
Report = Callable[[Version, str, str, float], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Save:
    loan: Loan
    asked_s: float


class PartSaves:
    """The saves of one node. Call all methods on the event loop."""

    def __init__(
        self, checkpoint_storage: CheckpointStorage, run: Run, report: Report, written: Callable[[Holding], None]
    ) -> None:
        """``run`` calls a function in a low-priority thread. ``report(version, where, error, took_s)``: a checkpoint is
        complete or has failed; ``where`` is empty if another node completed it. ``written``: a part of this node is in
        the directory."""
        self._checkpoint_storage = checkpoint_storage
        self._run = run
        self._report = report
        self._written = written
        self._loop = asyncio.get_running_loop()
        self._queue: list[_Save] = []
        self._queued = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._open: dict[Version, asyncio.Task[None]] = {}
        self._refused: set[Version] = set()
        self._complete = Version()
        """The newest complete checkpoint seen; older ones may already be deleted."""
        self._task = asyncio.create_task(self._write_all())
        self.unseen = False
        """A checkpoint may have become complete since the directory was last looked at."""

    def save(self, loan: Loan, *, looks_after: bool) -> None:
        """Queue a part for writing. ``looks_after``: this node makes sure that the checkpoint becomes complete, even if
        other nodes' parts become visible late."""
        self.unseen = True
        self._queue.append(_Save(loan, self._loop.time()))
        self._idle.clear()
        self._queued.set()
        version, shards = loan.held.holding.version, loan.held.holding.shards
        if looks_after and version not in self._open:
            self._open[version] = asyncio.create_task(self._look_after(version, shards))

    @property
    def busy(self) -> bool:
        """Whether parts are still to be written, or the directory has not been looked at since. Does not wait for
        missing parts of other nodes: those nodes may be gone, and must not delay the next world."""
        return bool(self._queue) or self.unseen

    async def settled(self) -> None:
        """Wait until this node's parts are written, and at most ``OTHERS_S`` for those of others."""
        await self._idle.wait()
        if self._open:
            await asyncio.wait(self._open.values(), timeout=OTHERS_S)

    async def finished(self, version: Version | None) -> None:
        """Wait until this node's parts are written and this checkpoint, if this node looks after it, is complete or
        given up."""
        await self._idle.wait()
        task = None if version is None else self._open.get(version)
        if task is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        """Stop writing and release all buffers."""
        for task in (self._task, *self._open.values()):
            await end(task)
        for save in self._queue:
            save.loan.release()
        self._queue.clear()

    async def _write_all(self) -> None:
        while True:
            await self._queued.wait()
            self._queued.clear()
            while self._queue:
                version = self._queue[0].loan.held.holding.version
                together = [save for save in self._queue if save.loan.held.holding.version == version]
                try:
                    await asyncio.gather(*(self._write(save) for save in together))
                finally:
                    self._queue = [save for save in self._queue if save not in together]
                    for save in together:
                        save.loan.release()
            self._idle.set()

    async def _write(self, save: _Save) -> None:
        held = save.loan.held.holding

        def write() -> str:
            return self._checkpoint_storage.write(held.version, save.loan.view, held.shard, held.shards)

        try:
            where = await self._run(write)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                log.exception("State: shard %d of commit %d was not written", held.shard, held.version.commit)
            if held.version not in self._refused:  # one report for all workers of this node
                self._report(held.version, "", str(error) or type(error).__name__, 0.0)
            self._refused.add(held.version)
            return
        self._written(held)
        if where:
            self._completed(held.version, where, self._loop.time() - save.asked_s)

    def _completed(self, version: Version, where: str, took_s: float) -> None:
        self._complete = max(self._complete, version)
        self._report(version, where, "", took_s)

    async def _look_after(self, version: Version, shards: int) -> None:
        begun_s = self._loop.time()
        pauses = Backoff(AGAIN_S, LONGEST_PAUSE_S)
        why = ""
        try:
            await self._idle.wait()
            until_s = self._loop.time() + COMPLETE_S
            while self._loop.time() < until_s and self._is_awaited(version):
                try:
                    where = await self._run(lambda: self._checkpoint_storage.complete(version, shards))
                except Exception as error:  # noqa: BLE001 - perhaps the directory is only out of reach for a moment
                    why = str(error) or type(error).__name__
                else:
                    if where is not None:
                        self._completed(version, where, self._loop.time() - begun_s)
                        return
                    why = ""
                await asyncio.sleep(pauses.next())
            if self._is_awaited(version):
                self._report(version, "", why or "the parts of other nodes are missing", 0.0)
        finally:
            self._open.pop(version, None)

    def _is_awaited(self, version: Version) -> bool:
        """Whether a checkpoint can still become complete, and no newer one has."""
        return version not in self._refused and self._complete < version


def parts_to_write(held: Collection[Holding], written: Iterable[Holding], version: Version | None) -> list[Holding]:
    """The parts that a launcher writes before it exits, in this order: all local parts of the newest commit, or of
    ``version``. Other nodes write theirs. In case they are gone, a sharded state also includes the newest commit of
    which all parts are here, if that is an earlier one."""
    newest = max((one.version for one in held), default=None) if version is None else version
    if newest is None:
        return []
    chosen = [one for one in held if one.version == newest]
    if version is None and chosen and not _is_whole(chosen):
        whole = [one for one in {one.version for one in held} if _is_whole([h for h in held if h.version == one])]
        chosen += [one for one in held if whole and one.version == max(whole)]
    there = set(written)
    return [one for one in sorted(chosen, key=lambda one: (one.version, one.shard)) if one not in there]


def _is_whole(parts: Collection[Holding]) -> bool:
    return any(
        {one.shard for one in parts if one.shards == shards} >= set(range(shards))
        for shards in {one.shards for one in parts}
    )
