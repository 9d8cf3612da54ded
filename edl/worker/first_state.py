"""The state that a worker began with, kept until its first commit."""

from __future__ import annotations

import math
import mmap

from edl.wire import snapshot


class FirstState:
    """A snapshot in the memory of this process."""

    def __init__(self, memory: mmap.mmap | None) -> None:
        assert memory is not None, "room() was called"  # noqa: S101
        self.view = memoryview(memory)
        self.parsed = snapshot.parse(self.view)


def free_memory() -> float:
    """Bytes that can be allocated without swapping."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    return math.inf
