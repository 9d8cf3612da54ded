"""Virtual time, and channels that keep their own order but not each other's."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Violation(Exception):
    """The history contradicts what is promised."""


class Net:
    """Time and delays of one history."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        self.slow = self.rng.choice((0.001, 0.003, 0.02, 0.1))
        """Mean delay of a word."""
        self.streams = self.rng.choice((0.05, 1.0, 1.0, 5.0))
        """Of what pservers say to each other, times that."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.events = 0

    def at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Schedule an action after a delay."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, action, args))

    def delay(self) -> float:
        """A random delay of one message, in seconds."""
        return self.rng.expovariate(1 / self.slow)

    def step(self) -> bool:
        """Process the next event. Returns False if there is none."""
        if not self._queue:
            return False
        self.now_s, _, action, args = heapq.heappop(self._queue)
        self.events += 1
        action(*args)
        return True


class Pipe:
    """One direction of a connection: in order, with delays; what is under way when it breaks is lost."""

    def __init__(self, net: Net, deliver: Callable[[Any], None], pace: float = 1.0) -> None:
        self._net, self._deliver, self._pace = net, deliver, pace
        self.open = True
        self._last_s = 0.0

    def send(self, item: Any) -> None:
        if self.open:
            self._last_s = max(self._last_s, self._net.now_s + self._net.delay() * self._pace)
            self._net.at(self._last_s - self._net.now_s, self._arrive, item)

    def _arrive(self, item: Any) -> None:
        if self.open:
            self._deliver(item)

    def close(self) -> None:
        self.open = False
