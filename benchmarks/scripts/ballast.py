"""Memory that a worker holds besides its model, as a large data set or cache would."""

from __future__ import annotations

import mmap


def hold(gigabytes: float) -> mmap.mmap | None:
    """Allocate so much memory in pages of 4 KB, which the kernel frees one by one when the worker ends."""
    if not gigabytes:
        return None
    memory = mmap.mmap(-1, int(gigabytes * 1e9))
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for offset in range(0, len(memory), mmap.PAGESIZE):
        memory[offset] = 1
    return memory
