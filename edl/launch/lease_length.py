"""Chooses how long the leases of a launcher are: longer while it keeps losing them although it lives.

A host without CPU time, a slow disk under the store or a bad network hold a launcher up for longer than its lease. Its
workers are then killed, and starting them again loads the host further. So each further loss within ``WINDOW_S``
doubles the next lease.
"""

from __future__ import annotations

WINDOW_S = 600.0
"""Seconds for which a lost lease counts."""
MOST_TIMES = 8
"""A lease is at most this many times as long as ``--lease-ttl``."""


class LeaseLength:
    """The duration of a launcher's next lease. Without clock or I/O; all times are in seconds.

    ``shortest_s``: the duration of a launcher that has lost no lease, or one (``--lease-ttl``).
    """

    def __init__(self, shortest_s: float) -> None:
        self._shortest_s = shortest_s
        self._lost_s: list[float] = []

    def lost(self, now_s: float) -> None:
        """Note that a lease has ended although this launcher lives."""
        self._lost_s = [*self._recent(now_s), now_s]

    def losses(self, now_s: float) -> int:
        """Number of leases lost within ``WINDOW_S``."""
        return len(self._recent(now_s))

    def next_s(self, now_s: float) -> float:
        """Seconds for which to ask for a lease now."""
        times = 1 << max(self.losses(now_s) - 1, 0)
        return self._shortest_s * min(times, MOST_TIMES)

    def _recent(self, now_s: float) -> list[float]:
        return [at_s for at_s in self._lost_s if now_s - at_s < WINDOW_S]
