"""The state that a worker began with, kept until its first commit."""

from __future__ import annotations

import contextlib
import mmap

from edl.errors import CheckpointError
from edl.free_memory import available_bytes
from edl.wire import snapshot

_SHARE_OF_MEMORY = 4
"""Workers of a node keep copies of their first state in at most this fraction of free memory (one fourth)."""


class FirstState:
    """A snapshot in the memory of this process."""

    def __init__(self, memory: mmap.mmap | None) -> None:
        assert memory is not None, "room() was called"  # noqa: S101
        self.view = memoryview(memory)
        self.parsed = snapshot.parse(self.view)


def first_state_memory(size: int, workers: int) -> mmap.mmap:
    """Memory for the first state of one of a node's workers, all of which need as much. Raises ``CheckpointError`` when
    that is too much."""
    if size * workers > available_bytes() / _SHARE_OF_MEMORY:
        raise CheckpointError("too large")
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # training waits, and small pages take longer than the copy
    return memory
