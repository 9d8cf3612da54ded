"""One table's rows in one shard: a slab of counters, weights and state, and the slot of each key.

A slot is a row's place in the slab. It does not change while the row exists, and is reused later. The index from keys
to slots is implemented by the kernels' subclasses. All methods require the shard's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.hashing import BUCKET_SHIFT, SHARD_SHIFT, SHARDS, buckets_of
from ps.rows import Rows
from ps.store import halves
from ps.store.rules import FREE, META_BYTES, TableLayout
from ps.store.slabs import Slab

FREQUENCY, UPDATES, SEEN, CHANGED = 2, 3, 4, 5
"""Columns of ``meta`` as uint32; the first two are the key."""
BEGIN = META_BYTES // 4
"""Where a row's weights begin, in units of 4 bytes."""
MOST_ROWS = (1 << 25) - 2
"""Most rows of a table in one shard: what an index entry can address."""

Slots = NDArray[np.int64]


class ShardTable(ABC):
    """Rows by slot; subclasses in the kernels add lookup by key."""

    def __init__(self, layout: TableLayout, number: int) -> None:
        self.layout = layout
        self.number = number
        """Number of the shard."""
        self._rows = Slab(np.uint32, layout.row_bytes // 4, number / SHARDS)

    # --- rows by slot -------------------------------------------------------------------------------------------------

    @property
    def meta(self) -> NDArray[np.uint32]:
        """Key (two columns), frequency, updates, last-seen step, and mark of the last change, by slot."""
        return self._rows.array[:, : META_BYTES // 4]

    @property
    def keys(self) -> NDArray[np.int64]:
        """The key of each slot."""
        return self._rows.array.view(np.int64)[:, 0]

    def weights(self, slots: Slots) -> NDArray[np.float32]:
        """Copies of the weights in these slots."""
        layout = self.layout
        if layout.form == halves.FLOAT:
            return self._rows.array.view(np.float32)[:, BEGIN : BEGIN + layout.dim][slots]
        return halves.widen(self._rows.array.view(np.uint16)[:, 2 * BEGIN : 2 * BEGIN + layout.dim][slots], layout.form)

    def set_weights(self, slots: Slots, values: NDArray[np.float32], random: NDArray[np.uint64] | None = None) -> None:
        """Store the weights of these slots. ``random``: see ``halves.narrow``."""
        layout = self.layout
        if layout.form == halves.FLOAT:
            self._rows.array.view(np.float32)[:, BEGIN : BEGIN + layout.dim][slots] = values
        else:
            place = self._rows.array.view(np.uint16)[:, 2 * BEGIN : 2 * BEGIN + layout.dim]
            place[slots] = halves.narrow(values, layout.form, random)

    @property
    def state(self) -> NDArray[np.float32]:
        """The optimizer state of each slot."""
        begin = BEGIN + self.layout.weight_words
        return self._rows.array.view(np.float32)[:, begin : begin + self.layout.slots]

    def room(self, more: int) -> None:
        """Make room for ``more`` rows. Raises ``MemoryError`` above ``MOST_ROWS``."""
        rows = self.top + max(0, more - self.vacant)
        if rows > MOST_ROWS:
            raise MemoryError(f"a shard can hold at most {MOST_ROWS} rows of one table")
        self._rows.grow(rows)

    def live(self, begin: int = 0, end: int | None = None) -> Slots:
        """The slots in this range that have rows."""
        end = self.top if end is None else min(end, self.top)
        return np.flatnonzero(self.meta[begin:end, CHANGED] != FREE) + begin

    def within(self, buckets: NDArray[np.bool_]) -> Slots:
        """Slots of the rows whose keys belong to these buckets."""
        slots = self.live()
        return slots[buckets[buckets_of(self.keys[slots])]]

    def gather(self, slots: Slots) -> Rows:
        """Copies of the rows in these slots."""
        meta = self.meta[slots]
        numbers = (meta[:, FREQUENCY].copy(), meta[:, UPDATES].copy(), meta[:, SEEN].copy())
        keys = np.ascontiguousarray(meta[:, :2]).view(np.int64).reshape(-1)
        return Rows(keys, self.weights(slots), self.state[slots], *numbers)

    def count(self, slots: Slots, times: NDArray[np.uint32] | None, step: int) -> None:
        """Count a pull of these rows, which may repeat, in this step. ``times``: occurrences; None: 1 each."""
        touched, inverse = np.unique(slots, return_inverse=True)
        meta = self.meta
        total = meta[touched, FREQUENCY] + np.bincount(inverse, times, len(touched)).astype(np.int64)
        meta[touched, FREQUENCY] = np.minimum(total, 0xFFFFFFFF)
        meta[touched, SEEN] = np.maximum(meta[touched, SEEN], step)

    def put(self, rows: Rows, mark: int) -> Slots:
        """Store rows from elsewhere, replacing those of the same keys; return their slots."""
        slots = self.insert(rows.keys, mark, 0)
        self.set_weights(slots, rows.weights)
        self.state[slots] = rows.state
        meta = self.meta
        meta[slots, FREQUENCY], meta[slots, UPDATES], meta[slots, SEEN] = rows.frequency, rows.updates, rows.seen
        meta[slots, CHANGED] = mark
        return slots

    # --- implemented by the kernels -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def top(self) -> int:
        """Number of slots ever used."""

    @property
    @abstractmethod
    def vacant(self) -> int:
        """Number of those slots without a row."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows in the shard table."""

    @abstractmethod
    def find(self, keys: NDArray[np.int64]) -> Slots:
        """The slot of each key; -1 without a row."""

    @abstractmethod
    def insert(self, keys: NDArray[np.int64], mark: int, step: int) -> Slots:
        """The slot of each key; keys without a row get a new one with initial weights. Keys may repeat."""

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Remove these rows. Every slot must have a row and be listed once."""

    @abstractmethod
    def bytes(self) -> int:
        """Memory in use, in bytes: rows (including free slots) and index."""

    @abstractmethod
    def bytes_for(self, more: int) -> int:
        """Upper bound of the bytes that ``more`` rows take."""


class ShardTables:
    """A table's rows in all shards."""

    def __init__(self, layout: TableLayout, shard_tables: list[ShardTable]) -> None:
        self.layout = layout
        self.all = shard_tables

    def __getitem__(self, shard: int) -> ShardTable:
        return self.all[shard]


@dataclass(slots=True)
class Split:
    """Keys grouped by ranges of shards of equal size, often one shard each; within a range they keep their order."""

    keys: NDArray[np.int64]
    order: NDArray[np.int64]
    """Original index of each key."""
    starts: NDArray[np.int64]
    """Start of each range; one more entry than ranges."""
    counts: NDArray[np.uint32]
    """Number of keys in each bucket."""
    slots: Slots
    """Slot of each key, filled in by the kernels."""

    def of(self, part: int) -> Slots:
        """The slots of one range's keys."""
        return self.slots[self.starts[part] : self.starts[part + 1]]

    def by_shard(self, part: int, missing: bool = False) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Shards of one range with the indices of their keys; with ``missing`` only of keys without a slot."""
        low, high = int(self.starts[part]), int(self.starts[part + 1])
        places = np.flatnonzero(self.slots[low:high] < 0) + low if missing else np.arange(low, high)
        shards = buckets_of(self.keys[places]) >> (SHARD_SHIFT - BUCKET_SHIFT)
        order = np.argsort(shards, kind="stable")
        found, begins = np.unique(shards[order], return_index=True)
        return zip(
            found.tolist(), np.split(places[order], begins[1:]), strict=False
        )  # split of an empty array: one part
