"""The kernels, compiled by numba.

A shard table's index is an open-addressing table of 32-bit entries: a slot (plus one) above seven more bits of the
key's hash; 0 is empty. The key itself is only compared in the row's counters, which are needed anyway. Addresses and
sizes of a shard table lie in a block of ``FIELDS`` numbers; a table's 64 blocks are one array, so that a call covers
many shards. All functions run without the GIL and are told addresses only: they have one signature each, compiled
before anybody waits.

Each loop over keys has several stages that run some keys apart: each asks for the memory that the next one needs.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import gc
import threading
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.hashing import SHARDS, splitmix64
from ps.spec import BUCKETS
from ps.store.kernels import loops, updates
from ps.store.kernels.loops import CAP, FIELDS, FREE_AT, MAP, ROWS, STRIDE, TOP, USED, VACANT
from ps.store.kernels.pointers import LINE
from ps.store.rules import FREE, Layout
from ps.store.shard_table import CHANGED, ShardTable, ShardTables, Slots, Split
from ps.store.slabs import zeros

NAME = "numba"
LOAD = 0.7
FEWEST = 64
STEP = 2**0.5
"""An index grows by this factor: between 0.5 and 0.7 of it are in use."""
EARLY, LARGE = 0.66, 1 << 14
"""From this load on, the next index of one that has so many entries is filled, some slots at each call: it would take 8
ms for 300,000 rows, and ever longer."""
Floats = NDArray[np.float32]


def at(array: NDArray[Any]) -> int:
    """Where an array lies."""
    return int(array.__array_interface__["data"][0])


class FastShardTable(ShardTable):
    """See ``ShardTable``."""

    def __init__(self, layout: Layout, number: int, block: NDArray[np.int64]) -> None:
        super().__init__(layout, number)
        self._block = block
        block[STRIDE] = layout.row_bytes
        self._at = at(block)
        self._map = np.zeros(0, np.uint32)
        self._next, self._entered = np.zeros(0, np.uint32), 0
        """The index that comes after this one, and how many slots, from the first, are in it."""
        self._free = np.zeros(0, np.int32)
        # Shards grow at different sizes, or a table of even keys would grow in all of them at once.
        self._uneven = STEP ** (int(f"{number:06b}"[::-1], 2) / SHARDS)

    def adopt(self, other: ShardTable) -> None:
        """This shard table, which is empty, takes the rows of another one over, with their slots."""
        self._rows = other._rows
        block, meta = self._block, self.meta
        vacant = np.flatnonzero(meta[: other.top, CHANGED] == FREE).astype(np.int32)
        block[TOP], block[VACANT], block[USED] = other.top, len(vacant), other.top - len(vacant)
        block[ROWS] = self._rows.address
        self._free, self._map = vacant, zeros(self._capacity(self.rows), np.uint32)
        block[FREE_AT], block[MAP], block[CAP] = at(vacant), at(self._map), len(self._map)
        loops.rebuild(self._at, at(self._map), len(self._map), 0, self.top)

    @property
    def top(self) -> int:
        """Slots that have ever been used."""
        return int(self._block[TOP])

    @property
    def vacant(self) -> int:
        """Of those, how many have no row."""
        return int(self._block[VACANT])

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self._block[USED])

    def _capacity(self, rows: int) -> int:
        """Of an index for so many rows."""
        wanted = max(rows / LOAD, 1.0)
        steps = np.ceil(np.log(max(wanted / (FEWEST * self._uneven), 1.0)) / np.log(STEP))
        return int(FEWEST * self._uneven * STEP**steps) + 1

    def room(self, more: int) -> None:
        """Place for so many more rows, also in the index."""
        super().room(more)
        block = self._block
        block[ROWS] = self._rows.address
        if self.vacant:
            self._next = np.zeros(0, np.uint32)  # rows have gone that may be in it, and slots in it will be used again
        size = self._next_size(more)
        if size:
            self._enter(size, more)

    def _next_size(self, more: int) -> int:
        """Entries of the index that must be begun for so many more rows; 0: that need not be."""
        needed, fits = self.rows + more, LOAD * len(self._map)
        ahead = len(self._map) >= LARGE and not self.vacant
        if needed <= (EARLY * len(self._map) if ahead else fits):
            return 0
        return self._capacity(max(needed, int(fits) + 1))

    def _enter(self, size: int, more: int) -> None:
        """Some slots go into the next index, so that all are there when this one is full; then it takes over."""
        if len(self._next) < size:
            self._next, self._entered = zeros(size, np.uint32), 0
        left, behind = LOAD * len(self._map) - self.rows, self.top - self._entered
        end = self._entered + (behind if left < more else int(behind * more / max(left, 1.0)))
        loops.rebuild(self._at, at(self._next), len(self._next), self._entered, end)
        self._entered = end
        if left < more:
            self._map, self._next = self._next, np.zeros(0, np.uint32)
            self._block[MAP], self._block[CAP] = at(self._map), len(self._map)

    def find(self, keys: NDArray[np.int64]) -> Slots:
        """The slot of each key, -1 where there is none."""
        slots = np.empty(len(keys), np.int64)
        loops.seek(self._at, len(keys), at(_straight(keys)), at(slots))
        return slots

    def insert(self, keys: NDArray[np.int64], mark: int, step: int) -> Slots:
        """The slot of each key; those that have none get a new row with its first weights."""
        keys = _straight(keys)
        slots = np.empty(len(keys), np.int64)
        self.room(len(keys))
        layout = self.layout
        loops.insert(
            self._at, len(keys), at(keys), at(slots), mark, step, layout.dim, layout.slots, layout.start, layout.scale,
            _seed(layout), layout.accumulated, layout.accumulator,
        )  # fmt: skip
        return slots

    def count(self, slots: Slots, times: NDArray[np.uint32] | None, step: int) -> None:
        """These rows, which may repeat, were pulled in this step, so often each (``None``: once)."""
        slots = np.ascontiguousarray(slots, np.int64)
        often = None if times is None else np.ascontiguousarray(times, np.uint32)
        loops.count(self._at, len(slots), at(slots), 0 if often is None else at(often), step)

    def remove(self, slots: Slots) -> None:
        """These rows go."""
        needed = self.vacant + len(slots)
        if needed > len(self._free):
            larger = np.empty(max(needed, 2 * len(self._free)), np.int32)
            larger[: self.vacant] = self._free[: self.vacant]
            self._free = larger
            self._block[FREE_AT] = at(larger)
        slots = np.ascontiguousarray(slots, np.int64)
        loops.remove(self._at, len(slots), at(slots))

    def within(self, buckets: NDArray[np.bool_]) -> Slots:
        """The slots of rows whose keys belong to these buckets."""
        slots = np.empty(self.rows, np.int64)
        return slots[: loops.within(self._at, at(np.ascontiguousarray(buckets)), at(slots))]

    def bytes(self) -> int:
        """Memory in use."""
        return self._rows.bytes(self.top) + self._map.nbytes + self._next.nbytes + self._free.nbytes

    def bytes_for(self, more: int) -> int:
        """At most what so many more rows take."""
        index = max(0, 4 * self._next_size(more) - self._next.nbytes)
        return self._rows.bytes_for(self.top, max(0, more - self.vacant)) + index


class FastShardTables(ShardTables):
    """See ``ShardTables``."""

    def __init__(self, layout: Layout) -> None:
        self.blocks = np.zeros((SHARDS, FIELDS), np.int64)
        super().__init__(layout, [FastShardTable(layout, number, self.blocks[number]) for number in range(SHARDS)])
        self.at = at(self.blocks)


class Arena(threading.local):
    """Memory that a thread uses again and again."""

    def __init__(self) -> None:
        self._bytes = [np.zeros(0, np.uint8) for _ in range(3)]

    def take(self, which: int, size: int) -> int:
        """The address of so many bytes, with anything in them; it begins with a line of memory."""
        if len(self._bytes[which]) < size + LINE:
            self._bytes[which] = np.empty(size + size // 4 + LINE, np.uint8)
        return -(-at(self._bytes[which]) // LINE) * LINE


_arena = Arena()


def warm() -> None:
    """Everything was compiled when this module was imported; run it once all the same.

    numba leaves 100,000 objects behind; the collector, which took 60 to 140 ms for them now and then, is told to leave
    them alone.
    """
    shard_table = shard_tables(Layout.of(loops.EXAMPLE))
    keys = np.arange(8, dtype=np.int64)
    parts = split(keys, 1)
    pull(shard_table, parts, 0, np.empty((8, loops.EXAMPLE.dim), np.float32), -1, None)
    if not gc.get_freeze_count():  # once a process
        gc.collect()
        gc.freeze()


def shard_tables(layout: Layout) -> ShardTables:
    """Empty ones."""
    return FastShardTables(layout)


def adopt(shard_tables: ShardTables) -> ShardTables:
    """The same rows, in the same slots, for these kernels."""
    found = FastShardTables(shard_tables.layout)
    for mine, other in zip(found.all, shard_tables.all, strict=True):
        if other.top and isinstance(mine, FastShardTable):
            mine.adopt(other)
    return found


def split(keys: NDArray[np.int64], parts: int = SHARDS) -> Split:
    """Keys by ranges of shards."""
    count = len(keys)
    found = Split(
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(parts + 1, np.int64),
        np.empty(BUCKETS, np.uint32),
        np.empty(count, np.int64),
    )
    loops.split(
        at(keys), count, parts, at(found.keys), at(found.order), at(found.starts), at(found.counts), at(found.slots)
    )
    return found


def find(shard_tables: ShardTables, split: Split, first: int, last: int) -> int:
    """Fill ``split.slots``."""
    low, high = int(split.starts[first]), int(split.starts[last])
    return int(loops.find(_blocks(shard_tables), low, high, at(split.keys), at(split.slots)))


def pull(
    shard_tables: ShardTables, split: Split, part: int, out: Floats, step: int, times: NDArray[np.uint32] | None
) -> int:
    """Fill ``split.slots``, and rows, or first weights, to where each key was."""
    layout, counts = shard_tables.layout, 0 if times is None else at(times)
    return int(
        loops.pull(
            _blocks(shard_tables), int(split.starts[part]), int(split.starts[part + 1]), at(split.keys),
            at(split.order), at(split.slots), at(out), step, counts, layout.dim, layout.start, layout.scale,
            _seed(layout),
        )
    )  # fmt: skip


def _blocks(shard_tables: ShardTables) -> int:
    place: int = shard_tables.at  # type: ignore[attr-defined]
    return place


def apply(
    shard_tables: ShardTables, split: Split, first: int, last: int, values: Floats, rule: int, numbers:
    NDArray[np.float64], nesterov: bool, step: int, mark: int,
) -> tuple[list[Slots], int]:  # fmt: skip
    """Sum the values of each row and let the rule take them."""
    layout = shard_tables.layout
    starts = split.starts[first : last + 1]
    longest = int(np.diff(starts).max())
    touched = np.empty(int(starts[-1] - starts[0]), np.int64)
    begins = np.empty(last - first + 1, np.int64)
    damaged = updates.apply(
        _blocks(shard_tables), first, last, at(split.starts), at(split.order), at(split.slots), at(values), layout.dim,
        layout.slots, rule, at(numbers), int(nesterov), layout.damaged, at(layout.corrections),
        layout.corrections.shape[1], step, mark, at(touched), at(begins), _arena.take(0, 16 * (longest + 4)),
        _arena.take(1, 8 * (longest + 1)), _arena.take(2, 4 * layout.dim * (longest + 2)),
    )  # fmt: skip
    edges = begins.tolist()
    return [touched[low:high] for low, high in pairwise(edges)], int(damaged)


def first(layout: Layout, keys: NDArray[np.int64]) -> Floats:
    """First weights of keys."""
    keys = _straight(keys)
    out = np.empty((len(keys), layout.dim), np.float32)
    loops.first(len(keys), at(keys), at(out), layout.dim, layout.start, layout.scale, _seed(layout))
    return out


def _straight(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.require(keys, np.int64, ["C", "A"])


def _seed(layout: Layout) -> int:
    mixed = splitmix64(layout.seed)
    return mixed - (1 << 64) if mixed >> 63 else mixed
