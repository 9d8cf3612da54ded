"""Batches that a script has got and that do not count yet (mode "free")."""

from __future__ import annotations

import collections
import threading

Shards = tuple[tuple[int, int, bool], ...]
"""As in ``data_service.wire.Ack``."""


class Handed:
    """In their order. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[int, int, Shards]] = collections.deque()
        self.count = 0
        """All that were ever handed out."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, epoch: int, shards: Shards) -> None:
        """One more; after it so much of these shards is taken."""
        with self._lock:
            self.count += 1
            self._waiting.append((self.count, epoch, shards))

    def take(self, upto: int | None) -> list[tuple[int, Shards]]:
        """Those that count now, each with its epoch: all, or the first ``upto`` that were ever handed out."""
        found = []
        with self._lock:
            while self._waiting and (upto is None or self._waiting[0][0] <= upto):
                _, epoch, shards = self._waiting.popleft()
                found.append((epoch, shards))
        return found

    def clear(self) -> None:
        """They will never count."""
        with self._lock:
            self._waiting.clear()
