"""What is going to happen, by virtual time. What the Master is to hear waits while there is no Master."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from edl.master.events import Event

Happening = Callable[[float], Sequence[Event]]
"""Called with its time; returns what the Master hears of it."""


class Agenda:
    """Happenings in the order of their times; of equal times, in the order in which they were entered."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, bool, Happening]] = []
        self._entered = 0
        self.silent_until_s = 0.0
        """Until when no Master decides anything."""

    def add(self, at_s: float, happening: Happening, *, heard: bool = True) -> None:
        """``heard``: the Master takes part, so it waits for one. Otherwise it happens anyway, such as a fault."""
        self._entered += 1
        heapq.heappush(self._waiting, (at_s, self._entered, heard, happening))

    def next_s(self, wake_s: float) -> float:
        """Time of the next happening, or of the tick for which the Master has asked; infinity: there is none."""
        first_s = self._waiting[0][0] if self._waiting else math.inf
        return min(first_s, max(wake_s, self.silent_until_s))

    def events(self, now_s: float) -> list[Event]:
        """Let all happen that is due; returns what the Master hears, all at once."""
        found: list[Event] = []
        while self._waiting and self._waiting[0][0] <= now_s:
            _, _, heard, happening = heapq.heappop(self._waiting)
            if heard and now_s < self.silent_until_s:
                self.add(self.silent_until_s, happening)
            else:
                found += happening(now_s)
        return found
