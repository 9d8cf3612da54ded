"""Rows kept by a trainer for its later pulls, for a bounded number of steps.

A row that others have changed is seen at most ``steps`` steps late. One that this trainer has written is forgotten, so
it always sees its own updates. Two rows that fall into one place: the more frequent stays (its count is halved each
time that it is challenged). Lookups are arrays: there is no loop over keys.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from ps import hashing

_EMPTY = -(1 << 62)
"""A step that is never recent."""


class RowCache:
    """Of one table."""

    def __init__(self, rows: int, dim: int, steps: int) -> None:
        """At most ``rows`` of ``dim`` weights (to the next power of two below, so that a place is a few bits)."""
        places = 1 << (max(rows, 1).bit_length() - 1)
        self._steps = steps
        self._mask = np.uint64(places - 1)
        self.writes = 0
        """How often this trainer has written to the table."""
        self._lock = threading.Lock()
        self._keys = np.zeros(places, np.int64)
        self._since = np.full(places, _EMPTY, np.int64)
        self._count = np.zeros(places, np.uint32)
        self._rows = np.zeros((places, dim), np.float32)

    def lookup(self, keys: NDArray[np.int64], out: NDArray[np.float32], step: int) -> NDArray[np.bool_]:
        """Fill in what is here and young enough; which are missing."""
        place = self._place(keys)
        with self._lock:
            hit = (self._keys[place] == keys) & (self._since[place] >= step - self._steps)
            self._count[place[hit]] += np.uint32(1)
            out[hit] = self._rows[place[hit]]
        missing: NDArray[np.bool_] = ~hit
        return missing

    def keep(
        self, keys: NDArray[np.int64], counts: NDArray[np.uint32], rows: NDArray[np.float32], step: int, writes: int
    ) -> None:
        """Rows as they were fetched in this step. ``keys`` are distinct. ``writes``: as it was before they were asked
        for; when this trainer has written since, they may be from before that and are not kept."""
        place = self._place(keys)
        with self._lock:
            if writes != self.writes:
                return
            stale = self._since[place] < step - self._steps
            take = stale | (self._keys[place] == keys) | (counts >= self._count[place])
            self._count[place[~take]] >>= np.uint32(1)
            # Of several new ones for one place the last is written, and all its arrays have to agree on that.
            chosen = np.flatnonzero(take)
            _, last = np.unique(place[chosen][::-1], return_index=True)
            chosen = chosen[::-1][last]
            at = place[chosen]
            self._keys[at], self._since[at], self._count[at] = keys[chosen], step, counts[chosen]
            self._rows[at] = rows[chosen]

    def forget(self, keys: NDArray[np.int64]) -> None:
        """They have been written."""
        place = self._place(keys)
        with self._lock:
            self.writes += 1
            self._since[place[self._keys[place] == keys]] = _EMPTY

    def _place(self, keys: NDArray[np.int64]) -> NDArray[np.intp]:
        place: NDArray[np.intp] = (hashing.mixed(keys) & self._mask).astype(np.intp)
        return place
