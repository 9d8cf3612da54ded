"""What the kernels have to know of a table, as plain numbers: sizes of its rows, its rule, how its rows begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ps.spec import Damaged, Optimizer, Rule, Start, TableSpec
from ps.store.damage import limit_of

SGD, MOMENTUM, ADAGRAD, ROW_ADAGRAD, ADAM, FTRL, ADD, ASSIGN = range(8)
"""Codes of rules in kernels. ``ASSIGN`` is no table's rule, but what a part of a push can ask for."""
CODES = {
    Rule.SGD: SGD,
    Rule.MOMENTUM: MOMENTUM,
    Rule.ADAGRAD: ADAGRAD,
    Rule.ROW_ADAGRAD: ROW_ADAGRAD,
    Rule.ADAM: ADAM,
    Rule.FTRL: FTRL,
    Rule.ADD: ADD,
}
STARTS = {Start.ZEROS: 0, Start.CONSTANT: 1, Start.UNIFORM: 2, Start.NORMAL: 3}
KEEP, SKIP, CLIP = range(3)
"""What kernels do about a damaged value: nothing (it has been looked for before), leave the row, replace it."""
TREATMENTS = {Damaged.REFUSE: KEEP, Damaged.SKIP: SKIP, Damaged.CLIP: CLIP}
META_BYTES = 24
"""Of a row, besides weights and state: its key, frequency, updates, last-seen step, mark of its last change."""
FREE = 0xFFFFFFFF
"""In place of the mark: nobody's row."""
MOST_CORRECTIONS = 1 << 16

NUMBERS = (
    "lr", "momentum", "beta1", "beta2", "eps", "l1", "l2", "lr_power", "weight_decay", "clip_value", "clip_norm",
    "scale", "limit",
)  # fmt: skip
"""The order of the numbers that kernels take."""
SCALE, LIMIT = NUMBERS.index("scale"), NUMBERS.index("limit")


def slots_of(rule: Rule, dim: int) -> int:
    """Float32 numbers of state in a row."""
    if rule is Rule.ROW_ADAGRAD:
        return 1
    if rule in (Rule.ADAM, Rule.FTRL):
        return 2 * dim
    return dim if rule in (Rule.MOMENTUM, Rule.ADAGRAD) else 0


@dataclass(frozen=True, slots=True)
class Layout:
    """A table as kernels see it."""

    dim: int
    slots: int
    rule: int
    start: int
    scale: float
    seed: int
    accumulator: float
    """What the first ``accumulated`` numbers of a new row's state are; the others are 0."""
    accumulated: int
    damaged: int
    corrections: NDArray[np.float32]
    """Adam: ``1 - beta1**t`` and ``sqrt(1 - beta2**t)`` for ``t`` of 1 .. n; the last holds for all later ones."""

    @classmethod
    def of(cls, spec: TableSpec) -> Layout:
        """From what the user said."""
        rule = spec.optimizer.rule
        slots = slots_of(rule, spec.dim)
        accumulated = {Rule.ADAGRAD: spec.dim, Rule.ROW_ADAGRAD: 1, Rule.FTRL: spec.dim}.get(rule, 0)
        initial = spec.initial
        return cls(
            spec.dim, slots, CODES[rule], STARTS[initial.start], initial.scale, initial.seed,
            spec.optimizer.initial_accumulator, accumulated, TREATMENTS[spec.damaged],
            corrections(spec.optimizer) if rule is Rule.ADAM else np.ones((2, 1), np.float32),
        )  # fmt: skip

    @property
    def row_bytes(self) -> int:
        """Of one row without its place in the index: counters, weights and state lie together, for whoever needs the
        one mostly needs the next."""
        grain = 32 if self.dim >= 16 else 8  # so that as few lines of 64 bytes as possible are touched
        return -(-(META_BYTES + 4 * (self.dim + self.slots)) // grain) * grain


def corrections(optimizer: Optimizer) -> NDArray[np.float32]:
    """Adam's corrections of moments that began at zero, until they make no difference in float32."""
    slowest = max(optimizer.beta1, optimizer.beta2, 0.5)
    enough = int(np.ceil(np.log(2.0**-26) / np.log(slowest)))
    steps = np.arange(1, min(enough, MOST_CORRECTIONS) + 1, dtype=np.float64)
    first, second = 1 - optimizer.beta1**steps, np.sqrt(1 - optimizer.beta2**steps)
    return np.stack([first, second]).astype(np.float32)


def numbers(optimizer: Optimizer, lr: float, scale: float) -> NDArray[np.float64]:
    """In the order of ``NUMBERS``."""
    named = {"lr": lr, "scale": scale, "limit": limit_of(optimizer)}
    return np.array([named.get(name, getattr(optimizer, name, 0.0)) for name in NUMBERS], np.float64)
