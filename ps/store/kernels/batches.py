"""numba kernels for a trainer's batches; the numpy versions are in ``ps/client/dedup.py``."""

# mypy: allow-untyped-calls

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ps.hashing import BUCKET_SHIFT
from ps.store.kernels.mixing import mix
from ps.store.kernels.pointers import compiled

_BUCKET = np.uint64(BUCKET_SHIFT)


@compiled()
def _unite(
    keys: NDArray[np.int64],
    owner: NDArray[np.int16],
    table: NDArray[np.int32],
    distinct: NDArray[np.int64],
    counts: NDArray[np.uint32],
    place: NDArray[np.int16],
    inverse: NDArray[np.int32],
    bounds: NDArray[np.int64],
) -> int:
    mask = np.uint64(len(table) - 1)
    found = 0
    for i in range(len(keys)):
        key = keys[i]
        mixed = mix(np.uint64(key))
        slot = mixed & mask
        while True:
            at = table[slot]
            if at < 0:
                table[slot] = found
                distinct[found] = key
                counts[found] = 1
                mine = owner[np.int64(mixed >> _BUCKET)]
                place[found] = mine
                bounds[mine + 1] += 1
                inverse[i] = found
                found += 1
                break
            if distinct[at] == key:
                counts[at] += np.uint32(1)
                inverse[i] = at
                break
            slot = (slot + np.uint64(1)) & mask
    for i in range(1, len(bounds)):
        bounds[i] += bounds[i - 1]
    return found


@compiled()
def _arrange(
    found: int,
    distinct: NDArray[np.int64],
    counts: NDArray[np.uint32],
    place: NDArray[np.int16],
    next_of: NDArray[np.int64],
    moved: NDArray[np.int32],
    keys: NDArray[np.int64],
    times: NDArray[np.uint32],
    inverse: NDArray[np.int32],
) -> None:
    for i in range(found):
        mine = place[i]
        to = next_of[mine]
        next_of[mine] = to + 1
        moved[i] = to
        keys[to] = distinct[i]
        times[to] = counts[i]
    for i in range(len(inverse)):
        inverse[i] = moved[inverse[i]]


@compiled()
def _sum(values: NDArray[np.float32], inverse: NDArray[np.int32], out: NDArray[np.float32]) -> None:
    dim = values.shape[1]
    for i in range(len(inverse)):
        to = inverse[i]
        for column in range(dim):
            out[to, column] += values[i, column]


@compiled()
def _sum_bags(
    values: NDArray[np.float32], bounds: NDArray[np.int64], places: NDArray[np.int32], out: NDArray[np.float32]
) -> None:
    dim = values.shape[1]
    for bag in range(len(values)):
        for i in range(bounds[bag], bounds[bag + 1]):
            to = places[i]
            for column in range(dim):
                out[to, column] += values[bag, column]


def unite(
    keys: NDArray[np.int64], owner: NDArray[np.int16], owners: int
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.int32], list[int]]:
    """Distinct keys grouped by owner, their counts, the index of each key of the batch among them, and the owners'
    bounds."""
    count = len(keys)
    size = 1 << max(4, (2 * count - 1).bit_length())
    distinct, counts = np.empty(count, np.int64), np.empty(count, np.uint32)
    place, inverse = np.empty(count, np.int16), np.empty(count, np.int32)
    bounds = np.zeros(owners + 1, np.int64)
    found = _unite(keys, owner, np.full(size, -1, np.int32), distinct, counts, place, inverse, bounds)
    arranged, times = np.empty(found, np.int64), np.empty(found, np.uint32)
    _arrange(found, distinct, counts, place, bounds[:-1].copy(), np.empty(found, np.int32), arranged, times, inverse)
    return arranged, times, inverse, bounds.tolist()


def sum_rows(values: NDArray[np.float32], inverse: NDArray[np.int32], count: int) -> NDArray[np.float32]:
    """Sum the rows with the same target index."""
    out = np.zeros((count, values.shape[1]), np.float32)
    _sum(values, inverse, out)
    return out


def sum_bags(
    values: NDArray[np.float32], bounds: NDArray[np.int64], places: NDArray[np.int32], count: int
) -> NDArray[np.float32]:
    """Add row ``i`` of the values at each of ``places[bounds[i] : bounds[i + 1]]``."""
    out = np.zeros((count, values.shape[1]), np.float32)
    _sum_bags(values, bounds, places, out)
    return out


def warm() -> None:
    """Compile or load all functions."""
    keys = np.arange(8, dtype=np.int64)
    distinct, _, inverse, _ = unite(keys, np.zeros(1 << (64 - BUCKET_SHIFT), np.int16), 1)
    sum_rows(np.ones((8, 2), np.float32), inverse, len(distinct))
    sum_bags(np.ones((4, 2), np.float32), np.arange(0, 10, 2), inverse, len(distinct))
