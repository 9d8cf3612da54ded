"""How much memory rows may take: asked for before anything is applied."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from edl.errors import PsError
from ps.rows import Op
from ps.store.shard_table import ShardTable

if TYPE_CHECKING:
    from ps.store.push_plan import Work

ABOUT = 32
"""Bytes of a row that its index may take, and more than that."""


class Full(PsError):
    """The memory that rows may take is used up; nothing was applied. Room comes from eviction or other pservers."""


class Owner(Protocol):
    """What a budget asks of its store."""

    def bytes(self) -> int:
        """Memory in use."""
        ...

    def missing(self, work: Work) -> list[tuple[ShardTable, int]]:
        """How many new rows a push needs, by shard table."""
        ...


class Budget:
    """Bytes used, promised to pushes on their way, and the limit (0: none)."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._promised = 0
        self._lock = threading.Lock()

    def charge(self, size: int) -> None:
        """So many bytes have been taken, or given back, that are no rows and cannot be refused."""
        with self._lock:
            self._used += size

    def recount(self, used: int) -> None:
        """All that is in use now."""
        with self._lock:
            self._used = used

    @contextmanager
    def adding(self, shard_table: ShardTable, rows: int) -> Iterator[None]:
        """Around what adds so many rows at most; 0: they have been promised, or must be taken. May raise ``Full``."""
        if not self.most:
            yield
            return
        before = shard_table.bytes()
        more = shard_table.bytes_for(rows) if rows else 0
        self._promise(more)
        try:
            yield
        finally:
            with self._lock:
                self._promised -= more
                self._used += shard_table.bytes() - before

    @contextmanager
    def promise(self, owner: Owner, works: Sequence[Work]) -> Iterator[None]:
        """Around a push. Raises ``Full`` if its new rows may not fit."""
        if not self.most:
            yield
            return
        rough = sum(len(work.split.keys) * (work.table.layout.row_bytes + ABOUT) for work in works)
        leap = sum(work.table.leap() for work in works)
        with self._lock:
            fits = self._used + self._promised + rough + leap <= self.most - self.most // 64  # so do indexes
            more = rough if fits else 0
            self._promised += more
        if not fits:
            needed = [one for work in works if work.table.open or work.op != Op.GRAD for one in owner.missing(work)]
            more = sum(shard_table.bytes_for(rows) for shard_table, rows in needed)
            with self._lock:
                self._used = owner.bytes()
            self._promise(more)
        try:
            yield
        finally:
            with self._lock:
                self._promised -= more

    def _promise(self, more: int) -> None:
        with self._lock:
            if more and self._used + self._promised + more > self.most:
                raise Full(
                    f"rows take {self._used:,} of {self.most:,} bytes, and {more:,} more do not fit. Start more"
                    f" pservers, give them more memory, or let tables evict rows (unseen_steps, most_rows)"
                )
            self._promised += more
