"""Validation of the arguments that a script passes: keys, rows and output arrays. Errors name what is allowed."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError
from ps.rows import OPS
from ps.spec import TableSpec


def as_keys(table: str, keys: Any) -> NDArray[np.int64]:
    """Convert keys to a contiguous int64 array of the same shape. Raises ``PsError`` if that is not possible."""
    try:
        given = np.asarray(keys)
    except (ValueError, OverflowError) as error:
        raise PsError(f"table {table}: the keys cannot be converted to an array: {error}") from None
    if given.dtype == np.int64:
        return np.ascontiguousarray(given).reshape(given.shape)
    if not given.size and given.dtype.kind in "fO":
        return np.zeros(given.shape, np.int64)
    if given.dtype == object or (given.dtype == np.uint64 and given.size and int(given.max()) >= 1 << 63):
        flat = given.reshape(-1).tolist()
        bad = [one for one in flat if type(one) is not int or not -(1 << 63) <= one < 1 << 63]
        if not bad:
            return given.astype(np.int64)
        raise PsError(f"table {table}: key {bad[0]!r:.60} is not an integer from -2**63 to 2**63 - 1. Hash it to one")
    if given.dtype.kind not in "iu":
        raise PsError(f"table {table}: keys must be integers, these are {given.dtype}. Hash or convert them")
    return given.astype(np.int64)


def as_rows(spec: TableSpec, shape: tuple[int, ...], values: Any, what: str = "gradients") -> NDArray[np.float32]:
    """Convert to float32 of shape ``(n, dim)``. ``shape`` is that of the keys. Raises ``PsError``."""
    try:
        given = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise PsError(f"table {spec.name}: the {what} cannot be converted to an array: {error}") from None
    if given.dtype.kind != "f":
        raise PsError(f"table {spec.name}: {what} must be floating-point numbers, these are {given.dtype}")
    wanted = (*shape, spec.dim)
    if given.shape != wanted:
        raise PsError(
            f"table {spec.name}: {what} have shape {given.shape}; keys of shape {shape} and dim {spec.dim} "
            f"need {wanted}"
        )
    with np.errstate(over="ignore"):  # infinities are handled by the table's ``damaged`` policy
        return np.ascontiguousarray(given, np.float32).reshape(-1, spec.dim)


def as_out(spec: TableSpec, shape: tuple[int, ...], out: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """The array that rows are written to: ``out`` if it is suitable, a new one if it is None. Raises ``PsError``."""
    wanted = (*shape, spec.dim)
    if out is None:
        return np.empty(wanted, np.float32)
    good = isinstance(out, np.ndarray) and out.dtype == np.float32 and out.flags.c_contiguous and out.flags.writeable
    if not good or out.shape != wanted:
        have = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise PsError(
            f"table {spec.name}: out must be a writable float32 array of shape {wanted} in C order, not {have}"
        )
    return out


def as_step(step: Any) -> int:
    """Convert the number of a step, which may be numpy's. Raises ``PsError``."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 32:
        raise PsError(f"step={step!r}: must be an integer from 0 to {(1 << 32) - 1}")
    return number


def as_op(op: str) -> str:
    """Return ``op`` if it is a valid push operation. Raises ``PsError``."""
    if op not in OPS:
        raise PsError(f"the operation of a push is one of {', '.join(OPS)}, not {op!r}")
    return op
