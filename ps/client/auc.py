"""The area under the ROC curve over the examples of all trainers, from counts of scores that can be added up.

Scores are counted in bins of equal width. Two examples in one bin count as equal, so the result differs from the exact
one by at most half the share of pairs with both in one bin. The bins are rows of a table with the rule ``add``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edl.errors import SettingError
from ps.client.frontend import part
from ps.client.layer_arguments import plain_array
from ps.rows import RowOp
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule

MOST_BINS = 1 << 20
Counts = NDArray[np.float64]
"""Of each bin, the examples with label 0 and those with label 1: ``(bins, 2)``."""


def counted(scores: Any, labels: Any, bins: int) -> Counts:
    """Count examples. Raises ``SettingError`` unless scores are from 0 to 1, labels are 0 or 1, and as many."""
    score, label = plain_array(scores).reshape(-1), plain_array(labels).reshape(-1)
    if score.shape != label.shape:
        raise SettingError("labels", len(label), f"must be as many as the scores, {len(score)}")
    bad = ~((score >= 0) & (score <= 1))
    if bad.any():
        raise SettingError("score", score[bad][0], "must be from 0 to 1", "Pass probabilities, such as sigmoid(logits)")
    if not np.isin(label, (0, 1)).all():
        raise SettingError("label", label[~np.isin(label, (0, 1))][0], "must be 0 or 1")
    place = np.minimum((score.astype(np.float64) * bins).astype(np.int64), bins - 1)
    found = np.bincount(2 * place + label.astype(np.int64), minlength=2 * bins)
    return found.reshape(bins, 2).astype(np.float64)


def area(counts: Counts) -> float:
    """The share of pairs of both labels in which the example with label 1 has the higher score; equal ones count half.
    NaN if one label does not occur."""
    negative, positive = counts[:, 0], counts[:, 1]
    pairs = negative.sum() * positive.sum()
    if not pairs:
        return float("nan")
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / pairs)


class Auc:
    """AUC over all trainers. Each calls ``update`` for its batches and then ``push``; when all have, ``compute`` gives
    the same result everywhere.

    ``name``: that of the table. ``bins``: 2 to 2**20. A bin counts up to 16 million examples of each label exactly.
    """

    def __init__(self, name: str = "auc", bins: int = 4096) -> None:
        if not 2 <= bins <= MOST_BINS:
            raise SettingError("bins", bins, f"must be from 2 to {MOST_BINS}")
        self.table, self.bins = name, bins
        self._counts = np.zeros((bins, 2))
        part.declare(TableSpec(name, 2, Optimizer(UpdateRule.ADD), Initial(InitMethod.ZEROS)))
        part.results.add(name)

    def update(self, scores: Any, labels: Any) -> None:
        """Count examples, here: ``scores`` from 0 to 1, ``labels`` 0 or 1. Raises ``SettingError``."""
        self._counts += counted(scores, labels, self.bins)

    def push(self, window: int = 0) -> None:
        """Add the counts since the last push to those of all trainers. Windows, such as hours or epochs, are counted
        apart; 0 or more. Does not end a step. If it raises, the counts are kept for the next push."""
        keys, used = self._keys(window), np.flatnonzero(self._counts.any(axis=1))
        values = self._counts[used].astype(np.float32)
        if len(used):
            part.client.push({self.table: (keys[used], values)}, op=RowOp.ADD)
        self._counts[:] = 0

    def compute(self, window: int = 0) -> float:
        """The AUC of what all trainers have pushed for this window; NaN if one label does not occur."""
        return area(part.client.pull(self.table, self._keys(window), insert=False).astype(np.float64))

    def _keys(self, window: int) -> NDArray[np.int64]:
        if not 0 <= window < 1 << 40:
            raise SettingError("window", window, "must be from 0 to 2**40 - 1")
        return np.arange(self.bins, dtype=np.int64) + window * self.bins
