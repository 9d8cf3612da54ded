"""Which buffer holds which snapshot: bookkeeping only, no memory is touched here.

A **stream** is a sequence of snapshots: the commits of one worker, the copies of another node's commits, or loaded
state. For each stream there is a newest complete snapshot, the buffer that is being written, and buffers pinned by
readers. A buffer that is pinned or holds the newest complete snapshot is never given to a writer, so neither a crash in
the middle of a copy nor a slow disk can damage what is held.

Not thread-safe: the caller holds a lock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from edl.types import NodeId
from edl.wire.records import Holding, Version

MOST_BUFFERS = 3
"""Buffers per stream: the newest snapshot, the one being written, and one being read. One more if the previous snapshot
is kept too."""
_PAGE = 4096


class Use(enum.Enum):
    """The purpose of a stream's memory."""

    WORKER = "workers"
    REPLICA = "copies of other nodes"
    LOADED = "loaded state"


@dataclass(frozen=True, slots=True)
class SnapshotStream:
    """The identity of one stream of snapshots."""

    use: Use
    owner: str
    """The slot; the node whose state it is; or empty."""
    name: str
    """``state`` or ``own`` for a worker; the shard number for another node's copy; any name for loaded state."""

    @classmethod
    def of_worker(cls, slot: int, name: str) -> SnapshotStream:
        """The commits of the worker in this slot."""
        return cls(Use.WORKER, str(slot), name)

    @classmethod
    def of_node(cls, owner: NodeId, shard: int) -> SnapshotStream:
        """Copies of one part of another node's commits."""
        return cls(Use.REPLICA, owner, str(shard))

    @classmethod
    def loaded(cls, name: str) -> SnapshotStream:
        """State read from the checkpoint directory or fetched from another node."""
        return cls(Use.LOADED, "", name)


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A complete snapshot in a buffer."""

    buffer: int
    holding: Holding
    size: int


@dataclass(frozen=True, slots=True)
class WritableBuffer:
    """A buffer to write into. ``new``: its memory has yet to be allocated."""

    buffer: int
    capacity: int
    new: bool


@dataclass(frozen=True, slots=True)
class BufferRefusal:
    """No buffer, and the reason. ``later``: one becomes available when a reader releases its snapshot."""

    why: str
    later: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of memory by use, and the limit."""

    limit: int
    workers: int
    replicas: int
    loaded: int

    @property
    def total(self) -> int:
        """Bytes in use, for all purposes."""
        return self.workers + self.replicas + self.loaded


@dataclass(slots=True)
class _Buffer:
    stream: SnapshotStream
    capacity: int
    pins: int = 0
    held: HeldSnapshot | None = None
    making: bool = False
    """Allocated ahead and not ready yet; pinned by the allocating thread."""
    detached: bool = False
    """No longer belongs to a stream; freed when its last reader releases it."""


@dataclass(slots=True)
class _Row:
    buffers: list[int] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    """Buffers of the complete snapshots, newest first; at most three."""
    writing: int | None = None
    keep_previous: bool = False


class BufferTable:
    """All buffers of one launcher, within a limit of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._rows: dict[SnapshotStream, _Row] = {}
        self._buffers: dict[int, _Buffer] = {}
        self._freed: list[int] = []
        self._last = 0

    # --- writers -----------------------------------------------------------------------------------------------------

    def room(
        self, stream: SnapshotStream, size: int, *, keep_previous: bool = False, no_more: str = ""
    ) -> WritableBuffer | BufferRefusal:
        """A buffer of at least ``size`` bytes for the stream's next snapshot; the same one again until it is filled.

        ``keep_previous``: also keep the snapshot before the newest, as long as memory allows, and the one before that
        until its buffer is needed. ``no_more``: why no further memory can be allocated; empty: it can.
        """
        row = self._rows.setdefault(stream, _Row())
        row.keep_previous = keep_previous
        if row.writing is not None:
            buffer = self._buffers[row.writing]
            if self._fits(buffer, size):
                return WritableBuffer(row.writing, buffer.capacity, new=False)
            row.writing = None
        number = self._choose(row, size, sacrifice=False)
        if number is None and any(self._buffers[n].making for n in row.buffers):
            return BufferRefusal("its memory is still being allocated", later=True)
        if number is None:
            made = BufferRefusal(no_more) if no_more else self._make(stream, row, size)
            if isinstance(made, WritableBuffer):
                return made
            if any(self._buffers[n].pins for n in row.buffers if n not in row.snapshots[:1]):
                return BufferRefusal(made.why, later=True)
            number = self._choose(row, size, sacrifice=True)
            if number is None:
                if not row.buffers:
                    del self._rows[stream]
                return made
        buffer = self._buffers[number]
        buffer.held = None
        for old in reversed(row.snapshots[1:]):
            if old == number or not self._is_kept(row, old):
                self._forget(row, old)
        row.writing = number
        return WritableBuffer(number, buffer.capacity, new=False)

    def spare(self, stream: SnapshotStream, size: int, most: int) -> WritableBuffer | None:
        """One more buffer for a stream's later snapshots. None if the stream already has ``most`` of them (not counting
        those that do not fit, nor the previous snapshot), or if the memory limit would be exceeded."""
        row = self._rows.get(stream)
        if row is None or len(row.buffers) >= MOST_BUFFERS + row.keep_previous:
            return None
        fitting = [number for number in row.buffers if self._fits(self._buffers[number], size)]
        capacity = _capacity(size)
        if len(fitting) >= most + row.keep_previous or self.usage().total + capacity > self._limit:
            return None
        room = self._add(stream, row, capacity)
        self._buffers[room.buffer].making = True
        return room

    def remove(self, number: int) -> None:
        """Forget a buffer whose memory could not be allocated."""
        stream = self._buffers[number].stream
        row = self._rows[stream]
        if row.writing == number:
            row.writing = None
        self._let_go(row, number)
        if not row.buffers:
            del self._rows[stream]

    def abandon(self, stream: SnapshotStream) -> None:
        """Release the buffer of a dead writer: its snapshot will never be complete."""
        row = self._rows.get(stream)
        if row is not None:
            row.writing = None
            if not row.snapshots and stream.use is not Use.WORKER:
                self.drop(stream)

    def may_fill(self, stream: SnapshotStream, number: int, size: int) -> str:
        """The reason why the stream's writer cannot have put ``size`` bytes into this buffer; empty if it can."""
        row = self._rows.get(stream)
        if row is None or row.writing != number:
            return f"buffer {number} was not granted to {_name(stream)} for writing"
        capacity = self._buffers[number].capacity
        return "" if 0 < size <= capacity else f"{size} bytes cannot be in buffer {number} of {capacity} bytes"

    def fill(self, stream: SnapshotStream, size: int, holding: Holding) -> HeldSnapshot:
        """Mark the buffer being written as complete; it is the stream's newest snapshot from now on."""
        row = self._rows[stream]
        assert row.writing is not None, "may_fill was called first"  # noqa: S101
        held = HeldSnapshot(row.writing, holding, size)
        self._buffers[row.writing].held = held
        row.snapshots.insert(0, row.writing)
        row.writing = None
        for old in row.snapshots[2 + row.keep_previous :]:
            self._forget(row, old)
        return held

    def take_spare(self, stream: SnapshotStream, size: int) -> int | None:
        """Take a spare buffer of a stream that has no snapshot yet, for one that somebody else writes: pinned until
        ``adopt`` or ``unpin``. None if there is none that fits."""
        row = self._rows.get(stream)
        if row is None or row.snapshots:
            return None
        for number in self._idle(row, sacrifice=False):
            if self._fits(self._buffers[number], size):
                self.pin(number)
                return number
        return None

    def adopt(self, stream: SnapshotStream, number: int, size: int, holding: Holding) -> str:
        """Make the content of a spare buffer that was taken the stream's snapshot. Returns the reason why that is not
        possible; else it is empty, and the buffer is no longer pinned."""
        row = self._rows.get(stream)
        if row is None or number not in row.buffers or row.snapshots:
            return f"{_name(stream)} has gone on meanwhile"
        self._buffers[number].held = HeldSnapshot(number, holding, size)
        row.snapshots.insert(0, number)
        self.unpin(number)
        return ""

    # --- readers -----------------------------------------------------------------------------------------------------

    def has(self, number: int) -> bool:
        """Whether the buffer belongs to a stream."""
        return number in self._buffers and not self._buffers[number].detached

    def pin(self, number: int) -> None:
        """Note a reader: the buffer is neither written nor freed before ``unpin``."""
        self._buffers[number].pins += 1

    def unpin(self, number: int) -> None:
        """Remove a reader of a buffer."""
        buffer = self._buffers[number]
        buffer.pins -= 1
        buffer.making = False
        if buffer.detached and not buffer.pins:
            self._free(number)

    def newest(self, stream: SnapshotStream) -> HeldSnapshot | None:
        """The newest complete snapshot of a stream."""
        row = self._rows.get(stream)
        return None if row is None or not row.snapshots else self._buffers[row.snapshots[0]].held

    def held(self, stream: SnapshotStream) -> tuple[HeldSnapshot, ...]:
        """All complete snapshots of a stream, newest first."""
        row = self._rows.get(stream)
        found = (self._buffers[number].held for number in (row.snapshots if row is not None else ()))
        return tuple(one for one in found if one is not None)

    def streams(self, use: Use, name: str | None = None) -> tuple[SnapshotStream, ...]:
        """The streams of one use, in a fixed order."""
        found = (stream for stream in self._rows if stream.use is use and name in (None, stream.name))
        return tuple(sorted(found, key=lambda stream: (stream.owner, stream.name)))

    def usage(self) -> Usage:
        """Bytes of memory by use."""
        sums = dict.fromkeys(Use, 0)
        for buffer in self._buffers.values():
            sums[buffer.stream.use] += buffer.capacity
        return Usage(self._limit, sums[Use.WORKER], sums[Use.REPLICA], sums[Use.LOADED])

    # --- discarding snapshots ----------------------------------------------------------------------------------------

    def drop(self, stream: SnapshotStream) -> None:
        """Forget all snapshots of a stream. Pinned ones are freed when their readers release them."""
        row = self._rows.pop(stream, None)
        for number in row.buffers if row is not None else ():
            self._doom(number)

    def forget(self, stream: SnapshotStream, version: Version) -> None:
        """Forget one snapshot. Its buffer becomes free for the stream's next one."""
        row = self._rows[stream]
        for number in tuple(row.snapshots):
            held = self._buffers[number].held
            if held is not None and held.holding.version == version:
                self._forget(row, number)
        if not row.snapshots and row.writing is None:
            self.drop(stream)

    def collect(self) -> tuple[int, ...]:
        """Buffers freed since the last call, whose memory can be released."""
        freed, self._freed = tuple(self._freed), []
        return freed

    # --- inside ------------------------------------------------------------------------------------------------------

    def _fits(self, buffer: _Buffer, size: int) -> bool:
        return size <= buffer.capacity <= 2 * size + 64 * _PAGE  # a state that has shrunk returns memory

    def _is_kept(self, row: _Row, number: int) -> bool:
        """Whether an earlier snapshot is wanted, or is the previous one and being read."""
        return row.keep_previous or (number in row.snapshots[1:2] and self._buffers[number].pins > 0)

    def _forget(self, row: _Row, number: int) -> None:
        self._buffers[number].held = None
        row.snapshots.remove(number)

    def _idle(self, row: _Row, *, sacrifice: bool) -> Iterator[int]:
        """Unused buffers of a stream, the empty ones first, then the oldest snapshot; with ``sacrifice`` also that of
        the previous snapshot."""
        kept = {row.writing, *row.snapshots[: 2 if row.keep_previous and not sacrifice else 1]}
        ages = {number: age for age, number in enumerate(row.snapshots)}
        for number in sorted(row.buffers, key=lambda number: -ages.get(number, len(ages))):
            if number not in kept and not self._buffers[number].pins:
                yield number

    def _choose(self, row: _Row, size: int, *, sacrifice: bool) -> int | None:
        for number in tuple(self._idle(row, sacrifice=sacrifice)):
            if self._fits(self._buffers[number], size):
                return number
            self._let_go(row, number)
        return None

    def _make(self, stream: SnapshotStream, row: _Row, size: int) -> WritableBuffer | BufferRefusal:
        capacity = _capacity(size)
        most = MOST_BUFFERS + row.keep_previous
        if len(row.buffers) >= most:
            return BufferRefusal(f"all {most} buffers of {_name(stream)} are in use", later=True)
        if self.usage().total + capacity > self._limit:
            for other in self._rows.values():
                for number in tuple(self._idle(other, sacrifice=not other.keep_previous)) if other is not row else ():
                    self._let_go(other, number)
        usage = self.usage()
        if usage.total + capacity > self._limit:
            return BufferRefusal(
                f"{_name(stream)} asks for {_amount(capacity)}; of {_amount(usage.limit)} (--state-memory) workers use "
                f"{_amount(usage.workers)}, copies of other nodes {_amount(usage.replicas)}, loaded state "
                f"{_amount(usage.loaded)}. Raise --state-memory, or keep this state in storage only, with save()"
            )
        room = self._add(stream, row, capacity)
        row.writing = room.buffer
        return room

    def _add(self, stream: SnapshotStream, row: _Row, capacity: int) -> WritableBuffer:
        self._last += 1
        self._buffers[self._last] = _Buffer(stream, capacity)
        row.buffers.append(self._last)
        return WritableBuffer(self._last, capacity, new=True)

    def _let_go(self, row: _Row, number: int) -> None:
        row.buffers.remove(number)
        if number in row.snapshots:
            row.snapshots.remove(number)
        self._doom(number)

    def _doom(self, number: int) -> None:
        buffer = self._buffers[number]
        buffer.detached = True
        if not buffer.pins:
            self._free(number)

    def _free(self, number: int) -> None:
        del self._buffers[number]
        self._freed.append(number)


def _capacity(size: int) -> int:
    return -(-(size + size // 64) // _PAGE) * _PAGE  # a header that grows slightly needs no new buffer


def _name(stream: SnapshotStream) -> str:
    match stream.use:
        case Use.WORKER:
            return f"slot {stream.owner} (stream {stream.name})"
        case Use.REPLICA:
            return f"the copy of node {stream.owner}'s shard {stream.name}"
        case _:
            return f"loaded state ({stream.name})"


def _amount(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1024:.1f} KiB" if size % 1024 else f"{size // 1024} KiB"
