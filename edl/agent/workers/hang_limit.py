"""Learns from a job's own pauses how long a pause may be before it is suspicious. Pure: no clock, no I/O.

A pause is the time between two signs of progress, such as two commits. Pauses that ended well teach; what is learnt
belongs to the launcher, so it survives changes of the world and of the Master.

The limit is the largest of

- the floor, under which nothing is suspicious: evaluation, checkpoints and compilation take minutes;
- ``FACTOR`` times the ``QUANTILE`` of the last pauses, which follows jobs with long steps;
- ``GROWTH`` times the longest pause so far. So a pause that was suspected wrongly is never suspected at that length
  again, and the number of wrong suspicions is at most the logarithm of the longest pause to the floor, plus one.
"""

from __future__ import annotations

import bisect
import collections
from dataclasses import dataclass

NEEDED = 20
"""Pauses from which a limit is learnt; before, nothing is suspicious."""
KEPT = 1000
"""Pauses of which the quantile is taken, the newest."""
QUANTILE = 0.99
FACTOR = 5.0
"""With few pauses the quantile is the longest one, so a limit that rests on little is generous."""
GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class LearntLimit:
    """What is known so far."""

    limit_s: float = 0.0
    """Seconds without progress that are suspicious; 0: not known yet."""
    pauses: int = 0
    """Number of pauses that it is learnt from, since the launcher was started."""


class LimitLearner:
    """Pauses in, limit out. ``floor_s``: the shortest limit."""

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._order: collections.deque[float] = collections.deque()
        self._sorted: list[float] = []
        self._count = 0
        self._longest_s = 0.0
        self._longest_start_s = 0.0

    @property
    def learnt(self) -> LearntLimit:
        """The limit between two signs of progress."""
        if self._count < NEEDED:
            return LearntLimit(0.0, self._count)
        usual_s = self._sorted[min(len(self._sorted) - 1, int(QUANTILE * len(self._sorted)))]
        return LearntLimit(max(self._floor_s, FACTOR * usual_s, GROWTH * self._longest_s), self._count)

    def start_limit_s(self, factor: float) -> float:
        """The limit for the first sign of progress in a round: ``factor`` times the other one, or longer if an earlier
        start took long; 0: not known yet."""
        limit_s = self.learnt.limit_s
        return max(factor * limit_s, GROWTH * self._longest_start_s) if limit_s else 0.0

    def paused(self, pause_s: float) -> None:
        """A pause has ended with progress."""
        self._count += 1
        self._longest_s = max(self._longest_s, pause_s)
        self._order.append(pause_s)
        bisect.insort(self._sorted, pause_s)
        if len(self._order) > KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._order.popleft())]

    def started(self, took_s: float) -> None:
        """A round has made its first progress, this long after it began."""
        self._longest_start_s = max(self._longest_start_s, took_s)
