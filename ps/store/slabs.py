"""Arrays that grow without copying and use little more memory than their content.

A small array is in ordinary memory and copied when it grows. From ``MAPPED`` bytes on it is an anonymous mapping that
the kernel enlarges by moving page tables; untouched pages cost nothing. Where the system does not support that (macOS),
it is copied. Views of ``array`` must not outlive a ``grow``: a mapping with views cannot be moved and is then copied,
so a forgotten view costs time but never reads foreign memory.

Huge pages make lookups faster, but a table has 64 slabs, and a partly used huge page in each would double the memory of
a 100 MB table. So a slab grows in small pages, and a thread collapses each full 2 MB into a huge page (MADV_COLLAPSE,
Linux 6.1). From ``LARGE`` bytes on, where one page hardly matters, that thread populates the next huge page shortly
before it is needed: its first touch costs 0.3 ms where the system has to clear it, and 5 to 20 ms in a virtual machine
whose host has to find it. Adding rows to many shards in one call would wait for several of them.
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
"""Least address space of a mapping, in bytes, so that few are ever moved."""
HUGE = 1 << 21
"""Size of a huge page in bytes."""
LARGE = 1 << 24
"""From this size in bytes on, a slab's next huge page is populated ahead."""
AHEAD = 1 << 18
"""Distance in bytes from the end of the populated part at which the next huge page is populated: enough for eight pulls
of 20,000 new keys, at little idle memory."""
HUGEPAGE, NOHUGEPAGE, POPULATE_WRITE, COLLAPSE = 14, 15, 23, 25
"""Values of Linux' madvise: enable and disable huge pages; populate pages as if written to, without changing them
(5.14); collapse small pages into huge ones (6.1)."""
PAUSE = 2.0
"""Pause between two collapsed pages, as a multiple of the time that one took."""
LINE = 64
SPREAD = 64 * (2048 + LINE)
"""Range of start offsets of 64 slabs, so that they map to different cache sets, which are selected by the lowest 12 and
17 bits of an address: early rows are at the start of a slab, and often the most used."""
FEWEST = 16
"""Least number of rows of a non-empty slab."""


class Slab:
    """A growing ``array`` of shape ``(rows, columns)``; new rows are zero.

    ``uneven``, 0 .. 1: staggers the start offset, and the point at which the next huge page is requested, among slabs
    that grow alike.
    """

    def __init__(self, dtype: type[np.generic], columns: int, uneven: float = 0.0) -> None:
        self._skipped = int(uneven * SPREAD) // LINE * LINE
        self._ahead = AHEAD + int(uneven * AHEAD)
        self._dtype = np.dtype(dtype)
        self._columns = columns
        self._map: mmap.mmap | None = None
        self._moving = threading.Lock()
        """Held while the mapping moves and while one of its pages is worked on."""
        self._full = 0
        """End of the part in use at the last ``grow``, in bytes."""
        self._large = 0
        """End of the part that is, or will be, in huge pages, in bytes."""
        self.array: NDArray[Any] = np.zeros((0, columns), self._dtype)

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return self._dtype.itemsize * self._columns

    def bytes(self, rows: int) -> int:
        """Memory used with this many rows in use, in bytes."""
        if self._map is None:
            return self.array.nbytes
        return self._mapped(rows, self._large)

    def bytes_for(self, rows: int, more: int) -> int:
        """Upper bound of the bytes that ``more`` rows take in addition to ``rows``."""
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
        """Make room for at least ``rows`` rows."""
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
                self.array[:1] = 0  # a range whose advice differs before its first touch cannot move as one
                self._advise(0, wanted, NOHUGEPAGE)
                self.array[: len(held)] = held

    def _enlarge(self, mapping: mmap.mmap, size: int) -> bool:
        before = len(mapping)
        self._advise(0, before, NOHUGEPAGE)  # a moved range needs uniform advice; existing huge pages stay
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
            with self._moving:  # page by page, to hold the lock only briefly
                self._advise(page, HUGE, HUGEPAGE)
                self._advise(page, HUGE, POPULATE_WRITE)

    def _join(self, begin: int, end: int) -> None:
        """Collapse full small pages into huge ones. Access to new pages waits meanwhile."""
        for page in range(begin, end, HUGE):
            start_s = _now_s()
            with self._moving:
                self._advise(page, HUGE, HUGEPAGE)
                self._advise(page, HUGE, COLLAPSE)
            _pause.wait(PAUSE * (_now_s() - start_s))

    def _advise(self, begin: int, size: int, advice: int) -> None:
        """Give advice on a part of the mapping; failure does not matter. Unlike ``mmap.madvise`` this releases the
        GIL."""
        if sys.platform == "linux":
            at = self.address - self._skipped + begin
            _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), advice)

    def _over(self, mapping: mmap.mmap, size: int) -> NDArray[Any]:
        rows = (size - self._skipped) // self.row_bytes
        flat = np.frombuffer(mapping, self._dtype, rows * self._columns, self._skipped)
        return flat.reshape(rows, self._columns)

    @property
    def address(self) -> int:
        """Address of the data; valid until the next ``grow``."""
        return int(self.array.__array_interface__["data"][0])


def zeros(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """A zeroed array whose memory is returned to the system when freed, unlike memory from ``malloc``."""
    size = count * np.dtype(dtype).itemsize
    if size < MAPPED:
        return np.zeros(count, dtype)
    return np.frombuffer(_anonymous(size), dtype, count)


def _pages(size: int) -> int:
    return -(-size // HUGE) * HUGE


def _anonymous(size: int) -> mmap.mmap:
    """Raises ``MemoryError``."""
    flags = getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_PRIVATE", 0)
    try:
        return mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)
    except OSError as error:
        raise MemoryError(f"cannot map {size:,} bytes: {error.strerror}") from None


_libc = ctypes.CDLL(None)
_now_s = SystemClock().now_s
_pause = threading.Event()
_fetching, _joining = Background("edl-ps-pages"), Background("edl-ps-joins")


def settled() -> None:
    """Wait until no page is being worked on; for tests."""
    for thread in (_fetching, _joining):
        thread.submit(lambda: None).result()
