"""The kernels compiled by numba.

A shard table's index is an open-addressing hash table of 32-bit entries: slot plus one, above seven more bits of the
key's hash; 0 means empty. A lookup compares the full key, which is stored with the row's counters: a pull needs that
cache line anyway. A shard table's addresses and sizes are in a block of ``FIELDS`` numbers; a table's 64 blocks form
one array, so one call covers many shards. All functions release the GIL and take only numbers and addresses, so each
has one signature, which is compiled before the first request.

Loops over keys are pipelined: the stages work on keys some distance apart, and each one prefetches the memory that the
next one needs.
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
from ps.store.rules import FREE, TableLayout
from ps.store.shard_table import CHANGED, ShardTable, ShardTables, Slots, Split
from ps.store.slabs import zeros

NAME = "numba"
LOAD = 0.7
"""Most rows per index entry."""
FEWEST = 64
"""Fewest entries of an index that is not empty."""
STEP = 2**0.5
"""An index grows by this factor, so that 50 to 70 % of its entries are in use."""
EARLY, LARGE = 0.66, 1 << 14
"""If an index has at least ``LARGE`` entries, the next one is filled incrementally from load ``EARLY`` on. In one go it
would take 8 ms for 300,000 rows, and longer for more."""
Floats = NDArray[np.float32]


def at(array: NDArray[Any]) -> int:
    """Address of an array's data."""
    return int(array.__array_interface__["data"][0])


class FastShardTable(ShardTable):
    """``ShardTable`` with a compiled index."""

    def __init__(self, layout: TableLayout, number: int, block: NDArray[np.int64]) -> None:
        super().__init__(layout, number)
        self._block = block
        block[STRIDE] = layout.row_bytes
        self._at = at(block)
        self._map = np.zeros(0, np.uint32)
        self._next, self._entered = np.zeros(0, np.uint32), 0
        """The next index, and the number of leading slots already entered into it."""
        self._free = np.zeros(0, np.int32)
        # Shards grow at different sizes: with evenly spread keys all of them would otherwise grow at the same time.
        self._uneven = STEP ** (int(f"{number:06b}"[::-1], 2) / SHARDS)

    def adopt(self, other: ShardTable) -> None:
        """Take over the rows of another shard table, keeping their slots. This one must be empty."""
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
        """Number of slots ever used."""
        return int(self._block[TOP])

    @property
    def vacant(self) -> int:
        """Number of those slots without a row."""
        return int(self._block[VACANT])

    @property
    def rows(self) -> int:
        """Number of rows in the shard table."""
        return int(self._block[USED])

    def _capacity(self, rows: int) -> int:
        """Entries of the smallest index that holds this many rows."""
        wanted = max(rows / LOAD, 1.0)
        steps = np.ceil(np.log(max(wanted / (FEWEST * self._uneven), 1.0)) / np.log(STEP))
        return int(FEWEST * self._uneven * STEP**steps) + 1

    def room(self, more: int) -> None:
        """Make room for ``more`` rows, in memory and in the index."""
        super().room(more)
        block = self._block
        block[ROWS] = self._rows.address
        if self.vacant:
            self._next = np.zeros(0, np.uint32)  # it may contain removed rows, whose slots will be reused
        size = self._next_size(more)
        if size:
            self._enter(size, more)

    def _next_size(self, more: int) -> int:
        """Entries of the next index if it must be filled before ``more`` rows are added; otherwise 0."""
        needed, fits = self.rows + more, LOAD * len(self._map)
        ahead = len(self._map) >= LARGE and not self.vacant
        if needed <= (EARLY * len(self._map) if ahead else fits):
            return 0
        return self._capacity(max(needed, int(fits) + 1))

    def _enter(self, size: int, more: int) -> None:
        """Enter some slots into the next index, so that it is complete when the current one is full; then switch."""
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
        """The slot of each key; -1 without a row."""
        slots = np.empty(len(keys), np.int64)
        loops.seek(self._at, len(keys), at(_straight(keys)), at(slots))
        return slots

    def insert(self, keys: NDArray[np.int64], mark: int, step: int) -> Slots:
        """The slot of each key; keys without a row get a new one with initial weights."""
        keys = _straight(keys)
        slots = np.empty(len(keys), np.int64)
        self.room(len(keys))
        layout = self.layout
        loops.insert(
            self._at, len(keys), at(keys), at(slots), mark, step, layout.dim, layout.slots, layout.start, layout.scale,
            _seed(layout), layout.accumulated, layout.accumulator, layout.form, _arena.take(2, 4 * layout.dim),
        )  # fmt: skip
        return slots

    def count(self, slots: Slots, times: NDArray[np.uint32] | None, step: int) -> None:
        """Count a pull of these rows in this step. Slots may repeat. ``times``: occurrences of each; None: 1."""
        slots = np.ascontiguousarray(slots, np.int64)
        often = None if times is None else np.ascontiguousarray(times, np.uint32)
        loops.count(self._at, len(slots), at(slots), 0 if often is None else at(often), step)

    def remove(self, slots: Slots) -> None:
        """Remove the rows in these slots; the slots will be reused."""
        needed = self.vacant + len(slots)
        if needed > len(self._free):
            larger = np.empty(max(needed, 2 * len(self._free)), np.int32)
            larger[: self.vacant] = self._free[: self.vacant]
            self._free = larger
            self._block[FREE_AT] = at(larger)
        slots = np.ascontiguousarray(slots, np.int64)
        loops.remove(self._at, len(slots), at(slots))

    def within(self, buckets: NDArray[np.bool_]) -> Slots:
        """Slots of the rows whose keys belong to these buckets."""
        slots = np.empty(self.rows, np.int64)
        return slots[: loops.within(self._at, at(np.ascontiguousarray(buckets)), at(slots))]

    def bytes(self) -> int:
        """Memory in use, in bytes."""
        return self._rows.bytes(self.top) + self._map.nbytes + self._next.nbytes + self._free.nbytes

    def bytes_for(self, more: int) -> int:
        """Upper bound of the memory for ``more`` rows, in bytes."""
        index = max(0, 4 * self._next_size(more) - self._next.nbytes)
        return self._rows.bytes_for(self.top, max(0, more - self.vacant)) + index


class FastShardTables(ShardTables):
    """``ShardTables`` with one array of blocks."""

    def __init__(self, layout: TableLayout) -> None:
        self.blocks = np.zeros((SHARDS, FIELDS), np.int64)
        super().__init__(layout, [FastShardTable(layout, number, self.blocks[number]) for number in range(SHARDS)])
        self.at = at(self.blocks)


class ScratchBuffer(threading.local):
    """Scratch memory of a thread, in three areas that are reused by later calls."""

    def __init__(self) -> None:
        self._bytes = [np.zeros(0, np.uint8) for _ in range(3)]

    def take(self, which: int, size: int) -> int:
        """Address of ``size`` bytes in area ``which`` (0 .. 2), aligned to a cache line, with undefined content."""
        if len(self._bytes[which]) < size + LINE:
            self._bytes[which] = np.empty(size + size // 4 + LINE, np.uint8)
        return -(-at(self._bytes[which]) // LINE) * LINE


_arena = ScratchBuffer()


def warm() -> None:
    """Run the main functions once; they were compiled when this module was imported.

    numba leaves 100,000 objects behind. They are frozen, because the garbage collector would otherwise spend 60 to 140
    ms on them from time to time.
    """
    shard_table = shard_tables(TableLayout.of(loops.EXAMPLE))
    keys = np.arange(8, dtype=np.int64)
    parts = split(keys, 1)
    pull(shard_table, parts, 0, np.empty((8, loops.EXAMPLE.dim), np.float32), -1, None)
    if not gc.get_freeze_count():  # once per process
        gc.collect()
        gc.freeze()


def shard_tables(layout: TableLayout) -> ShardTables:
    """New, empty shard tables."""
    return FastShardTables(layout)


def adopt(shard_tables: ShardTables) -> ShardTables:
    """New shard tables with the rows of others, in the same slots."""
    found = FastShardTables(shard_tables.layout)
    for mine, other in zip(found.all, shard_tables.all, strict=True):
        if other.top and isinstance(mine, FastShardTable):
            mine.adopt(other)
    return found


def split(keys: NDArray[np.int64], parts: int = SHARDS) -> Split:
    """Group keys by shard range; ``parts``, a power of two up to 64, is the number of ranges."""
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
    """Fill ``split.slots`` for the ranges ``first .. last-1``; return the number of keys without a row."""
    low, high = int(split.starts[first]), int(split.starts[last])
    return int(loops.find(_blocks(shard_tables), low, high, at(split.keys), at(split.slots)))


def pull(
    shard_tables: ShardTables, split: Split, part: int, out: Floats, step: int, times: NDArray[np.uint32] | None
) -> int:
    """Fill ``split.slots`` for one range, and copy rows, or initial weights for keys without one, to ``out`` at the
    keys' original places. The pull is counted unless ``step`` is negative. Returns the number of keys without a row."""
    layout, counts = shard_tables.layout, 0 if times is None else at(times)
    return int(
        loops.pull(
            _blocks(shard_tables), int(split.starts[part]), int(split.starts[part + 1]), at(split.keys),
            at(split.order), at(split.slots), at(out), step, counts, layout.dim, layout.start, layout.scale,
            _seed(layout), layout.form,
        )
    )  # fmt: skip


def _blocks(shard_tables: ShardTables) -> int:
    place: int = shard_tables.at  # type: ignore[attr-defined]
    return place


def apply(
    shard_tables: ShardTables, split: Split, first: int, last: int, values: Floats, rule: int, numbers:
    NDArray[np.float64], nesterov: bool, step: int, mark: int,
) -> tuple[list[Slots], int]:  # fmt: skip
    """Sum the values of each row in the ranges ``first .. last-1``, and apply the optimizer's rule once per row.
    Returns the touched slots by range, and the number of damaged values."""
    layout = shard_tables.layout
    starts = split.starts[first : last + 1]
    longest = int(np.diff(starts).max())
    touched = np.empty(int(starts[-1] - starts[0]), np.int64)
    begins = np.empty(last - first + 1, np.int64)
    damaged = updates.apply(
        _blocks(shard_tables), first, last, at(split.starts), at(split.order), at(split.slots), at(values), layout.dim,
        layout.slots, rule, at(numbers), int(nesterov), layout.damaged, at(layout.corrections),
        layout.corrections.shape[1], step, mark, at(touched), at(begins), _arena.take(0, 16 * (longest + 4)),
        _arena.take(1, 8 * (longest + 1)), _arena.take(2, 4 * layout.dim * (longest + 3)), layout.form,
    )  # fmt: skip
    edges = begins.tolist()
    return [touched[low:high] for low, high in pairwise(edges)], int(damaged)


def first(layout: TableLayout, keys: NDArray[np.int64]) -> Floats:
    """Initial weights of keys, as an array (keys, dim)."""
    keys = _straight(keys)
    out = np.empty((len(keys), layout.dim), np.float32)
    loops.first(len(keys), at(keys), at(out), layout.dim, layout.start, layout.scale, _seed(layout), layout.form)
    return out


def _straight(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.require(keys, np.int64, ["C", "A"])


def _seed(layout: TableLayout) -> int:
    mixed = splitmix64(layout.seed)
    return mixed - (1 << 64) if mixed >> 63 else mixed
