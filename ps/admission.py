"""Which unknown keys get a row: by how often they have come, counted approximately in bounded memory, or by chance.

A count-min sketch for each table and shard (made when first needed, 192 KiB) never counts too little and seldom too
much. When it has taken in ``FULL`` occurrences per column, all its counters are halved: keys that come again and again
keep their lead, the many that came once are forgotten.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ps.hashing import GOLDEN, mixed
from ps.spec import Admission

WIDTH = 1 << 14
DEPTH = 3
FULL = 4
LONGEST = 1 << 12
"""Occurrences in one pull that are tried for a chance; of a key that comes more often, no more are needed."""


class Sketch:
    """Occurrences of keys without a row."""

    def __init__(self) -> None:
        self._counters = np.zeros((DEPTH, WIDTH), np.uint32)
        self._taken = 0
        self.generation = 0

    def add(self, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count unique keys; how often each has come by now, at least that."""
        value = mixed(keys)
        columns = np.stack(
            [(mixed(value + np.uint64(row)) & np.uint64(WIDTH - 1)).astype(np.intp) for row in range(DEPTH)]
        )
        rows = np.arange(DEPTH)[:, None]
        total: NDArray[np.int64] = self._counters[rows, columns].min(axis=0).astype(np.int64) + counts
        np.maximum.at(self._counters, (rows, columns), np.minimum(total, 0xFFFFFFFF).astype(np.uint32))
        self._taken += int(counts.sum())
        if self._taken > FULL * WIDTH:
            self._counters >>= np.uint32(1)
            self._taken //= 2
            self.generation += 1
        return total

    def bytes(self) -> int:
        """Of memory."""
        return self._counters.nbytes


def admitted(rule: Admission, sketch: Sketch, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these unique unknown keys, having come so often in this pull, get a row now."""
    generation = sketch.generation
    total = sketch.add(keys, counts)
    if rule.count > 1:
        return total >= rule.count
    tries = np.minimum(counts, LONGEST)
    which = np.repeat(np.arange(len(keys)), tries)
    number = np.arange(len(which)) - np.repeat(np.cumsum(tries) - tries, tries) + np.repeat(total - counts, tries)
    drawn = mixed(mixed(keys)[which] ^ (number + (generation << 40)).astype(np.uint64) * np.uint64(GOLDEN))
    lucky = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53 < rule.probability
    found = np.zeros(len(keys), np.bool_)
    found[which[lucky]] = True
    return found
