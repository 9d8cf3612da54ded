"""Arrays that grow without being copied, and take little more memory than what is in them.

A small one lies in ordinary memory and is copied when it grows. From ``MAPPED`` bytes on it is an anonymous mapping
that the kernel enlarges by moving page tables; pages nobody has touched cost nothing. Where the system cannot do that
(macOS), the copy is made. Views of ``array`` must not outlive a ``grow``: the mapping refuses to move under one, and is
copied then, so a forgotten view costs time and never reads foreign memory.

Large pages make rows quicker to find, but a table has 64 slabs, and a large page that each has begun would double the
memory of a table of 100 MB. So a slab grows in small pages; a thread has the system make a large page of each 2 MB
that are full (MADV_COLLAPSE, Linux 6.1). From ``LARGE`` bytes on, where one page more or less counts for little, the
next large page is fetched by that thread shortly before it is needed: the first touch of one costs 0.3 ms where the
system has to clear it, and 5 to 20 ms in a virtual machine whose host has to find it. Rows that are added to many
shards in one call would wait for several.
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

from edl.adapters.clock import SystemClock
from ps.background import Background

MAPPED = 1 << 16
RESERVED = 1 << 25
"""Of address space for a mapping at the least: few are ever moved."""
HUGE = 1 << 21
"""Bytes of a large page."""
LARGE = 1 << 24
"""A slab of so many bytes has its next large page fetched as a whole."""
AHEAD = 1 << 18
"""Bytes before the end of what has been fetched at which the next large page is: enough for eight pulls of 20,000 new
keys, and little memory lies idle for it."""
HUGEPAGE, NOHUGEPAGE, POPULATE_WRITE, COLLAPSE = 14, 15, 23, 25
"""Advice of Linux: large pages here, or none; fetch pages as if they were written to, and leave them as they are
(5.14); make large pages of small ones (6.1)."""
PAUSE = 2.0
"""Between two pages that are made large: so many times as long as one took, for others to get on with theirs."""
LINE = 64
SPREAD = 64 * (2048 + LINE)
"""For 64 slabs to begin at different places of a processor's caches, which go by the lowest 12 and 17 bits of an
address: rows that came early lie at the beginning, and are often those that are needed most."""
FEWEST = 16
"""Rows of a slab that is not empty."""


class Slab:
    """``array``: ``(rows, columns)`` of one dtype; what is new in it is zero.

    ``uneven``, 0 .. 1: where in the processor's caches it begins, and how much earlier than others it asks for the next
    large page: slabs that grow alike shall not all need theirs at the same moment.
    """

    def __init__(self, dtype: type[np.generic], columns: int, uneven: float = 0.0) -> None:
        self._skipped = int(uneven * SPREAD) // LINE * LINE
        self._ahead = AHEAD + int(uneven * AHEAD)
        self._dtype = np.dtype(dtype)
        self._columns = columns
        self._map: mmap.mmap | None = None
        self._moving = threading.Lock()
        """Held while the mapping moves, and while a page of it is worked on."""
        self._full = 0
        """Where the part ends that is in use since the last ``grow``."""
        self._large = 0
        """Where the part ends that lies in large pages, or will."""
        self.array: NDArray[Any] = np.zeros((0, columns), self._dtype)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self._dtype.itemsize * self._columns

    def bytes(self, rows: int) -> int:
        """Memory that it takes while so many rows are in use."""
        if self._map is None:
            return self.array.nbytes
        return self._mapped(rows, self._large)

    def bytes_for(self, rows: int, more: int) -> int:
        """At most what ``more`` rows take besides those in use."""
        total = rows + more
        if self._map is None:
            if total <= len(self.array):
                return 0
            room = max(total, len(self.array) * 3 // 2, FEWEST) * self.row_bytes
            if room < MAPPED:
                return room - self.array.nbytes
        end = self._skipped + total * self.row_bytes
        large = _pages(end + self._ahead) if end >= LARGE else end // HUGE * HUGE
        return max(0, self._mapped(total, max(self._large, large)) - self.bytes(rows))

    def _mapped(self, rows: int, large: int) -> int:
        page = mmap.PAGESIZE
        return max(-(-(self._skipped + rows * self.row_bytes) // page) * page - self._skipped // page * page, large)

    def grow(self, rows: int) -> None:
        """Room for so many rows at least."""
        if rows > len(self.array):
            self._grow(rows)
        if self._map is None:
            return
        begin, end = self._large, self._skipped + rows * self.row_bytes
        if end >= LARGE:
            self._large = max(self._large, min(_pages(end + self._ahead), len(self._map)))
            full = _pages(self._full)
        else:
            full = self._full // HUGE * HUGE
            self._large = max(self._large, full)
        self._full = end
        if full > begin:
            _joining.submit(partial(self._join, begin, full))
        if self._large > max(begin, full):
            _fetching.submit(partial(self._fetch, max(begin, full), self._large))

    def _grow(self, rows: int) -> None:
        room = max(rows, len(self.array) * 3 // 2, FEWEST)
        wanted = room * self.row_bytes
        if wanted < MAPPED:
            larger = np.zeros((room, self._columns), self._dtype)
            larger[: len(self.array)] = self.array
            self.array = larger
            return
        least = RESERVED if self._map is None else 2 * len(self._map)
        wanted = _pages(max(wanted + self._skipped, least))
        with self._moving:
            if self._map is None or not self._enlarge(self._map, wanted):
                self._map, self._large, self._full, held = _anonymous(wanted), 0, 0, self.array
                self.array = self._over(self._map, wanted)
                self.array[:1] = 0  # what differs in advice before its first touch never moves as one
                self._advise(0, wanted, NOHUGEPAGE)
                self.array[: len(held)] = held

    def _enlarge(self, mapping: mmap.mmap, size: int) -> bool:
        before = len(mapping)
        self._advise(0, before, NOHUGEPAGE)  # what is moved at once must be all alike; large pages stay what they are
        self.array = np.zeros((0, self._columns), self._dtype)
        try:
            mapping.resize(size)
        except (BufferError, OSError, SystemError, ValueError):
            size = before
        self.array = self._over(mapping, size)
        self._advise(0, self._large, HUGEPAGE)
        return size != before

    def _fetch(self, begin: int, end: int) -> None:
        for page in range(begin, end, HUGE):
            with self._moving:  # page by page, for nobody may wait long
                self._advise(page, HUGE, HUGEPAGE)
                self._advise(page, HUGE, POPULATE_WRITE)

    def _join(self, begin: int, end: int) -> None:
        """Large pages in place of small ones that are full. Whoever touches a new page meanwhile waits."""
        for page in range(begin, end, HUGE):
            start_s = _now_s()
            with self._moving:
                self._advise(page, HUGE, HUGEPAGE)
                self._advise(page, HUGE, COLLAPSE)
            _pause.wait(PAUSE * (_now_s() - start_s))

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


def zeros(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """An array whose memory goes back to the system with it. What ``malloc`` gets back it may keep."""
    size = count * np.dtype(dtype).itemsize
    if size < MAPPED:
        return np.zeros(count, dtype)
    return np.frombuffer(_anonymous(size), dtype, count)


def _pages(size: int) -> int:
    return -(-size // HUGE) * HUGE


def _anonymous(size: int) -> mmap.mmap:
    flags = getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_PRIVATE", 0)
    return mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)


_libc = ctypes.CDLL(None)
_now_s = SystemClock().now_s
_pause = threading.Event()
_fetching, _joining = Background("edl-ps-pages"), Background("edl-ps-joins")


def settled() -> None:
    """Returns when no page is being worked on any more."""
    for thread in (_fetching, _joining):
        thread.submit(lambda: None).result()
