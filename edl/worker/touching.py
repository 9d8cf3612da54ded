"""Pages of a buffer, mapped before the first commit touches them one by one.

A first touch takes the kernel longer than the copy itself. The same for all pages at once takes half of it, and a
thread beside training does it. Not ``mmap.madvise``: that would keep the interpreter meanwhile.
"""

from __future__ import annotations

import ctypes
import threading

LEAST_BYTES = 16 << 20
"""Less is not worth a thread."""
PIECE_BYTES = 4 << 20
"""The process cannot map or unmap anything meanwhile."""
MADV_POPULATE_WRITE = 23
"""Linux 5.14; an older one refuses it, and each page is mapped when it is touched."""


def touch_ahead(view: memoryview) -> threading.Thread | None:
    """Map all pages of a writable, page-aligned mapping, in a thread of its own. Their content stays."""
    if len(view) < LEAST_BYTES:
        return None
    thread = threading.Thread(target=touch, args=(view,), name="edl-pages", daemon=True)
    thread.start()
    return thread


def touch(view: memoryview) -> int:
    """The same, now; returns the bytes that are mapped then."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    try:
        first = (ctypes.c_char * len(view)).from_buffer(view)
    except (ValueError, TypeError):  # it has been closed, or may not be written
        return 0
    address = ctypes.addressof(first)
    while done < len(view):
        size = min(PIECE_BYTES, len(view) - done)
        if madvise(address + done, size, MADV_POPULATE_WRITE):
            break
        done += size
    return done
