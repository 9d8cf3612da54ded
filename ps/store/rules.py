"""A table's parameters as plain numbers for the kernels: row layout, update rule, initialisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.spec import Damaged, InitMethod, Optimizer, TableSpec, UpdateRule, WeightFormat
from ps.store.damage import limit_of
from ps.store.halves import BRAIN, FLOAT, HALF

SGD, MOMENTUM, ADAGRAD, ROW_ADAGRAD, ADAM, FTRL, ADD, ASSIGN = range(8)
"""Codes of the rules in kernels. ``ASSIGN`` is not a table's rule but an operation of pushes; ``ADD`` may be
either."""
CODES = {
    UpdateRule.SGD: SGD,
    UpdateRule.MOMENTUM: MOMENTUM,
    UpdateRule.ADAGRAD: ADAGRAD,
    UpdateRule.ROW_ADAGRAD: ROW_ADAGRAD,
    UpdateRule.ADAM: ADAM,
    UpdateRule.FTRL: FTRL,
    UpdateRule.ADD: ADD,
}
STARTS = {InitMethod.ZEROS: 0, InitMethod.CONSTANT: 1, InitMethod.UNIFORM: 2, InitMethod.NORMAL: 3}
FORMS = {WeightFormat.F4: FLOAT, WeightFormat.F2: HALF, WeightFormat.BF16: BRAIN}
KEEP, SKIP, CLIP = range(3)
"""Treatment of damaged values by kernels: none (checked before), skip the row, replace the value."""
TREATMENTS = {Damaged.REFUSE: KEEP, Damaged.SKIP: SKIP, Damaged.CLIP: CLIP}
META_BYTES = 24
"""Bytes per row besides weights and state: key, frequency, updates, last-seen step, mark of the last change."""
FREE = 0xFFFFFFFF
"""In place of the mark: the slot is free."""
MOST_CORRECTIONS = 1 << 16

NUMBERS = (
    "lr", "momentum", "beta1", "beta2", "eps", "l1", "l2", "lr_power", "weight_decay", "clip_value", "clip_norm",
    "scale", "limit", "factor", "salt",
)  # fmt: skip
"""Order of the hyperparameters passed to kernels. ``factor``: by what FTRL multiplies gradients instead of its LR.
``salt``: not 0 if the values are no update by the table's rule and do not count as one: a whole number, different for
each push, from which the rounding of 16-bit weights is drawn besides the count."""
SCALE, LIMIT, SALT = NUMBERS.index("scale"), NUMBERS.index("limit"), NUMBERS.index("salt")


def slots_of(rule: UpdateRule, dim: int) -> int:
    """Number of float32 state values per row."""
    if rule is UpdateRule.ROW_ADAGRAD:
        return 1
    if rule in (UpdateRule.ADAM, UpdateRule.FTRL):
        return 2 * dim
    return dim if rule in (UpdateRule.MOMENTUM, UpdateRule.ADAGRAD) else 0


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table as the kernels see it."""

    dim: int
    slots: int
    rule: int
    start: int
    scale: float
    seed: int
    accumulator: float
    """Initial value of the first ``accumulated`` state values of a row; the others are 0."""
    accumulated: int
    damaged: int
    form: int
    """Format of the weights, a code of ``ps.store.halves``."""
    corrections: NDArray[np.float32]
    """Adam: ``1 - beta1**t`` and ``sqrt(1 - beta2**t)`` for ``t`` = 1 .. n. Kernels compute those of later steps unless
    the last ones are 1."""

    @classmethod
    def of(cls, spec: TableSpec) -> TableLayout:
        """Derive the layout from a table's definition."""
        rule = spec.optimizer.rule
        slots = slots_of(rule, spec.dim)
        accumulated = {UpdateRule.ADAGRAD: spec.dim, UpdateRule.ROW_ADAGRAD: 1, UpdateRule.FTRL: spec.dim}.get(rule, 0)
        initial = spec.initial
        return cls(
            spec.dim, slots, CODES[rule], STARTS[initial.start], initial.scale, initial.seed,
            spec.optimizer.initial_accumulator, accumulated, TREATMENTS[spec.damaged],
            FORMS[spec.weights],
            corrections(spec.optimizer) if rule is UpdateRule.ADAM else np.ones((2, 1), np.float32),
        )  # fmt: skip

    @property
    def weight_words(self) -> int:
        """Units of 4 bytes that the weights of a row take."""
        return self.dim if self.form == FLOAT else (self.dim + 1) // 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one row without its index entry. Counters, weights and state are adjacent because they are mostly
        used together."""
        grain = 32 if self.dim >= 16 else 8  # touches as few 64-byte cache lines as possible
        return -(-(META_BYTES + 4 * (self.weight_words + self.slots)) // grain) * grain


def corrections(optimizer: Optimizer) -> NDArray[np.float32]:
    """Adam's bias corrections, up to the step where they no longer matter in float32 or to ``MOST_CORRECTIONS``."""
    slowest = max(optimizer.beta1, optimizer.beta2, 0.5)
    enough = int(np.ceil(np.log(2.0**-26) / np.log(slowest)))
    steps = np.arange(1, min(enough, MOST_CORRECTIONS) + 1, dtype=np.float64)
    return corrections_at(optimizer.beta1, optimizer.beta2, steps)


def corrections_at(beta1: float, beta2: float, steps: NDArray[np.float64]) -> NDArray[np.float32]:
    """Adam's two bias corrections in these steps, counted from 1: ``(2, steps)``."""
    return np.stack([1 - beta1**steps, np.sqrt(1 - beta2**steps)]).astype(np.float32)


def numbers(optimizer: Optimizer, lr: float, scale: float) -> NDArray[np.float64]:
    """The hyperparameters in the order of ``NUMBERS``.

    FTRL recomputes a weight from sums over all of the row's updates, which hold the optimizer's own LR. With another LR
    at the end, all earlier updates would be scaled again.
    """
    factor = 1.0
    if optimizer.rule is UpdateRule.FTRL:
        lr, factor = optimizer.lr, lr / optimizer.lr
    named = {"lr": lr, "scale": scale, "limit": limit_of(optimizer), "factor": factor}
    return np.array([named.get(name, getattr(optimizer, name, 0.0)) for name in NUMBERS], np.float64)
