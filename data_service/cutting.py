"""Open shards and the batches that are cut from them: rows of numpy arrays, in the order of the epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_service.window import Segment
from edl.arithmetic.permutation import Permutation, key

Columns = dict[str, Any]
"""By name: an array with one entry for each record."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a worker's steps are cut."""

    sizes: tuple[int, ...]
    """Records of each micro-batch."""
    number: int = 0
    """Of the settings that it follows from."""

    @property
    def total(self) -> int:
        """Records of a step."""
        return sum(self.sizes)


class Cursor:
    """An open shard: what of it is still to come."""

    def __init__(self, shard: int, columns: Mapping[str, Any], records: int, upto: int, order: int | None) -> None:
        """``order``: key of the order of its records; None for that of the file. ``upto``: consumed before."""
        self.shard = shard
        self.records = records
        self.upto = upto
        self._columns = columns
        self._first = upto
        self._order = None if order is None else Permutation(records, order).array(upto, records)

    @property
    def left(self) -> int:
        """Records still to come."""
        return self.records - self.upto

    def take(self, count: int) -> Columns:
        """The next records. The arrays may be views that must not be written to."""
        begin, self.upto = self.upto, self.upto + count
        if self._order is None:
            return {name: array[begin : self.upto] for name, array in self._columns.items()}
        rows = self._order[begin - self._first : self.upto - self._first]
        return {name: array.take(rows, axis=0) for name, array in self._columns.items()}

    @property
    def segment(self) -> Segment:
        """How far it is consumed by what has been taken."""
        return Segment(self.shard, self.upto, self.upto == self.records)


def order_of(seed: int, epoch: int, shard: int) -> int:
    """Key of the order of a shard's records in an epoch."""
    return key(seed, epoch, shard)


def shares(cursors: Sequence[Cursor], count: int, mixed: bool, seed: int, epoch: int) -> list[int]:
    """How many of the next ``count`` records each shard gives: ``mixed``, at random by what they have left; else one
    after the other. They must have so many."""
    if not mixed:
        given = []
        for cursor in cursors:
            given.append(min(count, cursor.left))
            count -= given[-1]
        return given
    draw = _random(cursors, seed, epoch)
    return [int(one) for one in draw.multivariate_hypergeometric([cursor.left for cursor in cursors], count)]


def take(cursors: Sequence[Cursor], count: int, mixed: bool, seed: int, epoch: int) -> tuple[Columns, list[Segment]]:
    """The next ``count`` records of some shards, and how far these are consumed then."""
    draw = _random(cursors, seed, epoch) if mixed else None
    parts, segments = [], []
    for cursor, some in zip(cursors, shares(cursors, count, mixed, seed, epoch), strict=True):
        if some:
            parts.append(cursor.take(some))
            segments.append(cursor.segment)
    if len(parts) == 1:
        return parts[0], segments
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
    if draw is not None:
        rows = draw.permutation(count)
        whole = {name: array.take(rows, axis=0) for name, array in whole.items()}
    return whole, segments


def _random(cursors: Sequence[Cursor], seed: int, epoch: int) -> np.random.Generator:
    """Depends on nothing but the position: what is taken again after a fault comes in the same order."""
    return np.random.default_rng(key(seed, epoch, *(number for one in cursors for number in (one.shard, one.upto))))


def micro_batches(columns: Columns, count: int, sizes: Sequence[int]) -> list[tuple[Columns, int]]:
    """A step's records as micro-batches, each with its number of samples. One for each of ``sizes``: when there are too
    few records, the first ones are filled, and the others repeat some that do not count."""
    parts: list[tuple[Columns, int]] = []
    begin = 0
    for size in sizes:
        end = min(count, begin + size)
        if end > begin:
            parts.append(({name: array[begin:end] for name, array in columns.items()}, end - begin))
        else:
            parts.append((parts[0][0], 0))
        begin = end
    return parts
