"""The snapshots in a node's memory: combines the buffer table with the actual memory. Thread-safe.

Slow operations (allocating memory, reading a whole snapshot for its checksum) run without the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from edl.checkpoint.memory.buffer_table import (
    BufferRefusal,
    BufferTable,
    HeldSnapshot,
    SnapshotStream,
    Usage,
    Use,
    WritableBuffer,
)
from edl.checkpoint.memory.memory_files import MemoryFile
from edl.errors import CheckpointError
from edl.ports import Label
from edl.types import NodeId
from edl.wire import snapshot
from edl.wire.local import STATE
from edl.wire.records import Holding, Version


class Loan:
    """``Lent``: a snapshot that does not change until ``release``."""

    def __init__(
        self, snapshot_pool: MemorySnapshotPool, owner: NodeId, held: HeldSnapshot, memory: MemoryFile, owed: Version
    ) -> None:
        self._snapshot_pool = snapshot_pool
        self._owner = owner
        self._memory = memory
        self._over = False
        self.held = held
        self._owed = owed
        self._view = memory.view[: held.size].toreadonly()  # keeps the memory, whatever becomes of the pool

    @property
    def label(self) -> Label:
        """Describes it."""
        return Label(self._owner, self.held.holding, self.held.size, self._owed)

    @property
    def crc32(self) -> int:
        """Its checksum, which is computed once."""
        return self._memory.crc32(self.held.size)

    @property
    def descriptor(self) -> int:
        """The memory file, for this process only; others get ``read_only``."""
        return self._memory.descriptor

    @property
    def view(self) -> memoryview:
        """The bytes of the snapshot, read-only."""
        return self._view

    def read_only(self) -> int:
        """A new read-only descriptor for another process, for the caller to close."""
        return self._memory.read_only()

    def release(self) -> None:
        """Allow the buffer to be reused. Further calls do nothing."""
        if not self._over:
            self._over = True
            self._snapshot_pool.give_back(self.held.buffer)


class IncomingCopy:
    """``Arrival``: memory for a snapshot that is being received."""

    def __init__(
        self, snapshot_pool: MemorySnapshotPool, stream: SnapshotStream, label: Label, number: int, memory: MemoryFile
    ) -> None:
        self._snapshot_pool = snapshot_pool
        self._stream = stream
        self._label = label
        self._number = number
        self._memory = memory
        self._over = False
        self.view = memory.view[: label.size]

    def accept(self, crc32: int | None = None) -> None:
        """Accept the complete snapshot. Raises ``CheckpointError`` when it does not match its label."""
        try:
            found = self._snapshot_pool.read_header(self.view)
            if found != self._label.holding:
                raise CheckpointError(f"the peer sent {found} under the label of {self._label.holding}")
            self._memory.renewed(crc32)
            self._fill(found)
            self._snapshot_pool.report_pending_save(self._label.owed)
            self._end()
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop the snapshot. After ``accept``, or a second time, it does nothing."""
        if not self._over:
            self._drop()  # first: the next copy may be given the same buffer
            self._end()

    def _end(self) -> None:
        self._over = True
        self.view = memoryview(b"")
        self._snapshot_pool.arrived(self._stream)

    def _fill(self, found: Holding) -> None:
        self._snapshot_pool.fill(self._stream, self._number, self._label.size, found)

    def _drop(self) -> None:
        self._snapshot_pool.abandon(self._stream)


class IncomingForWorker(IncomingCopy):
    """``Arrival`` in a spare buffer of a worker that has not committed yet: memory that exists already, since the
    worker waited for its world, and that its commits will need. The worker knows nothing of this buffer yet."""

    def _fill(self, found: Holding) -> None:
        self._snapshot_pool.adopt(self._stream, self._number, self._label.size, found)

    def _drop(self) -> None:
        self._snapshot_pool.give_back(self._number)


class MemorySnapshotPool:
    """The ``SnapshotPool`` port, plus what ``MemoryCheckpoints`` needs. All methods are thread-safe."""

    def __init__(
        self,
        node: NodeId,
        job: str,
        limit_bytes: int,
        changed: Callable[[], None],
        report_pending_save: Callable[[Version], None] = lambda version: None,
        pending_save: Callable[[], Version] = Version,
    ) -> None:
        """``changed`` is called, in any thread, when a reader has released a buffer. ``report_pending_save`` is called,
        in any thread, with the saved commit that the source of a received part still has to write. ``pending_save``
        returns the one that this node still has to write."""
        self.report_pending_save = report_pending_save
        self._pending_save = pending_save
        self._node = node
        self._job = job
        self._changed = changed
        self._buffer_table = BufferTable(limit_bytes)
        self._memories: dict[int, MemoryFile] = {}
        self._arriving: set[SnapshotStream] = set()
        self._lock = threading.Lock()

    # --- of the ports ------------------------------------------------------------------------------------------------

    def arriving(self, label: Label) -> IncomingCopy | None:
        """Memory for a copy of another node's commit; None if it is already here. Raises ``CheckpointError``."""
        if label.owner == self._node:
            raise CheckpointError(f"a copy of this node's own commit, sent to node {self._node} itself")
        stream = SnapshotStream.of_node(label.owner, label.holding.shard)
        with self._lock:
            if any(held.holding == label.holding for own in self._shared() for held in self._buffer_table.held(own)):
                return None  # this node's own workers made the same commit
            newest = self._buffer_table.newest(stream)
            if newest is not None and newest.holding.version >= label.holding.version:
                if newest.holding == label.holding:
                    return None
                raise CheckpointError(f"node {self._node} has {newest.holding.version} of node {label.owner} already")
            self._reserve(stream, label)  # at once, so that no newer copy can come before this one
        return self._incoming(stream, label)

    # --- writing -----------------------------------------------------------------------------------------------------

    def incoming(self, stream: SnapshotStream, label: Label) -> IncomingCopy:
        """Memory for the next snapshot of this stream. Raises ``CheckpointError``."""
        with self._lock:
            self._reserve(stream, label)
        return self._incoming(stream, label)

    def fetched(self, stream: SnapshotStream, label: Label) -> IncomingCopy:
        """Memory for a commit that a new worker restores: a spare buffer of that worker, or else one of this stream.
        Raises ``CheckpointError``."""
        with self._lock:
            streams = self._buffer_table.streams(Use.WORKER, STATE) if label.holding.shards == 1 else ()
            for own in streams:
                number = self._buffer_table.take_spare(own, label.size)
                if number is not None:
                    return IncomingForWorker(self, own, label, number, self._memories[number])
        return self.incoming(stream, label)

    def adopt(self, stream: SnapshotStream, number: int, size: int, holding: Holding) -> None:
        """Make a spare buffer that was taken the stream's first snapshot. Raises ``CheckpointError``."""
        with self._open():
            if problem := self._buffer_table.adopt(stream, number, size, holding):
                raise CheckpointError(problem)

    def _reserve(self, stream: SnapshotStream, label: Label) -> None:
        """Let no other copy of this stream arrive until ``arrived``. Requires the lock. Raises ``CheckpointError``."""
        if stream in self._arriving:
            raise CheckpointError(f"another copy of shard {label.holding.shard} is already arriving from there")
        self._arriving.add(stream)

    def _incoming(self, stream: SnapshotStream, label: Label) -> IncomingCopy:
        try:
            room = self.room(stream, label.size, keep_previous=label.holding.shards > 1)
            if isinstance(room, BufferRefusal):
                raise CheckpointError(room.why)
            with self._open():
                memory = self._memories.get(room.buffer)
            if memory is None:
                raise CheckpointError("this state is no longer needed")
            return IncomingCopy(self, stream, label, room.buffer, memory)
        except BaseException:
            self.arrived(stream)
            raise

    def arrived(self, stream: SnapshotStream) -> None:
        """Allow the next copy of this stream."""
        with self._lock:
            self._arriving.discard(stream)

    def room(self, stream: SnapshotStream, size: int, *, keep_previous: bool = False) -> WritableBuffer | BufferRefusal:
        """A buffer with memory for the stream's next snapshot. Slow when memory has to be allocated."""
        with self._open():
            room = self._buffer_table.room(stream, size, keep_previous=keep_previous)
            if isinstance(room, BufferRefusal) or not room.new:
                return self._renewed(room)
            self._buffer_table.pin(room.buffer)  # reserved until it has memory
        try:
            made = self._made(stream, room)
        finally:
            self._changed()
        return self._room_there(stream, size, keep_previous, made) if isinstance(made, BufferRefusal) else made

    def _room_there(
        self, stream: SnapshotStream, size: int, keep_previous: bool, refusal: BufferRefusal
    ) -> WritableBuffer | BufferRefusal:
        """Room in the buffers that the stream has, because memory for a further one is lacking at the moment."""
        with self._open():
            return self._renewed(
                self._buffer_table.room(stream, size, keep_previous=keep_previous, no_more=refusal.why)
            )

    def _renewed(self, room: WritableBuffer | BufferRefusal) -> WritableBuffer | BufferRefusal:
        """Prepare a buffer that exists for new content. Requires the lock."""
        if isinstance(room, WritableBuffer):
            if room.buffer not in self._memories:
                return BufferRefusal("its memory is still being allocated", later=True)
            self._memories[room.buffer].renewed()
        return room

    def ahead(self, stream: SnapshotStream, size: int, most: int) -> bool:
        """Allocate one more buffer for a stream's later snapshots, unless it has ``most`` or memory is short. Returns
        whether it has been allocated."""
        with self._open():
            room = self._buffer_table.spare(stream, size, most)
            if room is None:
                return False
            self._buffer_table.pin(room.buffer)  # reserved until it has memory
        try:
            return isinstance(self._made(stream, room), WritableBuffer)
        finally:
            self._changed()

    def _made(self, stream: SnapshotStream, room: WritableBuffer) -> WritableBuffer | BufferRefusal:
        memory, problem = None, "this state is no longer needed"
        try:
            memory = MemoryFile(room.capacity, touch=stream.use is Use.WORKER)
        except (OSError, MemoryError) as error:
            problem = f"no memory for it: {error}"
        with self._open():
            wanted = self._buffer_table.has(room.buffer)
            if wanted and memory is not None:
                self._memories[room.buffer] = memory
            elif wanted:
                self._buffer_table.remove(room.buffer)
            self._buffer_table.unpin(room.buffer)
        if wanted and memory is not None:
            return room
        if memory is not None:
            memory.close()
        return BufferRefusal(problem)

    def load(self, read: Callable[[Callable[[int], memoryview]], tuple[Version, bool]]) -> Holding | Version:
        """Let ``read`` fill the memory that it requests, and hold the result; returns only the version if workers read
        it themselves. Raises ``CheckpointError``, and ``MemoryError`` when there is no room."""
        stream = SnapshotStream.loaded("storage")
        filled: list[tuple[int, memoryview]] = []

        def allocate(size: int) -> memoryview:
            filled.clear()
            room = self.room(stream, size)
            if isinstance(room, BufferRefusal):
                raise MemoryError(room.why)
            with self._lock:
                filled.append((room.buffer, self._memories[room.buffer].view[:size]))
            return filled[0][1]

        try:
            version, sharded = read(allocate)
            if sharded:
                return version
            number, view = filled[0]
            holding = self.read_header(view)
            if holding.version != version:
                raise CheckpointError(f"the checkpoint directory's {version} contains {holding.version}")
            self.fill(stream, number, len(view), holding)
            return holding
        finally:
            filled.clear()
            self.abandon(stream)

    def duplicate(self, number: int) -> int:
        """A new writable descriptor of a buffer, for the caller to close."""
        with self._lock:
            return self._memories[number].duplicate()

    def check(self, stream: SnapshotStream, number: int, size: int, holding: Holding) -> str:
        """The reason why this cannot be the next snapshot of a worker's stream; empty if it can."""
        with self._lock:
            problem = self._buffer_table.may_fill(stream, number, size)
            newest = self._buffer_table.newest(stream)
            if problem:
                return problem
            view = self._memories[number].view[:size]
        if newest is not None and holding.version < newest.holding.version:
            return f"{holding.version} cannot come after {newest.holding.version}"
        try:
            found = self.read_header(view)
        except CheckpointError as error:
            return str(error)
        return "" if found == holding else f"the buffer holds {found} and not {holding}"

    def fill(self, stream: SnapshotStream, number: int, size: int, holding: Holding) -> None:
        """Mark a buffer as the stream's newest complete snapshot. Raises ``CheckpointError`` if that is not
        possible."""
        with self._open():
            problem = self._buffer_table.may_fill(stream, number, size)
            if problem:
                raise CheckpointError(problem)
            self._buffer_table.fill(stream, size, holding)

    def abandon(self, stream: SnapshotStream) -> None:
        """Release the buffer that a dead writer was filling."""
        with self._open():
            self._buffer_table.abandon(stream)

    def abandon_slot(self, slot: int) -> None:
        """Release the buffers that the dead worker in this slot was filling."""
        with self._open():
            for stream in self._buffer_table.streams(Use.WORKER):
                if stream.owner == str(slot):
                    self._buffer_table.abandon(stream)

    def read_header(self, view: memoryview) -> Holding:
        """The identity in a snapshot's header. Raises ``CheckpointError`` if it is invalid or another job's."""
        meta = snapshot.parse(view, job=self._job).meta
        return Holding(Version(meta.era, meta.commit), meta.shard, meta.shards)

    # --- reading -----------------------------------------------------------------------------------------------------

    def borrow(self, version: Version, shard: int) -> Loan | None:
        """A part of a commit; None if it is not here."""
        return self._borrow(lambda held: (held.holding.version, held.holding.shard) == (version, shard))

    def borrow_own(self, slot: int, name: str, version: Version) -> Loan | None:
        """A commit of the worker in this slot, or of its predecessor."""
        with self._lock:
            return self._loan(SnapshotStream.of_worker(slot, name), lambda held: held.holding.version == version)

    def borrow_newer(self, holding: Holding) -> Loan | None:
        """A newer snapshot of the same part: of this node's workers, loaded, or another node's copy."""
        with self._lock:
            for stream in self._shared():
                loan = self._loan(stream, lambda held: _replaces(held.holding, holding))
                if loan is not None:
                    return loan
        return None

    def borrow_newest(self, stream: SnapshotStream) -> Loan | None:
        """The newest snapshot of a stream."""
        with self._lock:
            return self._loan(stream, lambda held: True)

    def newest_size(self, stream: SnapshotStream) -> int:
        """Bytes of the newest snapshot of a stream; 0 if there is none."""
        with self._lock:
            newest = self._buffer_table.newest(stream)
        return 0 if newest is None else newest.size

    def give_back(self, number: int) -> None:
        """End a loan, so that the buffer can be reused."""
        with self._open():
            self._buffer_table.unpin(number)
        self._changed()

    def _borrow(self, wanted: Callable[[HeldSnapshot], bool]) -> Loan | None:
        with self._lock:
            for stream in self._shared():
                loan = self._loan(stream, wanted)
                if loan is not None:
                    return loan
        return None

    def _loan(self, stream: SnapshotStream, wanted: Callable[[HeldSnapshot], bool]) -> Loan | None:
        for held in self._buffer_table.held(stream):
            if wanted(held):
                self._buffer_table.pin(held.buffer)
                owner = NodeId(stream.owner) if stream.use is Use.REPLICA else self._node
                return Loan(self, owner, held, self._memories[held.buffer], self._pending_save())
        return None

    # --- what there is -----------------------------------------------------------------------------------------------

    def holdings(self) -> tuple[Holding, ...]:
        """All complete parts of the shared state, including copies and loaded ones."""
        with self._lock:
            return tuple(
                sorted({held.holding for s in self._shared() for held in self._buffer_table.held(s)}, key=_order)
            )

    def own(self) -> tuple[tuple[SnapshotStream, Holding], ...]:
        """The newest shared state of each worker."""
        with self._lock:
            pairs = [
                (stream, self._buffer_table.newest(stream)) for stream in self._buffer_table.streams(Use.WORKER, STATE)
            ]
        return tuple((stream, held.holding) for stream, held in pairs if held is not None)

    def newest(self) -> Holding | None:
        """The newest part of the shared state."""
        return max(self.holdings(), key=_order, default=None)

    def usage(self) -> Usage:
        """Bytes of memory by use."""
        with self._lock:
            return self._buffer_table.usage()

    # --- discarding snapshots ----------------------------------------------------------------------------------------

    def outgrown(self, stream: SnapshotStream) -> None:
        """Drop older loaded state after a worker has committed, older commits of slots whose worker is gone or does not
        commit any more, and, of a sharded state, copies that are no part of the last three commits: those of a world of
        another size, or of a node that is gone."""
        with self._open():
            held = self._buffer_table.held(stream)
            sharded = bool(held) and held[0].holding.shards > 1
            needed, uses = (3, (Use.LOADED, Use.REPLICA)) if sharded else (1, (Use.LOADED,))
            if len(held) >= needed:
                oldest = held[needed - 1].holding.version
                self._drop_older(oldest, uses)
                self._forget_older(oldest)

    def trim(self, restore: Version) -> None:
        """Enter a world that begins from this commit. Once it is here, older snapshots are dropped, and so are later
        ones in the same stream, which belong to an abandoned history."""
        with self._open():
            streams = [*self._shared(), *(s for s in self._buffer_table.streams(Use.WORKER) if s.name != STATE)]
            for stream in streams:
                versions = [held.holding.version for held in self._buffer_table.held(stream)]
                if restore in versions:
                    for version in versions[: versions.index(restore)]:
                        self._buffer_table.forget(stream, version)
            if any(
                held.holding.version >= restore for stream in self._shared() for held in self._buffer_table.held(stream)
            ):
                self._drop_older(restore, (Use.LOADED, Use.REPLICA))

    def close(self) -> None:
        """Release all memory files of this node."""
        with self._lock:
            memories, self._memories = list(self._memories.values()), {}
        for memory in memories:
            memory.close()

    def _drop_older(self, version: Version, uses: Collection[Use]) -> None:
        for use in uses:
            for stream in self._buffer_table.streams(use):
                held = self._buffer_table.held(stream)
                if held and stream not in self._arriving and all(one.holding.version < version for one in held):
                    self._buffer_table.drop(stream)

    def _forget_older(self, version: Version) -> None:
        """Forget what slots hold that have not committed since. A buffer that a worker has been given stays its own."""
        for stream in self._buffer_table.streams(Use.WORKER, STATE):
            versions = [held.holding.version for held in self._buffer_table.held(stream)]
            if versions and max(versions) < version:
                for one in versions:
                    self._buffer_table.forget(stream, one)

    def _shared(self) -> tuple[SnapshotStream, ...]:
        own = self._buffer_table.streams(Use.WORKER, STATE)
        return (*own, *self._buffer_table.streams(Use.LOADED), *self._buffer_table.streams(Use.REPLICA))

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the lock; afterwards release the memory of freed buffers."""
        freed = []
        with self._lock:
            try:
                yield
            finally:
                freed = [self._memories.pop(number, None) for number in self._buffer_table.collect()]
        for memory in freed:
            if memory is not None:
                memory.close()


def _replaces(new: Holding, old: Holding) -> bool:
    return new.version > old.version and (new.shard, new.shards) == (old.shard, old.shards)


def _order(holding: Holding) -> tuple[Version, int, int]:
    return holding.version, holding.shard, holding.shards
