"""The only module that reads a clock."""

from __future__ import annotations

import time


class SystemClock:
    """``Clock`` of this process: the operating system's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return time.monotonic()


def wall_clock_s() -> float:
    """Seconds since 1970, for display only: never compared between hosts, and never an input of a decision."""
    return time.time()


def wall_clock_ns() -> int:
    """Nanoseconds since 1970, comparable with the times that this host gives to its files."""
    return time.time_ns()
