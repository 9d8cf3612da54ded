"""Hosts, the paths between them, and streams in the way of TCP: in order, complete, or broken."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from edl.testing.sim.biases import USUAL
from edl.testing.sim.timeline import ScheduledCall, Timeline

STORE = "store"
"""Host name of the store."""

Pair = tuple[str, str]


class Process(Protocol):
    """A stream's view of the process that holds one of its ends."""

    host: str

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        ...

    @property
    def paused(self) -> bool:
        """Stopped by SIGSTOP."""
        ...

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Call now, or when the process goes on, or never when it is dead."""
        ...


class Network:
    """Which host reaches which, and how slowly."""

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self.timeline = timeline
        self.rng = rng
        self.usual_slowness = 1.0
        self.slowness = 1.0
        """Factor on every delay, now."""
        self.biases = USUAL
        self.changed: list[Callable[[], None]] = []
        self._blocked: Counter[Pair] = Counter()

    def delay_s(self) -> float:
        """Delay of one message, in seconds."""
        return self.slowness * (0.0005 + 0.006 * self.rng.random() ** 3)

    def read_delay_s(self) -> float:
        """Seconds that an arrived message waits for its reader."""
        slow = self.biases.slow_reader and self.rng.random() < self.biases.slow_reader
        return self.rng.uniform(0.0, self.biases.slowest_read_s) if slow else 0.0

    def open(self, source: str, target: str) -> bool:
        """Whether messages get through in this direction; a host always reaches itself."""
        return source == target or not self._blocked[source, target]

    def both(self, one: str, other: str) -> bool:
        """Whether messages get through in both directions."""
        return self.open(one, other) and self.open(other, one)

    def block(self, pairs: Iterable[Pair]) -> None:
        """Block these directions; blocks add up."""
        self._blocked.update(pairs)
        self.tell()

    def heal(self, pairs: Iterable[Pair]) -> None:
        """Remove one block from each of these directions."""
        for pair in pairs:
            if self._blocked[pair] > 0:
                self._blocked[pair] -= 1
        self.tell()

    def heal_all(self) -> None:
        """Remove every block."""
        self._blocked.clear()
        self.tell()

    def tell(self) -> None:
        """Re-evaluate everything that depends on paths and processes."""
        for call in list(self.changed):
            call()


class End:
    """One end of a stream."""

    def __init__(self, owner: Process, hear: Callable[[Any], None], broke: Callable[[], None]) -> None:
        self.owner = owner
        self.hear = hear
        self.broke = broke
        self.open = True
        self.coming: deque[Any] = deque()
        """Sent to it, not yet received."""
        self.held = 0
        """Messages of these that a blocked direction holds back."""
        self.last_arrival_s = 0.0
        self.suspicion: ScheduledCall | None = None
        """When its keep-alive gives up."""


class Stream:
    """Two ends. Each end notices a partition at its own time, and not at all if it heals before."""

    def __init__(self, network: Network, one: End, other: End) -> None:
        self.network = network
        self.ends = (one, other)
        self.slowness = 1.0
        """Factor on its delays, beside the network's."""
        network.changed.append(self.look)

    def send(self, source: End, message: Any) -> None:
        """Send from an end; silently lost when the stream is broken."""
        target = self._peer(source)
        if source.open:
            target.coming.append(message)
            self._later(target, self._arrive, target)

    def close(self, end: End) -> None:
        """Close an end; the other one notices as soon as the network lets it."""
        if not end.open:
            return
        end.open = False
        peer = self._peer(end)
        if peer.open:
            self._later(peer, self._arrive_end, peer)
        else:
            self._forget()

    def abort(self, end: End) -> None:
        """The connection breaks; this end notices soon."""
        self._later(end, end.owner.run, self._break, end)

    def look(self) -> None:
        """Something about the paths or the processes has changed."""
        if self._stalled():
            for end in self.ends:
                if end.open and end.suspicion is None:
                    timeout_s = self.network.rng.uniform(1.0, 5.0)
                    end.suspicion = self.network.timeline.after(timeout_s, self._give_up, end)
            return
        for end in self.ends:
            if end.suspicion is not None:
                end.suspicion.cancel()
                end.suspicion = None
            held, end.held = end.held, 0
            for _ in range(held):
                self._later(end, self._arrive, end)
            if end.open and not self._peer(end).open:
                self._later(end, self._arrive_end, end)

    def _stalled(self) -> bool:
        one, other = self.ends
        silent = any(end.owner.paused for end in self.ends)
        return silent or not self.network.both(one.owner.host, other.owner.host)

    def _peer(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def _later(self, target: End, call: Callable[..., None], *args: Any) -> None:
        network = self.network
        delay_s = self.slowness * network.delay_s() + network.read_delay_s()
        target.last_arrival_s = max(target.last_arrival_s, network.timeline.now_s + delay_s)
        network.timeline.at(target.last_arrival_s, call, *args)

    def _arrive(self, target: End) -> None:
        if not target.open:
            return
        if self.network.open(self._peer(target).owner.host, target.owner.host):
            target.owner.run(self._hear, target, target.coming.popleft())
        else:
            target.held += 1

    @staticmethod
    def _hear(target: End, message: Any) -> None:
        if target.open:
            target.hear(message)

    def _arrive_end(self, target: End) -> None:
        if target.open and self.network.open(self._peer(target).owner.host, target.owner.host):
            target.owner.run(self._break, target)

    def _give_up(self, end: End) -> None:
        end.suspicion = None
        if end.open and self._stalled():
            end.owner.run(self._break, end)

    def _break(self, end: End) -> None:
        if not end.open:
            return
        end.open = False
        end.broke()
        peer = self._peer(end)
        if peer.open:
            self._later(peer, self._arrive_end, peer)
        else:
            self._forget()

    def _forget(self) -> None:
        if self.look in self.network.changed:
            self.network.changed.remove(self.look)
