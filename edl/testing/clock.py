"""A clock that only moves when a test advances it."""

from __future__ import annotations


class FakeClock:
    """``Clock`` for tests: stands still until ``advance``."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds since an arbitrary start."""
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Advance by this many seconds; returns the new time. Raises ``ValueError`` for a negative number."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds:g} s")
        self._now_s += seconds
        return self._now_s
