"""Virtual time, the hosts of one history and the paths between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from edl.testing.sim.checks import Violation
from edl.testing.sim.network import Network
from edl.testing.sim.sockets import SimListener
from edl.testing.sim.timeline import Timeline

__all__ = ["Net", "Pipe", "Violation"]

Pair = tuple[str, str]
USUAL_S = 0.002
"""Mean delay of one message at slowness 1."""


class Net:
    """Time, delays and cuts; ``edl.testing.sim.process.BareDeps`` of every process."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.timeline = Timeline()
        self.timeline.now_s = 100.0
        self.network = Network(self.timeline, self.rng)
        self.slow = self.rng.choice((0.001, 0.001, 0.003, 0.02))
        """Mean delay of a message."""
        self.network.slowness = self.slow / USUAL_S
        self.listening: dict[tuple[str, int], SimListener] = {}
        self._hosts: list[str] = []
        self._lost: set[str] = set()
        self._cuts: list[list[Pair]] = []

    # --- BareDeps ----------------------------------------------------------------------------------------------------

    def fail(self, text: str) -> None:
        """See ``BareDeps``."""
        self.note(text)
        assert self.timeline.failure is not None
        raise self.timeline.failure

    def note(self, text: str) -> None:
        """See ``BareDeps``; it is a violation, because all that happens to a process here is expected."""
        self.timeline.failure = self.timeline.failure or Violation(text)

    # --- time --------------------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        return self.timeline.now_s

    @property
    def events(self) -> int:
        """Calls made so far."""
        return self.timeline.events

    def at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Schedule an action after a delay."""
        self.timeline.after(delay_s, action, *args)

    def delay(self) -> float:
        """A random delay of one message, in seconds."""
        return self.rng.expovariate(1 / self.slow)

    # --- hosts -------------------------------------------------------------------------------------------------------

    def add_host(self, host: str) -> None:
        """A host that lost ones do not reach either."""
        self.network.block(pair for lost in sorted(self._lost) for pair in both(lost, host))
        self._hosts.append(host)

    def lose(self, host: str) -> None:
        """The host is gone, and nothing answers for it."""
        self._lost.add(host)
        self.network.block(pair for other in self._hosts if other != host for pair in both(host, other))

    def cut(self, pairs: Iterable[Pair], for_s: float) -> None:
        """Cut these directions for a while."""
        cut = list(pairs)
        self._cuts.append(cut)
        self.network.block(cut)
        self.at(for_s, self._heal, cut)

    def _heal(self, cut: list[Pair]) -> None:
        if cut in self._cuts:
            self._cuts.remove(cut)
            self.network.heal(cut)

    def heal(self) -> None:
        """End all cuts."""
        for cut in list(self._cuts):
            self._heal(cut)

    @property
    def whole(self) -> bool:
        """Nothing is cut."""
        return not self._cuts


def both(one: str, other: str) -> list[Pair]:
    """The two directions between hosts."""
    return [(one, other), (other, one)]


class Pipe:
    """One direction between the Master and a trainer, by way of its launcher: in order; what is under way when it
    breaks is lost."""

    def __init__(self, net: Net, deliver: Callable[[Any], None]) -> None:
        self._net, self._deliver = net, deliver
        self.open = True
        self._last_s = 0.0

    def send(self, item: Any) -> None:
        if self.open:
            self._last_s = max(self._last_s, self._net.now_s + self._net.delay())
            self._net.at(self._last_s - self._net.now_s, self._arrive, item)

    def _arrive(self, item: Any) -> None:
        if self.open:
            self._deliver(item)

    def close(self) -> None:
        self.open = False
