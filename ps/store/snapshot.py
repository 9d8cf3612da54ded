"""A consistent snapshot of a store's rows, read while pushes continue.

Marking is immediate. Afterwards the first change of a row since the mark saves a copy of it, unless it has been read
already. ``take`` reads a shard in short stretches, each under the shard's lock, and adds the copies. Frequency and
last-seen step are not protected: later pulls may be included.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ps.hashing import SHARDS, buckets_of
from ps.rows import Rows, Taken, concat
from ps.spec import BUCKETS
from ps.store.rules import FREE
from ps.store.shard_table import CHANGED, Slots
from ps.store.table import Table

STRETCH = 1 << 14
"""Slots read under one hold of the lock."""
PER_SHARD = BUCKETS // SHARDS


class Marked(Protocol):
    """The store, as used by a snapshot."""

    @property
    def tables(self) -> Mapping[str, Table]:
        """The store's tables by name."""
        ...

    @property
    def whole_since(self) -> NDArray[np.int64]:
        """By bucket: the mark after which it last changed in a way not tracked per row; -1: never."""
        ...

    def lock(self, *, shard: int) -> AbstractContextManager[object]:
        """The lock of a shard."""
        ...


@dataclass(slots=True)
class _Reading:
    """Progress in one table of one shard."""

    place: int = 0
    """Slots below this one have been read."""
    kept: list[tuple[Rows, NDArray[np.uint32]]] = field(default_factory=list)
    """Copies of changed rows, with the marks of their previous changes."""


class StoreSnapshot:
    """The state of a store at ``mark``. Created by ``RowStore.snapshot``; ``close`` stops the saving of copies."""

    def __init__(self, store: Marked, mark: int) -> None:
        self.mark = mark
        self._store = store
        self._reading = [{name: _Reading() for name in store.tables} for _ in range(SHARDS)]
        self.whole = store.whole_since.copy()
        self.open = True

    def keep(self, table: str, shard: int, slots: Slots) -> None:
        """Save copies of rows that are about to change. Requires the shard's lock. Negative slots are ignored."""
        reading = self._reading[shard].get(table)
        if reading is None or not self.open:
            return
        shard_table = self._store.tables[table].shard_tables[shard]
        marks = shard_table.meta[slots[slots >= 0], CHANGED]
        slots = np.unique(slots[slots >= 0][marks < self.mark])
        slots = slots[slots >= reading.place]
        if len(slots):
            reading.kept.append((shard_table.gather(slots), shard_table.meta[slots, CHANGED].copy()))
            # A row that stays after all, because its gradient is damaged, must not be read or saved once more.
            shard_table.meta[slots, CHANGED] = self.mark

    def take_whole(self, buckets: NDArray[np.bool_]) -> None:
        """Read all rows of these buckets, also those that have not changed since an earlier mark."""
        self.whole[buckets] = self.mark

    def take(self, shard: int, changed_since: int | None = None) -> Taken:
        """Read one shard as of the mark, once; nothing more is saved for it afterwards. Incomplete if the snapshot is
        closed meanwhile.

        ``changed_since``: only rows changed after that earlier mark, the keys evicted since, and all rows of buckets
        whose changes are not tracked per row.
        """
        taken = Taken(shard)
        wholes = np.zeros(BUCKETS, np.bool_)
        if changed_since is not None:
            mine = slice(shard * PER_SHARD, (shard + 1) * PER_SHARD)
            with self._store.lock(shard=shard):  # atomically: what one of them has forgotten, the other has
                wholes[mine] = self.whole[mine] >= changed_since
                for name in list(self._reading[shard]):
                    taken.gone[name] = self._store.tables[name].gone(shard, changed_since, self.mark)
            taken.whole = frozenset(np.flatnonzero(wholes).tolist())
        for name in list(self._reading[shard]):
            taken.rows[name] = self._rows(name, shard, changed_since, wholes)
        return taken

    def _rows(self, name: str, shard: int, since: int | None, wholes: NDArray[np.bool_]) -> Rows:
        table = self._store.tables[name]
        shard_table = table.shard_tables[shard]
        found = [table.none()]
        while True:
            with self._store.lock(shard=shard):
                reading = self._reading[shard].get(name, _Reading())
                begin, end = reading.place, min(reading.place + STRETCH, shard_table.top)
                if begin >= end or not self.open:
                    self._reading[shard].pop(name, None)
                    break
                marks = shard_table.meta[begin:end, CHANGED]
                slots = np.flatnonzero((marks != FREE) & (marks < self.mark)) + begin
                slots = slots[_wanted(shard_table.keys[slots], shard_table.meta[slots, CHANGED], since, wholes)]
                found.append(shard_table.gather(slots))
                reading.place = end
        for rows, marks in reading.kept:
            which = _wanted(rows.keys, marks, since, wholes)
            found.append(rows if which.all() else rows.take(which))
        return concat(found)

    def close(self) -> None:
        """Stop saving copies of rows before they change, and free those saved."""
        self.open = False
        for reading in self._reading:
            reading.clear()


def _wanted(
    keys: NDArray[np.int64], marks: NDArray[np.uint32], since: int | None, wholes: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    if since is None:
        return np.ones(len(keys), np.bool_)
    changed = marks >= since
    return changed | wholes[buckets_of(keys)] if wholes.any() else changed
