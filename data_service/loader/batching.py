"""Open shards and the batches made from them: rows of numpy arrays, in the order of the epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_service.formats.ragged import column_bytes, joined
from data_service.loader.window import ShardProgress
from edl.arithmetic.permutation import Permutation, key

Columns = dict[str, Any]
"""Columns by name: arrays with one entry per record."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of a worker's micro-batches in each step."""

    sizes: tuple[int, ...]
    """Records of each micro-batch."""
    number: int = 0
    """Version of the settings that the sizes were computed from."""

    @property
    def total(self) -> int:
        """Records of one step, over all micro-batches."""
        return sum(self.sizes)


class Cursor:
    """The unread part of an open shard."""

    def __init__(self, shard: int, columns: Mapping[str, Any], records: int, upto: int, order: int | None) -> None:
        """``order``: key of the record order; None for file order. ``upto``: number of records consumed before."""
        self.shard = shard
        self.records = records
        self.upto = upto
        self.columns = columns
        self.nbytes = sum(map(column_bytes, columns.values()))
        """Size of the columns in bytes, including memory-mapped ones and texts."""
        self._first = upto
        self._order = None if order is None else Permutation(records, order).array(upto, records)

    @property
    def left(self) -> int:
        """Number of unread records of the shard."""
        return self.records - self.upto

    def rows(self, count: int) -> Any:
        """Advance by ``count`` records; return their indices in the file."""
        begin, self.upto = self.upto, self.upto + count
        if self._order is None:
            return np.arange(begin, self.upto)
        return self._order[begin - self._first : self.upto - self._first]

    def take(self, count: int) -> Columns:
        """The next ``count`` records. The arrays may be read-only views."""
        if self._order is None:
            begin, self.upto = self.upto, self.upto + count
            return {name: array[begin : self.upto] for name, array in self.columns.items()}
        rows = self.rows(count)
        return {name: array.take(rows, axis=0) for name, array in self.columns.items()}

    @property
    def segment(self) -> ShardProgress:
        """Progress of the shard after what has been taken."""
        return ShardProgress(self.shard, self.upto, self.upto == self.records)


def order_of(seed: int, epoch: int, shard: int) -> int:
    """Key of the order of a shard's records in an epoch."""
    return key(seed, epoch, shard)


def take(
    cursors: Sequence[Cursor], count: int, mixed: bool, seed: int, epoch: int
) -> tuple[Columns, list[ShardProgress]]:
    """The next ``count`` records of some shards, which must have that many, and the shards' progress afterwards.

    ``mixed``: from all shards in proportion to their size; otherwise one shard after another. The result depends only
    on the position, so records taken again after a failure come in the same order.
    """
    if not mixed:
        return _in_turn(cursors, count)
    draw = np.random.default_rng(key(seed, epoch, *(number for one in cursors for number in (one.shard, one.upto))))
    counts = _quotas(cursors, count, draw)
    order = draw.permutation(count)
    chosen = [(cursor, int(some)) for cursor, some in zip(cursors, counts, strict=True) if some]
    gathered = _gathered([(cursor.columns, cursor.rows(some)) for cursor, some in chosen], count)
    whole = {name: array.take(order, axis=0) for name, array in gathered.items()}
    return whole, [cursor.segment for cursor, _ in chosen]


def _quotas(cursors: Sequence[Cursor], count: int, draw: np.random.Generator) -> list[int]:
    """Number of records to take from each shard, proportional to its size. So open shards end together, or in the
    order in which they were opened, and a new shard does not outweigh nearly finished ones. Fractions are rounded
    at random."""
    left = np.array([cursor.left for cursor in cursors], np.int64)
    sizes = np.array([cursor.records for cursor in cursors], np.float64)
    given = np.zeros_like(left)
    while count:
        shares = np.cumsum(np.where(left > given, sizes, 0.0))
        edges = np.floor(shares / shares[-1] * count + draw.random()).astype(np.int64)
        part = np.minimum(np.diff(edges, prepend=0), left - given)
        given += part
        count -= int(part.sum())
    return [int(one) for one in given]


def _in_turn(cursors: Sequence[Cursor], count: int) -> tuple[Columns, list[ShardProgress]]:
    parts, segments = [], []
    for cursor in cursors:
        some = min(count, cursor.left)
        if some:
            parts.append(cursor.take(some))
            segments.append(cursor.segment)
            count -= some
    if len(parts) == 1:
        return parts[0], segments
    return {name: joined([part[name] for part in parts]) for name in parts[0]} if parts else {}, segments


def _gathered(parts: Sequence[tuple[Mapping[str, Any], Any]], count: int) -> Columns:
    """Concatenate rows of several shards. Numbers are copied once, directly to their place."""
    found: Columns = {}
    for name, first in parts[0][0].items():
        alike = all(
            isinstance(columns[name], np.ndarray)
            and columns[name].dtype == first.dtype
            and columns[name].shape[1:] == first.shape[1:]
            for columns, _ in parts
        )
        if not alike or first.dtype == object:
            found[name] = joined([columns[name].take(rows, axis=0) for columns, rows in parts])
            continue
        whole = np.empty((count, *first.shape[1:]), first.dtype)
        begin = 0
        for columns, rows in parts:
            # Indices are within the shard; mode "raise" would use a buffer.
            columns[name].take(rows, axis=0, out=whole[begin : begin + len(rows)], mode="clip")
            begin += len(rows)
        found[name] = whole
    return found


def micro_batches(columns: Columns, count: int, sizes: Sequence[int]) -> list[tuple[Columns, int]]:
    """Divide a step's records into micro-batches, each with its number of samples; one for each of ``sizes``. With too
    few records, the first ones are filled and the others repeat records that do not count."""
    parts: list[tuple[Columns, int]] = []
    begin = 0
    for size in sizes:
        end = min(count, begin + size)
        if end > begin:
            parts.append(({name: array[begin:end] for name, array in columns.items()}, end - begin))
        else:  # copied, because a script's transform may change its arrays in place
            parts.append(({name: array.copy() for name, array in parts[0][0].items()}, 0))
        begin = end
    return parts
