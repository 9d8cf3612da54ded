"""Rows that remember the pushes that made them: each push adds a power of four of its own to one weight.

A weight holds twelve digits to the base of four, the most that float32 adds exactly. A digit says how often its push
was applied, so that what was lost or applied twice is seen at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from ps.hashing import buckets_of
from ps.rows import RowOp, TablePush
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore

Id = tuple[int, int]
"""A push: trainer and seq."""
DIGITS, WEIGHTS = 12, 24
MOST = DIGITS * WEIGHTS
"""Pushes that one row remembers."""
TABLE = TableSpec("t", WEIGHTS, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS))
ROWS = 2
"""Rows of a bucket."""
_SHIFTS = 2 * np.arange(DIGITS)
_SEARCHED = np.arange(200_000)
_BUCKETS = buckets_of(_SEARCHED)


def key(bucket: int, row: int) -> int:
    """The key of a row."""
    return int(_SEARCHED[bucket == _BUCKETS][row])


class Ledger:
    """Which digit of which row belongs to which push."""

    def __init__(self, buckets: int) -> None:
        self.keys = {(bucket, row): key(bucket, row) for bucket in range(buckets) for row in range(ROWS)}
        self._of = {number: place for place, number in self.keys.items()}
        self._pushes: dict[tuple[int, int], list[Id]] = {place: [] for place in self.keys}

    def full(self, place: tuple[int, int]) -> bool:
        """Whether a row can remember no more."""
        return len(self._pushes[place]) >= MOST

    def part(self, parts: Mapping[int, tuple[int, ...]], push: Id) -> TablePush:
        """What a push sends for these rows, by bucket."""
        places = [(bucket, row) for bucket, rows in parts.items() for row in rows]
        grads = np.zeros((len(places), WEIGHTS), np.float32)
        for number, place in enumerate(places):
            pushes = self._pushes[place]
            if push not in pushes:
                pushes.append(push)
            weight, digit = divmod(pushes.index(push), DIGITS)
            grads[number, weight] = 4**digit
        return TablePush("t", np.array([self.keys[place] for place in places], np.int64), grads, RowOp.GRAD)

    def parts(self, keys: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Rows by bucket."""
        found: dict[int, tuple[int, ...]] = {}
        for number in keys:
            bucket, row = self._of[int(number)]
            found[bucket] = (*found.get(bucket, ()), row)
        return found

    def read(self, place: tuple[int, int], weights: NDArray[np.float32]) -> dict[Id, int]:
        """The pushes in a row, and how often each was applied."""
        digits = ((weights.astype(np.int64)[:, None] >> _SHIFTS) & 3).reshape(-1).tolist()
        return {push: count for push, count in zip(self._pushes[place], digits, strict=False) if count}

    def row(self, store: RowStore, bucket: int, row: int) -> dict[Id, int]:
        """The pushes in a row of a store."""
        if "t" not in store.tables:
            return {}
        out = np.zeros((1, WEIGHTS), np.float32)
        store.pull("t", np.array([self.keys[bucket, row]], np.int64), out, step=0, insert=False)
        return self.read((bucket, row), out[0])

    def read_keys(self, keys: NDArray[np.int64], weights: NDArray[np.float32]) -> Iterable[tuple[int, int, Id, int]]:
        """Bucket, row, push and how often it was applied, for rows of a checkpoint."""
        for number, some in zip(keys.tolist(), weights, strict=True):
            place = self._of[number]
            yield from ((*place, push, count) for push, count in self.read(place, some).items())
