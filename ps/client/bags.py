"""Bags of keys: a batch in which each example has any number of keys. Pure; the frameworks pool the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import SettingError
from ps.client import dedup

Keys = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bags:
    """The keys of a batch without padding, and where each bag begins."""

    keys: Keys
    """The keys of all bags, one bag after another."""
    bounds: Keys
    """Bag ``i`` has ``keys[bounds[i] : bounds[i + 1]]``, which may be empty."""
    kept: Keys | None
    """Where these keys were in the batch, flat; None if nothing was removed."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def owners(self) -> Keys:
        """The bag of each key."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.bounds))


def bags_of(
    keys: Keys, offsets: NDArray[Any] | None, table: str, *, last: bool = False, padding: int | None = None
) -> Bags:
    """Divide keys into bags, and remove the keys that are ``padding``.

    ``keys``: of shape ``(n,)`` with ``offsets``, the index of each bag's first key; or ``(bags, length)`` without.
    ``last``: the offsets also contain ``n``, as one more. Raises ``SettingError``.
    """
    bounds = _rectangle(keys, table) if offsets is None else _bounds(keys, offsets, table, last)
    flat = keys.reshape(-1)
    if padding is None or (wanted := flat != padding).all():
        return Bags(flat, bounds, None)
    before = np.concatenate(([0], np.cumsum(wanted)))
    kept = np.flatnonzero(wanted)
    return Bags(flat[kept], before[bounds], kept)


def check_weights(mode: str, given: tuple[int, ...], wanted: tuple[int, ...], table: str) -> None:
    """Raise ``SettingError`` unless weights of shape ``given`` fit keys of shape ``wanted`` and the mode."""
    if mode != "sum":
        raise SettingError(f"mode of the bag of table {table}", mode, "must be sum if there are per_sample_weights")
    if given != wanted:
        raise SettingError(
            f"shape of per_sample_weights of table {table}", given, f"must be that of the keys, {wanted}"
        )


def _rectangle(keys: Keys, table: str) -> Keys:
    if keys.ndim != 2:
        raise SettingError(
            f"shape of the keys of table {table}", keys.shape, "must be (bags, length)", "Or give offsets"
        )
    bags, length = keys.shape
    return np.arange(0, (bags + 1) * length, length, dtype=np.int64) if length else np.zeros(bags + 1, np.int64)


def _bounds(keys: Keys, offsets: NDArray[Any], table: str, last: bool) -> Keys:
    name, count = f"offsets of table {table}", keys.size
    if keys.ndim != 1:
        raise SettingError(f"shape of the keys of table {table}", keys.shape, "must have one dimension with offsets")
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise SettingError(name, f"{offsets.dtype} {offsets.shape}", "must be integers in one dimension")
    bounds = offsets.astype(np.int64) if last else np.append(offsets.astype(np.int64), count)
    if not len(bounds) or bounds[0] != 0:
        raise SettingError(name, int(bounds[0]) if len(bounds) else "none", "must begin with 0")
    if bounds[-1] != count:
        raise SettingError(name, int(bounds[-1]), f"must end with {count}, the number of keys (include_last_offset)")
    falls = np.flatnonzero(np.diff(bounds) < 0)
    if len(falls):
        at = int(falls[0])
        raise SettingError(
            name, f"{bounds[at]}, {bounds[at + 1]}", f"must not fall, nor exceed {count}, the number of keys (bag {at})"
        )
    return bounds


def trained(keys: Keys, grads: NDArray[np.float32], mode: str) -> tuple[Keys, NDArray[np.float32]]:
    """The keys that get a gradient, with their gradients: in mode ``max`` those that are nowhere the largest get
    none."""
    if mode != "max":
        return keys, grads
    some = grads.any(axis=1)
    return keys[some], grads[some]


def unpooled(
    grads: NDArray[np.float32], bags: Bags, index: NDArray[np.int32], count: int, mode: str
) -> NDArray[np.float32]:
    """The gradients of ``count`` rows from those of the pooled bags, in mode ``sum`` or ``mean``. ``index``: the row of
    each key.

    A row's gradients are added in the order of its keys in the batch, so the result depends on the batch alone, not on
    the pservers or their number.
    """
    if mode == "mean":
        lengths = np.maximum(np.diff(bags.bounds), 1)
        grads = grads / lengths.astype(np.float32)[:, None]
    return dedup.sum_bags(grads, bags.bounds, index, count)


def unpadded(keys: Keys, padding: int | None) -> Keys:
    """The keys that are not ``padding``, flat; all of them if it is None."""
    return keys if padding is None else keys[keys != padding]
