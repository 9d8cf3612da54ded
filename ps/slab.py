"""Arrays that grow without being copied.

A small one lies in ordinary memory and is copied when it doubles. From ``MAPPED`` bytes on it is an anonymous mapping
that the kernel enlarges by moving page tables; pages nobody has touched cost nothing. Where the system cannot do that
(macOS), the copy is made. Views of ``array`` must not outlive a ``grow``: the mapping refuses to move under one, and is
copied then, so a forgotten view costs time and never reads foreign memory.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAPPED = 1 << 18
RESERVED = 1 << 25
"""Of address space for a mapping at the least: few are ever moved."""
HUGE = 1 << 21
"""Bytes of a large page. What is in use beyond the first of them is asked for in large pages: less time goes into
finding addresses, and into the first touch."""
COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1: small pages become a large one."""
FEWEST = 16
"""Rows of a slab that is not empty."""


class Slab:
    """``array``: ``(rows, columns)`` of one dtype; what is new in it is zero.

    ``uneven``, 0 .. 1: how far into a large page it begins, so that slabs that grow alike do not all need the next
    large page at the same moment.
    """

    def __init__(self, dtype: type[np.generic], columns: int, uneven: float = 0.0) -> None:
        self._skipped = int(uneven * HUGE) // mmap.PAGESIZE * mmap.PAGESIZE
        self._dtype = np.dtype(dtype)
        self._columns = columns
        self._map: mmap.mmap | None = None
        self._advised = 0
        self.array: NDArray[Any] = np.zeros((0, columns), self._dtype)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self._dtype.itemsize * self._columns

    def grow(self, rows: int) -> None:
        """Room for so many rows at least; twice as many as now if there is none."""
        if rows > len(self.array):
            self._grow(rows)
        used = self._skipped + rows * self.row_bytes
        if self._map is not None and used > max(self._advised, HUGE):
            self._advise(self._map, used)

    def _grow(self, rows: int) -> None:
        room = max(rows, 2 * len(self.array), FEWEST)
        wanted = room * self.row_bytes
        if wanted < MAPPED:
            self._copy_to(np.zeros((room, self._columns), self._dtype))
            return
        wanted = -(-max(wanted + self._skipped, RESERVED) // HUGE) * HUGE
        if self._map is None or not self._enlarge(self._map, wanted):
            fresh = _anonymous(wanted)
            self._copy_to(self._over(fresh, wanted))
            self._map, self._advised = fresh, 0

    def _enlarge(self, mapping: mmap.mmap, size: int) -> bool:
        before = len(mapping)
        self.array = np.zeros((0, self._columns), self._dtype)
        try:
            mapping.resize(size)
        except (BufferError, OSError, SystemError, ValueError):
            size = before
        self.array = self._over(mapping, size)
        return size != before

    def _advise(self, mapping: mmap.mmap, used: int) -> None:
        end = min(-(-used // HUGE) * HUGE, len(mapping))
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE, self._advised, end - self._advised)
            if not self._advised:
                mapping.madvise(COLLAPSE, 0, HUGE)
        except (AttributeError, OSError, ValueError):
            pass  # it works without
        self._advised = end

    def _over(self, mapping: mmap.mmap, size: int) -> NDArray[Any]:
        rows = (size - self._skipped) // self.row_bytes
        flat = np.frombuffer(mapping, self._dtype, rows * self._columns, self._skipped)
        return flat.reshape(rows, self._columns)

    def _copy_to(self, larger: NDArray[Any]) -> None:
        larger[: len(self.array)] = self.array
        self.array = larger

    @property
    def address(self) -> int:
        """Where it lies; until the next ``grow``."""
        return int(self.array.__array_interface__["data"][0])


def _anonymous(size: int) -> mmap.mmap:
    flags = getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_PRIVATE", 0)
    return mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)
