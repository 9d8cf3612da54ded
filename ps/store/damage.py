"""Detection of damaged values in pushes: NaN, infinities, and gradients whose squares would overflow a table's state.

Trainers check a whole push before sending any of it, so a refused push changes nothing. Pservers check their part
again. Both check the sum of equal keys, because finite values can add up to infinity.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edl.errors import PsError
from ps.rows import RowOp
from ps.spec import Damaged, Optimizer, TableSpec, UpdateRule

Floats = NDArray[np.float32]
LARGEST = float(np.finfo(np.float32).max)
LARGEST_SQUARED = 1e15
"""Largest gradient for rules that sum squares: 80,000 such gradients of 4096 weights fit into one float32 sum. With
larger ones the sum, and so the row, could become infinite for good."""
TOGETHER = 4096
"""Most trainers that may push one key in the same step. In mode sync each leaves room for the sum of all, because an
overflow would only be noticed on one pserver, after others have applied their part of the step."""
_SQUARING = (UpdateRule.ADAGRAD, UpdateRule.ROW_ADAGRAD, UpdateRule.ADAM, UpdateRule.FTRL)
_WIRE = {"f4": LARGEST, "f2": 65504.0, "bf16": 3.3895313892515355e38}
_ADVICE = "Check the loss and the LR, or set damaged to 'skip' or 'clip' for this table"


class DamagedPush(PsError):
    """A push contains a value that its table refuses."""


def limit_of(optimizer: Optimizer) -> float:
    """Largest valid absolute value of a gradient. Clipping happens before squaring."""
    if optimizer.rule in _SQUARING and not (optimizer.clip_value or optimizer.clip_norm):
        return LARGEST_SQUARED
    return LARGEST


def check(
    spec: TableSpec, keys: NDArray[np.int64], values: Floats, op: str, wire: str = "f4", trainers: int = 1
) -> None:
    """Raise ``DamagedPush``, naming the key, if the table refuses a value. Keys may repeat. ``trainers``: number of
    trainers that may push such values to the same key in this step."""
    if op == RowOp.GRAD and spec.damaged is not Damaged.REFUSE:
        return
    limit = (limit_of(spec.optimizer) if op == RowOp.GRAD else LARGEST) / trainers
    most = _most(values)
    if most <= min(limit, _WIRE[wire]) / max(1, len(keys)):
        return  # valid however many of them are summed
    if not most <= limit:
        _refuse(spec, keys, values, limit, "what was pushed")
    if op in (RowOp.GRAD, RowOp.ADD):
        keys, values = _summed(keys, values)
        if not _most(values) <= limit:
            _refuse(spec, keys, values, limit, "the sum of what was pushed")
    if not _most(values) <= _WIRE[wire]:
        _refuse(spec, keys, values, _WIRE[wire], f"what was pushed with wire='{wire}'")


def fitted(spec: TableSpec, values: Floats, op: str, wire: str) -> tuple[Floats, int]:
    """For tables that clip: gradients with the largest value of a number format instead of larger ones, and how many
    were replaced. In the format they would be infinite, and so become the largest float32."""
    if op != RowOp.GRAD or spec.damaged is not Damaged.CLIP or wire == "f4":
        return values, 0
    large = int(np.count_nonzero(np.abs(values) > _WIRE[wire]))
    return (np.clip(values, -_WIRE[wire], _WIRE[wire]), large) if large else (values, 0)


def _most(values: Floats) -> float:
    """The largest absolute value; NaN if there is one, 0 if empty."""
    return float(np.maximum(values.max(), -values.min())) if values.size else 0.0


def _summed(keys: NDArray[np.int64], values: Floats) -> tuple[NDArray[np.int64], Floats]:
    distinct, inverse = np.unique(keys, return_inverse=True)
    if len(distinct) == len(keys):
        return keys, values
    order = np.argsort(inverse, kind="stable")
    begins = np.searchsorted(inverse[order], np.arange(len(distinct)))
    with np.errstate(over="ignore", invalid="ignore"):
        return distinct, np.add.reduceat(values[order], begins, axis=0)


def _refuse(spec: TableSpec, keys: NDArray[np.int64], values: Floats, limit: float, what: str) -> None:
    row, column = np.argwhere(~(np.abs(values) <= limit))[0]
    value = values[row, column]
    if np.isfinite(value):
        found = f"holds {value:g}, more than {limit:g}"
        if limit <= LARGEST_SQUARED and spec.optimizer.rule in _SQUARING:
            found += f", which {spec.optimizer.rule.value} cannot square"
    else:
        found = "holds NaN or an infinity"
    raise DamagedPush(
        f"table {spec.name}, key {keys[row]}: {what} {found}; nothing of this push was applied. {_ADVICE}"
    )
