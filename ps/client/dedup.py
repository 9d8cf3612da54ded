"""Deduplication of a batch's keys: distinct keys, grouped by owning pserver, with their counts.

One pass over a hash table if numba is available, otherwise a sort. Both yield the same set; the order of keys within a
pserver differs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps import hashing
from ps.store.kernels import at_once


@dataclass(slots=True)
class DistinctKeys:
    """The distinct keys of a batch, grouped by owner."""

    keys: NDArray[np.int64]
    counts: NDArray[np.uint32]
    """Number of occurrences of each key."""
    inverse: NDArray[np.int32] | None
    """For each key of the batch its index in ``keys``; None if the batch is ``keys`` itself."""
    bounds: list[int]
    """Owner ``i`` has ``keys[bounds[i] : bounds[i + 1]]``."""


def unite(keys: NDArray[np.int64], owner: NDArray[np.int16], owners: int) -> DistinctKeys:
    """Deduplicate and group keys. ``owner``: for each bucket the index of its owner, below ``owners``."""
    fast = _fast()
    if fast is None:
        return unite_plain(keys, owner, owners)
    distinct, counts, inverse, bounds = fast.unite(keys, owner, owners)
    return DistinctKeys(distinct, counts, inverse, bounds)


def sum_rows(grads: NDArray[np.float32], united: DistinctKeys) -> NDArray[np.float32]:
    """Sum the rows of equal keys, in the order of ``united.keys``. ``grads``: ``(keys of the batch, dim)``."""
    if united.inverse is None:
        return grads
    fast = _fast()
    add = sum_plain if fast is None else fast.sum_rows
    total: NDArray[np.float32] = add(grads, united.inverse, len(united.keys))
    return total


def sum_bags(
    grads: NDArray[np.float32], bounds: NDArray[np.int64], places: NDArray[np.int32], count: int
) -> NDArray[np.float32]:
    """Add row ``i`` of ``grads`` at each of ``places[bounds[i] : bounds[i + 1]]``, which are below ``count``.

    Sums are in float32 and in the order of the batch, so they are the same bit by bit with and without numba.
    """
    fast = _fast()
    add = sum_bags_plain if fast is None else fast.sum_bags
    total: NDArray[np.float32] = add(grads, bounds, places, count)
    return total


def only(united: DistinctKeys, which: NDArray[np.bool_]) -> DistinctKeys:
    """Select some of the distinct keys; they stay grouped, but ``inverse`` is dropped."""
    sums = np.concatenate(([0], np.cumsum(which)))
    return DistinctKeys(united.keys[which], united.counts[which], None, sums[united.bounds].tolist())


def spread(rows: NDArray[np.float32], united: DistinctKeys, out: NDArray[np.float32]) -> None:
    """The inverse of ``unite``: copy each distinct key's row to all its places in the batch."""
    if united.inverse is None:
        np.copyto(out, rows)
    else:
        # The indices are valid; "clip" avoids the copy that "raise" makes of ``out``.
        np.take(rows, united.inverse, axis=0, out=out, mode="clip")


def _fast() -> Any:
    """The numba kernels if this process uses them and they need no compilation now, else None."""
    if not _modules and at_once() == "numba":
        _modules.append(importlib.import_module("ps.store.kernels.batches"))
    return _modules[0] if _modules else None


_modules: list[Any] = []


def unite_plain(keys: NDArray[np.int64], owner: NDArray[np.int16], owners: int) -> DistinctKeys:
    """``unite`` with numpy alone. The hash is a bijection, so sorting by hash also sorts by bucket."""
    mixed = hashing.mixed(keys)
    order = np.argsort(mixed, kind="stable")
    ordered = mixed[order]
    new = np.empty(len(keys), np.bool_)
    new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    begins = np.flatnonzero(new)
    counts = np.diff(begins, append=len(keys)).astype(np.uint32)
    distinct = keys[order[begins]]
    place = owner[(ordered[begins] >> np.uint64(hashing.BUCKET_SHIFT)).astype(np.intp)]
    by_owner = np.argsort(place, kind="stable")
    moved = np.empty(len(begins), np.int32)
    moved[by_owner] = np.arange(len(begins), dtype=np.int32)
    inverse = np.empty(len(keys), np.int32)
    inverse[order] = moved[np.cumsum(new) - 1]
    bounds = np.zeros(owners + 1, np.int64)
    np.cumsum(np.bincount(place, minlength=owners), out=bounds[1:])
    return DistinctKeys(distinct[by_owner], counts[by_owner], inverse, bounds.tolist())


def sum_plain(grads: NDArray[np.float32], inverse: NDArray[np.int32], count: int) -> NDArray[np.float32]:
    """``sum_rows`` with numpy alone."""
    if not len(inverse):
        return np.zeros((0, grads.shape[1]), np.float32)
    order = np.argsort(inverse, kind="stable")
    ordered = inverse[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    assert len(begins) == count, "every key occurs"  # noqa: S101
    with np.errstate(over="ignore", invalid="ignore"):  # non-finite sums are reported by the damage check
        return np.add.reduceat(grads[order], begins, axis=0)


def sum_bags_plain(
    grads: NDArray[np.float32], bounds: NDArray[np.int64], places: NDArray[np.int32], count: int
) -> NDArray[np.float32]:
    """``sum_bags`` with numpy alone."""
    dim = grads.shape[1]
    total = np.zeros((count, dim), np.float32)
    flat = (places[:, None].astype(np.intp) * dim + np.arange(dim)).reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):  # non-finite sums are reported by the damage check
        np.add.at(total.reshape(-1), flat, np.repeat(grads, np.diff(bounds), axis=0).reshape(-1))
    return total
