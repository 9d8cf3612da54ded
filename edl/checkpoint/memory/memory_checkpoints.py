"""In-memory checkpoints: the commits of this node's workers, in the launcher's memory, where they outlive the workers.

Workers copy their commits into memory files that the launcher allocates. From there they go to another node, to the
checkpoint directory, and back to restarted workers. Long operations run in threads: those beside training at low
priority, those that a worker waits for at normal priority.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from edl.checkpoint.memory.background import WaitingPool, in_pool, in_thread, lower_priority
from edl.checkpoint.memory.buffer_table import BufferRefusal, SnapshotStream, Usage, WritableBuffer
from edl.checkpoint.memory.copy_policy import Copying
from edl.checkpoint.memory.memory_shortages import MemoryShortages
from edl.checkpoint.memory.part_reading import PartReading
from edl.checkpoint.memory.pending_saves import PendingSave
from edl.checkpoint.memory.preallocation import Preallocation
from edl.checkpoint.memory.replication import CommitReplication
from edl.checkpoint.memory.shard_saves import PartSaves, parts_to_write
from edl.checkpoint.memory.snapshot_pool import Loan, MemorySnapshotPool
from edl.errors import CheckpointError, ProtocolError
from edl.ports import CheckpointStorage, Copies
from edl.tasks import AGAIN_S, end
from edl.types import NodeId
from edl.wire.local import OWN, STATE, Committed
from edl.wire.messages import Kept
from edl.wire.records import NO_STATE, Holding, Source, Version

T = TypeVar("T")
log = logging.getLogger(__name__)

WRITES = 2
"""Attempts at writing a saved commit after the workers have ended; the cause of the first failure may be gone."""
PART_WRITERS = 4
"""Parts of a sharded commit that a node writes at once."""


@dataclass(frozen=True, slots=True)
class BufferGrant:
    """A buffer for a worker's next commit."""

    buffer: int
    size: int
    descriptor: int | None
    """For the caller to close; None if this worker already has the buffer."""


@dataclass(slots=True)
class _Slot:
    """The buffers and loans of one worker."""

    buffers: set[int]
    loans: list[Loan]
    gone: bool = False


class MemoryCheckpoints:
    """The commits and copies that one node holds. Call all methods on the event loop."""

    def __init__(
        self,
        node: NodeId,
        job: str,
        *,
        limit_bytes: int,
        copies: Copies,
        checkpoint_storage: CheckpointStorage | None,
        on_kept: Callable[[Kept], None],
        on_room: Callable[[str], None] = lambda why: None,
        on_copy: Callable[[], None] = lambda: None,
        copying: Copying = Copying.AUTO,
    ) -> None:
        """``on_kept(outcome)``: a commit has been written to the checkpoint directory, or writing failed.
        ``on_room(why)``: there is no memory for a worker's commits, or there is again (empty). ``on_copy()``: a part of
        another node's commit is here."""
        self._checkpoint_storage = checkpoint_storage
        self._on_kept = on_kept
        self._on_copy = on_copy
        self._shortages = MemoryShortages(on_room)
        self.too_large = Version()
        """A checkpoint that does not fit into this node's memory: workers read it from the directory themselves."""
        self._loop = asyncio.get_running_loop()
        self._released = asyncio.Event()
        self._snapshot_pool = MemorySnapshotPool(
            node, job, limit_bytes, self._buffer_released, self._copy_received, self._save_to_write
        )
        self._slots: dict[int, _Slot] = {}
        self._stream_locks: dict[SnapshotStream, asyncio.Lock] = {}
        self._parts: dict[SnapshotStream, int] = {}
        self._maker = WaitingPool(2, "edl-memory")
        self._ahead = Preallocation(self._snapshot_pool, lambda make: in_pool(self._maker, make))
        self._warned_no_directory = False
        self._writer = False
        self._pending_save = PendingSave()
        self._replication = CommitReplication(node, self._snapshot_pool, copies, copying, self._one_more)
        self.reading = PartReading(node, self._snapshot_pool, copies)
        self._took_over_save = False
        """The commit to be written was saved in an earlier world, whose writer may have written it."""
        self._to_save = asyncio.Event()
        self._persisted: dict[Holding, str] = {}
        self._writing = asyncio.Lock()
        self._part_writers = WaitingPool(PART_WRITERS, "edl-parts", lower_priority)
        self._part_saves = (
            None
            if checkpoint_storage is None
            else PartSaves(checkpoint_storage, self._in_background, self._sharded_save_ended, self._part_written)
        )
        self._task = asyncio.create_task(self._persist_saves())

    def start(self, host: str, port: int = 0) -> int:
        """Start serving other nodes; returns the port. Raises ``PortInUse``."""
        return self._replication.start(host, port)

    async def close(self) -> None:
        """End all operations and release the memory."""
        await end(self._task)
        self._ahead.close()
        if self._part_saves is not None:
            await self._part_saves.close()
        await self._replication.close()
        await self.reading.close()
        for pool in (self._maker, self._part_writers):
            pool.shutdown(wait=False, cancel_futures=True)
        for slot in tuple(self._slots):
            self.forget_worker(slot)
        self._snapshot_pool.close()

    # --- workers -----------------------------------------------------------------------------------------------------

    def want(
        self, slot: int, stream: str, size: int, saves: bool = False, waits: bool = False
    ) -> Coroutine[Any, Any, BufferGrant | BufferRefusal]:
        """A buffer for the next commit of the slot's current worker; waits while all are being read. ``saves``: its
        commits will be written to the checkpoint directory. ``waits``: comes when its other buffers are there, too."""
        mine = SnapshotStream.of_worker(slot, stream)
        if saves:
            self._ahead.read(mine)
        return self._grant(slot, self._slot(slot), mine, size, waits)

    async def _grant(
        self, slot: int, worker: _Slot, stream: SnapshotStream, size: int, waits: bool
    ) -> BufferGrant | BufferRefusal:
        logged = False
        if stream.name == STATE and self._parts.get(stream, 1) > 1:
            await self._replication.wait_for_copy(stream)
        async with self._stream_locks.setdefault(stream, asyncio.Lock()):
            while not worker.gone:
                released = self._released
                room = await in_pool(self._maker, self._room, stream, size)
                if isinstance(room, WritableBuffer):
                    self._shortages.note(stream, "")
                    self._ahead.look(stream, size)
                    if waits:
                        await self.made_ahead()
                    return self._granted(worker, room)
                if not room.later:
                    self._shortages.note(stream, "" if worker.gone else room.why)
                    return room
                if not logged:
                    log.warning("State: slot %d waits for a buffer before its next commit: %s", slot, room.why)
                    logged = True
                if released.is_set():  # at once, by a buffer for which there was no memory
                    await asyncio.sleep(AGAIN_S)
                await released.wait()
        return BufferRefusal("the worker is gone")

    def committed(self, slot: int, message: Committed) -> None:
        """Accept the commit in the worker's buffer, effective at once.

        Raises ``ProtocolError`` when the buffer is not the worker's or does not hold what the message says.
        """
        stream = SnapshotStream.of_worker(slot, message.stream)
        holding = Holding(Version(message.era, message.commit), message.shard, message.shards)
        problem = self._snapshot_pool.check(stream, message.buffer, message.size, holding)
        if not problem:
            try:
                self._snapshot_pool.fill(stream, message.buffer, message.size, holding)
            except CheckpointError as error:
                problem = str(error)
        if problem:
            raise ProtocolError(f"slot {slot}, commit {message.commit}: {problem}")
        self._parts[stream] = message.shards
        self.restored(slot)
        if message.stream == STATE:
            self._snapshot_pool.outgrown(stream)
            self.reading.forget()
            self._replication.committed(stream, [NodeId(node) for node in message.others])
            if self._replication.copies(stream, message.shards) or (
                message.save and (self._writer or message.shards > 1)
            ):
                self._ahead.read(stream)
            if message.save and message.shards == 1:
                self._request_save(holding.version)
            if message.save and message.shards > 1:
                self._save_part(holding)

    def _save_part(self, holding: Holding) -> None:
        """Queue a part before the worker gets its next buffer, so that this one is kept."""
        if self._part_saves is None:
            self._warn_no_directory(holding.version)
            return
        loan = self._snapshot_pool.borrow(holding.version, holding.shard)
        assert loan is not None, "it has just been filled"  # noqa: S101
        if self._writer:
            self._pending_save.take(holding.version, whole=False)
        self._part_saves.save(loan, looks_after=self._writer)

    async def _one_more(self, stream: SnapshotStream, size: int) -> None:
        self._ahead.read(stream)
        self._ahead.look(stream, size)
        await self.made_ahead()

    async def made_ahead(self) -> None:
        """Wait until no buffer is being allocated ahead."""
        await self._ahead.idle.wait()

    def restored(self, slot: int) -> None:
        """Release the memory that ``piece`` lent to the worker."""
        worker = self._slots.get(slot)
        while worker is not None and worker.loans:
            worker.loans.pop().release()

    def forget_worker(self, slot: int) -> None:
        """Release everything of a dead worker, after its last message has been handled."""
        self.restored(slot)
        worker = self._slots.pop(slot, None)
        if worker is not None:
            worker.gone = True
        for name in (STATE, OWN):
            self._shortages.note(SnapshotStream.of_worker(slot, name), "")  # perhaps no worker follows
        self._snapshot_pool.abandon_slot(slot)
        self._buffer_released()

    def piece(
        self, slot: int, stream: str, version: Version, shard: int, sources: Sequence[Source] = ()
    ) -> Coroutine[Any, Any, tuple[int, int]]:
        """A read-only descriptor (for the caller to close) and the size in bytes of a part of a commit.

        It comes from this node's memory or from one of ``sources``, and does not change until ``restored``, the
        worker's next commit or its end. Raises ``CheckpointError`` that names everything that was tried.
        """
        return self._piece(slot, self._slot(slot), stream, version, shard, sources)

    async def _piece(
        self, slot: int, worker: _Slot, stream: str, version: Version, shard: int, sources: Sequence[Source]
    ) -> tuple[int, int]:
        if stream == STATE:
            loan = self._snapshot_pool.borrow(version, shard)
            if loan is None:
                await self._replication.fetch(version, shard, sources)
                loan = self._snapshot_pool.borrow(version, shard)
            if loan is None:
                raise CheckpointError(f"shard {shard} of {version} was received, but dropped before it was used")
        else:
            loan = self._snapshot_pool.borrow_own(slot, stream, version)
            if loan is None:
                raise CheckpointError(f"slot {slot} has no values of its own for {version}")
        if worker.gone:
            loan.release()
            raise CheckpointError("the worker is gone")
        worker.loans.append(loan)
        return loan.read_only(), loan.held.size

    # --- what there is -----------------------------------------------------------------------------------------------

    def holdings(self) -> tuple[Holding, ...]:
        """All complete parts of the shared state in this node's memory."""
        return self._snapshot_pool.holdings()

    def usage(self) -> Usage:
        """Bytes of memory by use."""
        return self._snapshot_pool.usage()

    def trim(self, restore: Version) -> None:
        """Release snapshots that are useless in a world that begins from this commit."""
        if restore != Version():
            self._snapshot_pool.trim(restore)

    # --- other nodes -------------------------------------------------------------------------------------------------

    def keep_with(self, node: NodeId, host: str, port: int) -> None:
        """Send a copy of each commit to this node from now on, the newest at once; an empty ``node`` stops copying."""
        self._replication.keep_with(node, host, port)

    def holders(self) -> int:
        """The smallest number of nodes with a recent commit of this node's in memory; see
        ``CommitReplication.holders``."""
        return self._replication.holders()

    async def copied_before_leaving(self, timeout_s: float) -> bool:
        """Wait until this node's newest commits are on the other node; returns whether they are. Includes commits that
        other nodes also held so far, since this node no longer knows those nodes."""
        return await self._replication.copied_before_leaving(timeout_s)

    # --- the checkpoint directory ------------------------------------------------------------------------------------

    def enter(self, restore: Version, members: Collection[NodeId], *, writes: bool) -> None:
        """Enter a world of these nodes that begins from this commit. ``writes``: this node writes what the workers
        save, including saves of an earlier world that its writer could not write."""
        self._writer = writes
        self._pending_save.begin(restore)
        self.trim(restore)
        self._took_over_save = writes
        self._to_save.set()
        self._replication.enter(members)

    def _request_save(self, version: Version) -> None:
        if self._checkpoint_storage is None:
            if self._writer:
                self._warn_no_directory(version)
            return
        self._pending_save.take(version)
        if self._writer:
            self._to_save.set()

    def _copy_received(self, owed: Version) -> None:
        """A part of another node's commit is here; that node's workers saved ``owed``, and it has yet to write that.
        Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if owed != Version() and self._checkpoint_storage is not None:
                self._loop.call_soon_threadsafe(self._take_over_save, owed)
            self._loop.call_soon_threadsafe(self._on_copy)

    def _take_over_save(self, version: Version) -> None:
        """A new writer learns about outstanding saves together with the state that it fetches."""
        self._pending_save.take(version)
        if self._writer:
            self._took_over_save = True
            self._to_save.set()

    def _save_to_write(self) -> Version:
        """The saved commit that this node would have to write. Any thread."""
        return self._pending_save.to_write or NO_STATE

    async def flush_saves(self) -> str:
        """Wait until the newest saved commit is written, if this node is the writer; returns ``unsaved``."""
        if self._part_saves is not None:
            await self._part_saves.finished(self._pending_save.awaited)
        for _ in range(WRITES):
            version = self._pending_save.to_write
            if version is None or not self._writer:
                break
            await self._persist(Holding(version))
        return self.unsaved

    @property
    def saving(self) -> bool:
        """Whether ``flush_saves`` has anything to wait for."""
        return self._writer and self._pending_save.due

    @property
    def unsaved(self) -> str:
        """The reason why the newest saved commit is not in the checkpoint directory; empty if it is or if another node
        writes it."""
        return self._pending_save.text if self._writer else ""

    async def look(self) -> tuple[Version, bool]:
        """The newest checkpoint in the directory, and whether workers have to read it themselves. Raises
        ``CheckpointError`` when there are some but none is usable."""
        newest = (
            await in_thread("edl-look", self._checkpoint_storage.newest)
            if self._checkpoint_storage is not None
            else None
        )
        found = newest or (Version(), False)
        self._pending_save.written(found[0])
        return found

    async def load(self) -> Version:
        """Load the newest usable checkpoint into memory; ``Version()`` if there is none. One that workers read
        themselves is only verified. Raises ``CheckpointError``."""
        checkpoint_storage = self._checkpoint_storage
        if checkpoint_storage is None:
            return Version()
        newest, theirs = await self.look()
        if newest == Version() or (not theirs and any(held.version == newest for held in self.holdings())):
            return newest
        try:
            found = await in_thread("edl-load", lambda: self._snapshot_pool.load(checkpoint_storage.load))
        except MemoryError as error:
            log.warning("State: commit %d stays in the checkpoint directory: %s", newest.commit, error)
            await in_thread("edl-verify", lambda: checkpoint_storage.verify(newest))
            self.too_large = newest
            return newest
        if isinstance(found, Version):
            return found
        self._persisted[found] = ""
        return found.version

    async def flush(self, reason: str, version: Version | None = None) -> Version | None:
        """Write the newest state that this node holds, or that of ``version``, which the directory was seen to lack,
        even if this node is not the writer.

        Returns the version that is now in the directory, None if none is; of a sharded state only the local parts are
        written.
        """
        if self._checkpoint_storage is None:
            return None
        if version is not None:  # a node that could not write its own part may have deleted what was written before
            self._persisted = {held: where for held, where in self._persisted.items() if held.version != version}
        await self.settled()
        missing = parts_to_write(self.holdings(), self._persisted, version)
        if missing:
            log.info("State: writing commit %d to the checkpoint directory: %s", missing[-1].version.commit, reason)
        for holding in missing:
            await self._persist(holding)
        newest = self._snapshot_pool.newest()
        wanted = version if version is not None or newest is None else newest.version
        parts = [held for held in self.holdings() if held.version == wanted]
        return wanted if parts and all(holding in self._persisted for holding in parts) else None

    @property
    def busy(self) -> bool:
        """Whether a saved sharded commit may still be being written."""
        return self._part_saves is not None and self._part_saves.busy

    async def settled(self) -> None:
        """Wait until all saved parts of this node's workers are written."""
        if self._part_saves is not None:
            await self._part_saves.settled()

    def looked(self) -> None:
        """Note that the checkpoint directory has just been looked at."""
        if self._part_saves is not None:
            self._part_saves.unseen = False

    def _part_written(self, holding: Holding) -> None:
        self._persisted = {one: where for one, where in self._persisted.items() if one.version >= holding.version}
        self._persisted[holding] = ""

    def _in_background(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]:
        return in_pool(self._part_writers, work)

    def _sharded_save_ended(self, version: Version, where: str, error: str, took_s: float) -> None:
        """Record the outcome of a sharded checkpoint. Without ``where`` and ``error``, another node has reported it."""
        if error:
            self._pending_save.failed(version, error)
        else:
            self._pending_save.written(version)
        if where or error:
            self._on_kept(Kept(version, where, error, took_s, sharded=True))

    async def wrote_through(self, version: Version, size: int, crc32: int, error: str) -> None:
        """Complete a checkpoint that a worker without memory for its commit wrote itself, or record that it failed."""
        checkpoint_storage = self._checkpoint_storage
        if checkpoint_storage is None:
            return
        self._pending_save.take(version, whole=False)
        if error:
            self._pending_save.failed(version, error)
            self._on_kept(Kept(version, "", error))
            return
        async with self._writing:
            await self._kept(version, lambda: checkpoint_storage.accept(version, size, crc32))

    async def _persist_saves(self) -> None:
        while True:
            await self._to_save.wait()
            self._to_save.clear()
            try:
                await self._persist_save()
            except Exception:
                log.exception("State: a bug in edl: a saved commit was not written")  # later ones must be

    async def _persist_save(self) -> None:
        inherited, self._took_over_save = self._took_over_save, False
        if inherited and self._pending_save.to_write is not None:
            with contextlib.suppress(CheckpointError):  # reported when a world is to begin from there
                await self.look()
        version = self._pending_save.to_write
        if version is not None and self._writer and not (inherited and not self._holds(Holding(version))):
            await self._persist(Holding(version))

    def _warn_no_directory(self, version: Version) -> None:
        if not self._warned_no_directory:
            self._on_kept(Kept(version, "", "there is no checkpoint directory: name one with --checkpoint-dir"))
        self._warned_no_directory = True

    async def _persist(self, holding: Holding) -> None:
        """Write a commit, or the one that has replaced it since, unless that has already been done."""
        checkpoint_storage = self._checkpoint_storage
        if checkpoint_storage is None:
            self._warn_no_directory(holding.version)
            return
        async with self._writing:
            if holding in self._persisted:
                return
            loan = self._lent(holding)
            if loan is None:
                why = "it is no longer in memory"
                self._pending_save.failed(holding.version, why)
                self._on_kept(Kept(holding.version, "", why))
                return
            taken = loan.held.holding
            if taken in self._persisted:
                loan.release()
                return

            def write() -> str:
                try:
                    return checkpoint_storage.write(taken.version, loan.view, taken.shard, taken.shards)
                finally:
                    loan.release()

            where = await self._kept(taken.version, write, sharded=taken.shards > 1)
            if where is not None:
                older = [held for held in self._persisted if held.version < taken.version]
                for held in older:
                    del self._persisted[held]
                self._persisted[taken] = where

    def _holds(self, holding: Holding) -> bool:
        loan = self._lent(holding)
        if loan is not None:
            loan.release()
        return loan is not None

    def _lent(self, holding: Holding) -> Loan | None:
        loan = self._snapshot_pool.borrow(holding.version, holding.shard)
        if loan is None and holding.shards == 1:  # a newer part alone would be useless
            loan = self._snapshot_pool.borrow_newer(holding)
        return loan

    async def _kept(self, version: Version, write: Callable[[], str], *, sharded: bool = False) -> str | None:
        begun_s = self._loop.time()
        try:
            where = await in_thread("edl-persist", write, lower_priority)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                log.exception("State: commit %d was not written", version.commit)
            why = str(error) or type(error).__name__
            self._pending_save.failed(version, why)
            self._on_kept(Kept(version, "", why))
            return None
        if where:  # else parts are missing, and the node that writes the last one reports it
            self._pending_save.written(version)
            self._on_kept(Kept(version, where, "", self._loop.time() - begun_s, sharded))
        return where

    # --- inside ------------------------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> _Slot:
        return self._slots.setdefault(slot, _Slot(set(), []))

    def _room(self, stream: SnapshotStream, size: int) -> WritableBuffer | BufferRefusal:
        # Streams that only this slot has must not run ahead of the commits that others can restore, so the previous
        # commit is kept too.
        keep = stream.name == OWN or self._parts.get(stream, 1) > 1
        return self._snapshot_pool.room(stream, size, keep_previous=keep)

    def _granted(self, worker: _Slot, room: WritableBuffer) -> BufferGrant | BufferRefusal:
        if worker.gone:
            return BufferRefusal("the worker is gone")
        descriptor = None if room.buffer in worker.buffers else self._snapshot_pool.duplicate(room.buffer)
        worker.buffers.add(room.buffer)
        return BufferGrant(room.buffer, room.capacity, descriptor)

    def _buffer_released(self) -> None:
        """Wake waiting writers: a reader has released a buffer. Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._released.set()
        self._released = asyncio.Event()
