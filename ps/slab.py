"""Arrays that grow without being copied.

A small one lies in ordinary memory and is copied when it doubles. From ``MAPPED`` bytes on it is an anonymous mapping
that the kernel enlarges by moving page tables; pages nobody has touched cost nothing. Where the system cannot do that
(macOS), the copy is made. Views of ``array`` must not outlive a ``grow``: the mapping refuses to move under one, and is
copied then, so a forgotten view costs time and never reads foreign memory.

Large pages are fetched by a thread shortly before they are needed: the first touch of one costs 0.3 ms where the system
has to clear it, and 5 to 20 ms in a virtual machine whose host has to find it. Rows that are added to many shards in
one call would wait for several.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.background import Background

MAPPED = 1 << 18
RESERVED = 1 << 25
"""Of address space for a mapping at the least: few are ever moved."""
HUGE = 1 << 21
"""Bytes of a large page. What is in use beyond the first of them lies in large pages: less time goes into finding
addresses, and into the first touch. The first one begins with small pages, for most slabs stay small; the system makes
one of them in its own time, since asking it to (MADV_COLLAPSE) was seen to take 100 ms and more."""
AHEAD = 1 << 18
"""Bytes before the end of what has been fetched at which the next large page is: enough for eight pulls of 20,000 new
keys, and little memory lies idle for it."""
HUGEPAGE, POPULATE_WRITE = 14, 23
"""Advice of Linux: large pages, please; fetch pages as if they were written to, and leave them as they are (5.14)."""
LINE = 64
SPREAD = 64 * (2048 + LINE)
"""Beyond even parts of a large page, for 64 slabs to begin at different places of a processor's caches, which go by the
lowest 12 and 17 bits of an address: rows that came early lie at the beginning, and are often those that are needed
most."""
FEWEST = 16
"""Rows of a slab that is not empty."""


class Slab:
    """``array``: ``(rows, columns)`` of one dtype; what is new in it is zero.

    ``uneven``, 0 .. 1: how far into a large page it begins, so that slabs that grow alike do not all need the next
    large page at the same moment.
    """

    def __init__(self, dtype: type[np.generic], columns: int, uneven: float = 0.0) -> None:
        self._skipped = int(uneven * (HUGE + SPREAD)) // LINE * LINE
        self._dtype = np.dtype(dtype)
        self._columns = columns
        self._map: mmap.mmap | None = None
        self._moving = threading.Lock()
        """Held while the mapping moves, and while a page of it is fetched."""
        self._asked = 0
        """Where the part begins that nobody has been asked to fetch."""
        self.array: NDArray[Any] = np.zeros((0, columns), self._dtype)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self._dtype.itemsize * self._columns

    def grow(self, rows: int) -> None:
        """Room for so many rows at least; twice as many as now if there is none."""
        if rows > len(self.array):
            self._grow(rows)
        if self._map is not None:
            wanted = _pages(self._skipped + rows * self.row_bytes + AHEAD)
            end = min(wanted, len(self._map))
            if end > max(self._asked, HUGE):
                _fetching.submit(partial(self._fetch, self._asked, end))
                self._asked = end

    def _grow(self, rows: int) -> None:
        room = max(rows, 2 * len(self.array), FEWEST)
        wanted = room * self.row_bytes
        if wanted < MAPPED:
            larger = np.zeros((room, self._columns), self._dtype)
            larger[: len(self.array)] = self.array
            self.array = larger
            return
        wanted = _pages(max(wanted + self._skipped, RESERVED))
        with self._moving:
            if self._map is None or not self._enlarge(self._map, wanted):
                self._map, self._asked, held = _anonymous(wanted), 0, self.array
                self.array = self._over(self._map, wanted)
                self._map[0] = 0  # what differs in advice before its first touch can never be moved as one
                self._advise(HUGE, wanted - HUGE, HUGEPAGE)
                self.array[: len(held)] = held

    def _enlarge(self, mapping: mmap.mmap, size: int) -> bool:
        before = len(mapping)
        self._advise(0, before, HUGEPAGE)  # what is moved at once must be all alike
        self.array = np.zeros((0, self._columns), self._dtype)
        try:
            mapping.resize(size)
        except (BufferError, OSError, SystemError, ValueError):
            size = before
        self.array = self._over(mapping, size)
        return size != before

    def _fetch(self, begin: int, end: int) -> None:
        for page in range(begin, end, HUGE):
            with self._moving:  # page by page, for nobody may wait long
                self._advise(page, HUGE, POPULATE_WRITE if page else HUGEPAGE)

    def _advise(self, begin: int, size: int, advice: int) -> None:
        """About a part of the mapping. It works without; unlike ``mmap.madvise`` this lets other threads run."""
        if sys.platform == "linux":
            at = self.address - self._skipped + begin
            _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), advice)

    def _over(self, mapping: mmap.mmap, size: int) -> NDArray[Any]:
        rows = (size - self._skipped) // self.row_bytes
        flat = np.frombuffer(mapping, self._dtype, rows * self._columns, self._skipped)
        return flat.reshape(rows, self._columns)

    @property
    def address(self) -> int:
        """Where it lies; until the next ``grow``."""
        return int(self.array.__array_interface__["data"][0])


def _pages(size: int) -> int:
    return -(-size // HUGE) * HUGE


def _anonymous(size: int) -> mmap.mmap:
    flags = getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_PRIVATE", 0)
    return mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)


_libc = ctypes.CDLL(None)
_fetching = Background("edl-ps-pages")
