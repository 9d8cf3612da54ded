"""Keys of a batch as pservers want them: each once, those of one pserver together, and how often each occurred.

One pass of a hash table where numba is at hand, else a sort. Both give the same set; the order of the keys of one
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
    """The distinct keys of a batch, grouped by who owns them."""

    keys: NDArray[np.int64]
    counts: NDArray[np.uint32]
    """How often each occurred."""
    inverse: NDArray[np.int32] | None
    """For each key of the batch its place in ``keys``; None when the batch is ``keys`` itself."""
    bounds: list[int]
    """Owner number ``i`` (of those given) has ``keys[bounds[i] : bounds[i + 1]]``."""


def unite(keys: NDArray[np.int64], owner: NDArray[np.int16], owners: int) -> DistinctKeys:
    """``owner``: by bucket, the place of its owner in a list of ``owners``."""
    fast = _fast()
    if fast is None:
        return unite_plain(keys, owner, owners)
    distinct, counts, inverse, bounds = fast.unite(keys, owner, owners)
    return DistinctKeys(distinct, counts, inverse, bounds)


def sum_rows(grads: NDArray[np.float32], united: DistinctKeys) -> NDArray[np.float32]:
    """Rows of equal keys added up, in the order of ``united.keys``. ``grads``: ``(keys of the batch, dim)``."""
    if united.inverse is None:
        return grads
    fast = _fast()
    add = sum_plain if fast is None else fast.sum_rows
    return add(grads, united.inverse, len(united.keys))


def only(united: DistinctKeys, which: NDArray[np.bool_]) -> DistinctKeys:
    """Some of the distinct keys, still grouped; their places in the batch are not kept."""
    sums = np.concatenate(([0], np.cumsum(which)))
    return DistinctKeys(united.keys[which], united.counts[which], None, sums[united.bounds].tolist())


def spread(rows: NDArray[np.float32], united: DistinctKeys, out: NDArray[np.float32]) -> None:
    """The inverse of uniting: each key's row to where the batch has the key."""
    if united.inverse is None:
        np.copyto(out, rows)
    else:
        # Indices are known to be good; "clip" spares the copy that "raise" makes for the sake of ``out``.
        np.take(rows, united.inverse, axis=0, out=out, mode="clip")


def _fast() -> Any:
    """The compiled ones, if this process uses compiled kernels and need not compile them first."""
    if not _modules and at_once() == "numba":
        _modules.append(importlib.import_module("ps.store.kernels.batches"))
    return _modules[0] if _modules else None


_modules: list[Any] = []


def unite_plain(keys: NDArray[np.int64], owner: NDArray[np.int16], owners: int) -> DistinctKeys:
    """With numpy alone. Sorted by hash, which is one to one, keys are in the order of their buckets as well."""
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
    """With numpy alone."""
    if not len(inverse):
        return np.zeros((0, grads.shape[1]), np.float32)
    order = np.argsort(inverse, kind="stable")
    ordered = inverse[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    assert len(begins) == count, "every key occurs"  # noqa: S101
    with np.errstate(over="ignore", invalid="ignore"):  # a sum that is not finite: the check for damage names it
        return np.add.reduceat(grads[order], begins, axis=0)
