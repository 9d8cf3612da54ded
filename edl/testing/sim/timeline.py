"""Virtual time: what happens next, and nothing in between."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class ScheduledCall:
    """One call in the future."""

    __slots__ = ("args", "at_s", "call")

    def __init__(self, at_s: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.at_s = at_s
        self.call: Callable[..., object] | None = call
        self.args = args

    def cancel(self) -> None:
        """Forget it; cancelling twice, or after it has happened, changes nothing."""
        self.call = None
        self.args = ()


class Timeline:
    """An event heap. Calls for the same moment happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        """Calls made so far."""
        self.failure: Exception | None = None
        """Why time does not go on; set by a check that a task or a loop may swallow."""
        self._heap: list[tuple[float, int, ScheduledCall]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> ScheduledCall:
        """Call ``call(*args)`` when ``delay_s`` (0 or more) has passed."""
        timer = ScheduledCall(self.now_s + delay_s, call, args)
        heapq.heappush(self._heap, (timer.at_s, next(self._numbers), timer))
        return timer

    def at(self, at_s: float, call: Callable[..., object], *args: Any) -> ScheduledCall:
        """Call ``call(*args)`` at a moment; one that has passed means now."""
        timer = ScheduledCall(at_s if at_s > self.now_s else self.now_s, call, args)
        heapq.heappush(self._heap, (timer.at_s, next(self._numbers), timer))
        return timer

    def run(self, until_s: float, stop: Callable[[], bool] | None = None) -> None:
        """Let time pass up to ``until_s``, or until ``stop`` holds after some call."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            at_s, _, timer = heapq.heappop(heap)
            if timer.call is None:
                continue
            self.now_s = at_s
            self.events += 1
            timer.call(*timer.args)
            if self.failure is not None:
                raise self.failure
            if stop is not None and stop():
                return
        self.now_s = max(self.now_s, until_s)
