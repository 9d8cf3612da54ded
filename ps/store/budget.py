"""The memory budget for rows, checked before anything is applied."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from edl.errors import PsError
from ps.rows import RowOp
from ps.store.shard_table import ShardTable

if TYPE_CHECKING:
    from ps.store.push_plan import Work

ABOUT = 32
"""Estimated bytes per row for the index; an upper bound."""


class Full(PsError):
    """The memory budget is exhausted; nothing was applied. Evictions or more pservers free memory."""


class BudgetOwner(Protocol):
    """The store, as used by its budget."""

    def bytes(self) -> int:
        """Memory in use, in bytes."""
        ...

    def missing(self, work: Work) -> list[tuple[ShardTable, int]]:
        """New rows that a push needs, by shard table."""
        ...


class Budget:
    """Tracks bytes in use and bytes reserved for pushes in progress, against a limit (0: none). Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._promised = 0
        self._lock = threading.Lock()

    def charge(self, size: int) -> None:
        """Account for memory that is not rows and cannot be refused; negative to release."""
        with self._lock:
            self._used += size

    def recount(self, used: int) -> None:
        """Set the memory in use."""
        with self._lock:
            self._used = used

    @contextmanager
    def adding(self, shard_table: ShardTable, rows: int) -> Iterator[None]:
        """Context for adding at most ``rows`` rows; 0 if they are reserved already or cannot be refused. Raises
        ``Full``."""
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
    def promise(self, owner: BudgetOwner, works: Sequence[Work]) -> Iterator[None]:
        """Context for a push: reserves memory for its new rows. Raises ``Full`` if they may not fit."""
        if not self.most:
            yield
            return
        rough = sum(len(work.split.keys) * (work.table.layout.row_bytes + ABOUT) for work in works)
        leap = sum(work.table.leap() for work in works)
        with self._lock:
            fits = self._used + self._promised + rough + leap <= self.most - self.most // 64  # room for indexes
            more = rough if fits else 0
            self._promised += more
        if not fits:
            needed = [one for work in works if work.table.open or work.op != RowOp.GRAD for one in owner.missing(work)]
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
