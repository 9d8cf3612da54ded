"""Stores with either set of kernels, and short ways to pull from them and push to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ps.rows import Pushed, RowOp, TablePush, TrainerPush
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore

both_kernels = pytest.mark.parametrize("kernels", ["numpy", "numba"])
ZEROS = Initial(InitMethod.ZEROS)
COUNTER = TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS)


def store_of(kernels: str, *specs: TableSpec, most_bytes: int = 0) -> RowStore:
    """A store with these tables."""
    if kernels == "numba":
        pytest.importorskip("numba")
    store = RowStore(kernels=kernels, most_bytes=most_bytes)
    for spec in specs:
        store.define(spec)
    return store


def keys_of(*keys: int) -> NDArray[np.int64]:
    """Keys as an array."""
    return np.array(keys, np.int64)


def pull(
    store: RowStore, keys: Sequence[int] | NDArray[np.int64], step: int = 1, insert: bool = True
) -> NDArray[np.float32]:
    """Pull weights of table ``t``."""
    wanted = np.asarray(keys, np.int64)
    out = np.empty((len(wanted), store.tables["t"].spec.dim), np.float32)
    assert store.pull("t", wanted, out, step=step, insert=insert) == 0
    return out


def part(keys: Sequence[int] | NDArray[np.int64], values: object, op: str = RowOp.GRAD) -> TablePush:
    """For the table ``t``; a number stands for rows full of it, two of them for each key."""
    held = np.asarray(keys, np.int64)
    if isinstance(values, int | float):
        values = np.full((len(held), 2), values)
    return TablePush("t", held, np.asarray(values, np.float32), op)


def push(
    store: RowStore, keys: Sequence[int] | NDArray[np.int64], values: object, *, trainer: int = 0, seq: int = 0,
    step: int = 1, op: str = RowOp.GRAD,
) -> Pushed:  # fmt: skip
    """Push a single part."""
    return store.push([TrainerPush(trainer, seq, [part(keys, values, op)])], step=step)
