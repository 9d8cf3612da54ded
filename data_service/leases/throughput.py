"""Throughput of a data set, for the status."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Rate:
    """Records and shards of the last ``WINDOW_S`` seconds, in buckets of one second."""

    __slots__ = ("_began_s", "_seconds")

    def __init__(self) -> None:
        self._seconds: deque[list[float]] = deque()
        self._began_s = -1.0

    def add(self, now_s: float, records: int, shards: int) -> None:
        """Count finished records and shards."""
        if self._began_s < 0 or (not self._seconds and now_s - self._began_s > WINDOW_S):
            self._began_s = now_s
        second = float(int(now_s))
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += records
            self._seconds[-1][2] += shards
        else:
            self._trim(now_s)
            self._seconds.append([second, records, shards])

    def per_s(self, now_s: float) -> tuple[float, float]:
        """Records and shards per second."""
        self._trim(now_s)
        if not self._seconds:
            return 0.0, 0.0
        over_s = min(WINDOW_S, max(1.0, now_s - self._began_s))
        return sum(one[1] for one in self._seconds) / over_s, sum(one[2] for one in self._seconds) / over_s

    def _trim(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] < now_s - WINDOW_S:
            self._seconds.popleft()


def scaled(number: float) -> str:
    """A number with two or three significant digits: ``1.2 M``, ``870``."""
    for size, unit in _UNITS:
        if number >= size * 0.9995:
            value = number / size
            return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"
