"""Gives the pages of a mapping their memory, and maps them, before they are used.

The page faults of a first use take longer than the copy that causes them. The kernel clears and maps whole ranges in
half of that time, and several threads share the work. ``mmap.madvise`` is not used because it would hold the
interpreter lock meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

PIECE_BYTES = 4 << 20
"""Bytes mapped per call, during which the process can neither map nor unmap anything."""
SHARE_BYTES = 256 << 20
"""Bytes that one thread maps at a time."""
MOST_THREADS = 8
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
"""Since Linux 5.14; older kernels refuse them, and each page is mapped on its first access."""


def populate(view: memoryview, *, writing: bool = True) -> bool:
    """Map all pages of a writable, page-aligned mapping, whose content stays; whether all of them are mapped now. They
    are not if the kernel refuses, or memory is short. ``writing``: pages of a private mapping become its own."""
    try:
        whole = len(view)
        first = (ctypes.c_char * whole).from_buffer(view)
    except (ValueError, TypeError):  # it has been closed, or is not writable
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = ctypes.addressof(first)  # the view itself may be released meanwhile; ``first`` keeps the mapping
    advice = MADV_POPULATE_WRITE if writing else MADV_POPULATE_READ
    refused = threading.Event()

    def share(begin: int) -> None:
        for at in range(begin, min(begin + SHARE_BYTES, whole), PIECE_BYTES):
            if refused.is_set():
                return
            if madvise(address + at, min(PIECE_BYTES, whole - at), advice):
                refused.set()

    shares = range(0, whole, SHARE_BYTES)
    count = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // 2, len(shares)))
    if count == 1 or not _in_threads(count, share, shares):
        for begin in shares:
            share(begin)
    return not refused.is_set()


def _in_threads(count: int, work: Callable[[int], None], items: Sequence[int]) -> bool:
    """Do the work for all items; False if not enough threads can be started."""
    try:
        with ThreadPoolExecutor(count, "edl-pages") as threads:
            list(threads.map(work, items))
    except RuntimeError:
        return False
    return True
