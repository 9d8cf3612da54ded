"""Virtual time: jumps from each scheduled call to the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class ScheduledCall:
    """A call at a future time."""

    __slots__ = ("args", "at_s", "call")

    def __init__(self, at_s: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.at_s = at_s
        self.call: Callable[..., object] | None = call
        self.args = args

    def cancel(self) -> None:
        """Cancel the call. Does nothing if it was made or cancelled before."""
        self.call = None
        self.args = ()


class Timeline:
    """An event queue. Calls for the same time are made in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        """Number of calls made so far."""
        self.failure: Exception | None = None
        """Raised by ``run`` after the current call. Set by a check, whose exception a task or loop may swallow."""
        self._heap: list[tuple[float, int, ScheduledCall]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> ScheduledCall:
        """Call ``call(*args)`` in ``delay_s`` (0 or more) seconds."""
        return self.at(self.now_s + delay_s, call, *args)

    def at(self, at_s: float, call: Callable[..., object], *args: Any) -> ScheduledCall:
        """Call ``call(*args)`` at this time, or as soon as possible if it has passed."""
        timer = ScheduledCall(max(at_s, self.now_s), call, args)
        heapq.heappush(self._heap, (timer.at_s, next(self._numbers), timer))
        return timer

    def run(self, until_s: float, stop: Callable[[], bool] | None = None) -> None:
        """Make the calls that are due up to ``until_s``, or until ``stop`` returns true after one. Raises
        ``failure``."""
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
