"""A trainer's cache of pulled rows, valid for a bounded number of steps.

Changes by other trainers are seen at most ``steps`` steps late. A row that this trainer writes is dropped, so it always
sees its own updates. The cache is direct-mapped: of two rows with the same slot the more frequent one stays, and its
count is halved with each challenge. Lookups are vectorised; there is no loop over keys.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from ps import hashing

_EMPTY = -(1 << 62)
"""A step too old for any row to be valid."""


class RowCache:
    """The cached rows of one table."""

    def __init__(self, rows: int, dim: int, steps: int) -> None:
        """Hold at most ``rows`` rows (rounded down to a power of two) of ``dim`` weights."""
        places = 1 << (max(rows, 1).bit_length() - 1)
        self._steps = steps
        self._mask = np.uint64(places - 1)
        self.writes = 0
        """Number of writes to the table by this trainer."""
        self._lock = threading.Lock()
        self._keys = np.zeros(places, np.int64)
        self._since = np.full(places, _EMPTY, np.int64)
        self._count = np.zeros(places, np.uint32)
        self._rows = np.zeros((places, dim), np.float32)

    def lookup(self, keys: NDArray[np.int64], out: NDArray[np.float32], step: int) -> NDArray[np.bool_]:
        """Copy valid cached rows to ``out``; return a mask of the keys that are missing."""
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
        """Cache rows that were fetched in this step. ``keys`` must be distinct. ``writes`` is the write count from
        before the fetch; if this trainer has written since, the rows may be stale and are not cached."""
        place = self._place(keys)
        with self._lock:
            if writes != self.writes:
                return
            stale = self._since[place] < step - self._steps
            take = stale | (self._keys[place] == keys) | (counts >= self._count[place])
            self._count[place[~take]] >>= np.uint32(1)
            # If several new rows map to one slot, the last is written; all arrays have to agree on that.
            chosen = np.flatnonzero(take)
            _, last = np.unique(place[chosen][::-1], return_index=True)
            chosen = chosen[::-1][last]
            at = place[chosen]
            self._keys[at], self._since[at], self._count[at] = keys[chosen], step, counts[chosen]
            self._rows[at] = rows[chosen]

    def forget(self, keys: NDArray[np.int64]) -> None:
        """Drop rows that have been written."""
        place = self._place(keys)
        with self._lock:
            self.writes += 1
            self._since[place[self._keys[place] == keys]] = _EMPTY

    def _place(self, keys: NDArray[np.int64]) -> NDArray[np.intp]:
        place: NDArray[np.intp] = (hashing.mixed(keys) & self._mask).astype(np.intp)
        return place
