"""FTRL rows whose weights are set: the rule computes a weight from the row's sums, so these must give the same one.

Otherwise the next gradient would undo what was set: the values of a dense table, an export, another trainer's changes
in mode geo.
"""

from __future__ import annotations

import numpy as np

from ps.spec import Optimizer
from ps.store.shard_table import ShardTable, Slots


def follow_weights(shard_table: ShardTable, slots: Slots, optimizer: Optimizer) -> None:
    """Adapt the linear sums of these rows to their weights; the sums of squares stay, and so the length of steps."""
    weights, state, dim = shard_table.weights(slots), shard_table.state[slots], shard_table.layout.dim
    lr, l1, l2 = (np.float32(one) for one in (optimizer.lr, optimizer.l1, optimizer.l2))
    quadratic = np.power(state[:, :dim], np.float32(-optimizer.lr_power)) / lr + 2 * l2
    given = -(weights * quadratic + np.sign(weights) * l1)
    kept = np.clip(state[:, dim:], -l1, l1)  # the weight 0 leaves it open
    shard_table.state[slots, dim:] = np.where(weights != 0, given, kept)
