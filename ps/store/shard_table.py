"""One table's rows in one shard: a slab of counters, weights and state, and which slot each key has.

A slot is a row's place in the slab; it stays until the row goes, and is used again. The index from keys to slots
is the kernels' own affair: they extend this class. Everything here is called with the shard's lock held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.hashing import BUCKET_SHIFT, SHARD_SHIFT, SHARDS, buckets_of
from ps.rows import Rows
from ps.store.rules import FREE, META_BYTES, Layout
from ps.store.slabs import Slab

FREQUENCY, UPDATES, SEEN, CHANGED = 2, 3, 4, 5
"""Columns of ``meta`` as uint32; the first two are the key."""
MOST_ROWS = (1 << 25) - 2
"""Of one table in one shard: what an entry of the index can name."""

Slots = NDArray[np.int64]


class ShardTable(ABC):
    """Rows by slot; see the kernels for rows by key."""

    def __init__(self, layout: Layout, number: int) -> None:
        self.layout = layout
        self.number = number
        """Of the shard."""
        self._rows = Slab(np.uint32, layout.row_bytes // 4, number / SHARDS)

    # --- rows by slot -------------------------------------------------------------------------------------------------

    @property
    def meta(self) -> NDArray[np.uint32]:
        """Key (two columns), frequency, updates, last-seen step, mark of the last change."""
        return self._rows.array[:, : META_BYTES // 4]

    @property
    def keys(self) -> NDArray[np.int64]:
        """Of each slot."""
        return self._rows.array.view(np.int64)[:, 0]

    @property
    def weights(self) -> NDArray[np.float32]:
        """Of each slot."""
        begin = META_BYTES // 4
        return self._rows.array.view(np.float32)[:, begin : begin + self.layout.dim]

    @property
    def state(self) -> NDArray[np.float32]:
        """Of each slot."""
        begin = META_BYTES // 4 + self.layout.dim
        return self._rows.array.view(np.float32)[:, begin : begin + self.layout.slots]

    def room(self, more: int) -> None:
        """Place for so many more rows."""
        rows = self.top + max(0, more - self.vacant)
        if rows > MOST_ROWS:
            raise MemoryError(f"a shard takes {MOST_ROWS} rows of one table at most")
        self._rows.grow(rows)

    def live(self, begin: int = 0, end: int | None = None) -> Slots:
        """The slots in this range that have rows."""
        end = self.top if end is None else min(end, self.top)
        return np.flatnonzero(self.meta[begin:end, CHANGED] != FREE) + begin

    def within(self, buckets: NDArray[np.bool_]) -> Slots:
        """The slots of rows whose keys belong to these buckets."""
        slots = self.live()
        return slots[buckets[buckets_of(self.keys[slots])]]

    def gather(self, slots: Slots) -> Rows:
        """Copies of rows."""
        meta = self.meta[slots]
        numbers = (meta[:, FREQUENCY].copy(), meta[:, UPDATES].copy(), meta[:, SEEN].copy())
        keys = np.ascontiguousarray(meta[:, :2]).view(np.int64).reshape(-1)
        return Rows(keys, self.weights[slots], self.state[slots], *numbers)

    def count(self, slots: Slots, times: NDArray[np.uint32] | None, step: int) -> None:
        """These rows, which may repeat, were pulled in this step, so often each (``None``: once)."""
        touched, inverse = np.unique(slots, return_inverse=True)
        meta = self.meta
        total = meta[touched, FREQUENCY] + np.bincount(inverse, times, len(touched)).astype(np.int64)
        meta[touched, FREQUENCY] = np.minimum(total, 0xFFFFFFFF)
        meta[touched, SEEN] = np.maximum(meta[touched, SEEN], step)

    def put(self, rows: Rows, mark: int) -> Slots:
        """Rows as they were elsewhere; those of the same keys go. Gives their slots."""
        slots = self.insert(rows.keys, mark, 0)
        self.weights[slots] = rows.weights
        self.state[slots] = rows.state
        meta = self.meta
        meta[slots, FREQUENCY], meta[slots, UPDATES], meta[slots, SEEN] = rows.frequency, rows.updates, rows.seen
        meta[slots, CHANGED] = mark
        return slots

    # --- the kernels' -------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def top(self) -> int:
        """Slots that have ever been used."""

    @property
    @abstractmethod
    def vacant(self) -> int:
        """Of those, how many have no row."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many there are."""

    @abstractmethod
    def find(self, keys: NDArray[np.int64]) -> Slots:
        """The slot of each key, -1 where there is none."""

    @abstractmethod
    def insert(self, keys: NDArray[np.int64], mark: int, step: int) -> Slots:
        """The slot of each key; those that have none get a new row with its first weights. Keys may repeat."""

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """These rows go; each slot has one and is named once."""

    @abstractmethod
    def bytes(self) -> int:
        """Memory in use: rows (also those of free slots) and index."""

    @abstractmethod
    def bytes_for(self, more: int) -> int:
        """At most what so many more rows take."""


class ShardTables:
    """A table's rows in all shards."""

    def __init__(self, layout: Layout, shard_tables: list[ShardTable]) -> None:
        self.layout = layout
        self.all = shard_tables

    def __getitem__(self, shard: int) -> ShardTable:
        return self.all[shard]


@dataclass(slots=True)
class Split:
    """Keys by ranges of shards (of the same size, often of one shard each); in a range they stay as they came."""

    keys: NDArray[np.int64]
    order: NDArray[np.int64]
    """Where each of ``keys`` was."""
    starts: NDArray[np.int64]
    """Where each range begins; one more than there are ranges."""
    counts: NDArray[np.uint32]
    """Keys of each bucket."""
    slots: Slots
    """Of ``keys``, as the kernels left them."""

    def of(self, part: int) -> Slots:
        """The slots of one range's keys."""
        return self.slots[self.starts[part] : self.starts[part + 1]]

    def by_shard(self, part: int, missing: bool = False) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Shards of one range, and the places of their keys; or only of those without a slot."""
        low, high = int(self.starts[part]), int(self.starts[part + 1])
        places = np.flatnonzero(self.slots[low:high] < 0) + low if missing else np.arange(low, high)
        shards = buckets_of(self.keys[places]) >> (SHARD_SHIFT - BUCKET_SHIFT)
        order = np.argsort(shards, kind="stable")
        found, begins = np.unique(shards[order], return_index=True)
        return zip(found.tolist(), np.split(places[order], begins[1:]), strict=False)  # of no places: one empty split
