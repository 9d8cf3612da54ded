"""Batches that the script has received but not acknowledged (independent mode)."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass

from data_service.loader.replay import RecordRange, Replay

Shards = tuple[tuple[int, int, bool], ...]
"""As in ``data_service.protocol.messages.Ack``."""


@dataclass(frozen=True, slots=True)
class _PendingBatch:
    number: int
    epoch: int
    shards: Shards
    pieces: tuple[RecordRange, ...]
    redo: Replay | None


class UnacknowledgedBatches:
    """A queue of batches in the order in which they were returned. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[_PendingBatch] = collections.deque()
        self.count = 0
        """Number of batches returned so far."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, epoch: int, shards: Shards, pieces: tuple[RecordRange, ...] = (), redo: Replay | None = None) -> None:
        """Append a batch made of ``pieces``. ``shards``: their progress after it."""
        with self._lock:
            self.count += 1
            self._waiting.append(_PendingBatch(self.count, epoch, shards, pieces, redo))

    def take(self, upto: int | None) -> list[tuple[int, Shards]]:
        """Acknowledge all batches, or the first ``upto`` ever returned. Returns the progress of the shards by epoch, to
        be sent in one message, so that the Master never counts a part of a push."""
        found: dict[int, dict[int, tuple[int, int, bool]]] = {}
        with self._lock:
            while self._waiting and (upto is None or self._waiting[0].number <= upto):
                one = self._waiting.popleft()
                found.setdefault(one.epoch, {}).update({shard[0]: shard for shard in one.shards})
        return [(epoch, tuple(shards.values())) for epoch, shards in found.items()]

    def waiting(self) -> list[_PendingBatch]:
        """The batches in the queue."""
        with self._lock:
            return list(self._waiting)

    def must_be_pushed(self, following: Replay | None) -> bool:
        """True if the received batches need a push of their own before a batch with ``following``: a replayed push
        consists of exactly its own records."""
        waiting = self.waiting()
        if not waiting:
            return False
        last = waiting[-1].redo
        return (last.push if last is not None else None) != (following.push if following is not None else None)

    @property
    def redone(self) -> bool:
        """True if all batches of a replayed push have been returned."""
        waiting = self.waiting()
        return bool(waiting) and waiting[-1].redo is not None and waiting[-1].redo.last

    @property
    def redoing(self) -> bool:
        """True if some batches of a replayed push have been returned, but not all."""
        waiting = self.waiting()
        return bool(waiting) and waiting[-1].redo is not None and not waiting[-1].redo.last

    def clear(self) -> None:
        """Drop all batches; they will never be acknowledged."""
        with self._lock:
            self._waiting.clear()
