"""Simulated hosts, the paths between them, and TCP-like streams: messages arrive in order or the stream breaks."""

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
LATE_SHARE = 0.5
"""Share of the lost writes that reach the store late, as those in the socket of a member that was frozen."""


class Process(Protocol):
    """The process that owns an end of a stream."""

    host: str

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        ...

    @property
    def paused(self) -> bool:
        """Whether it is stopped by SIGSTOP."""
        ...

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Call soon; once the process continues if it is stopped; never if it is dead."""
        ...


class Network:
    """Which hosts reach each other, and the delays between them."""

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self.timeline = timeline
        self.rng = rng
        self.usual_slowness = 1.0
        self.slowness = 1.0
        """Current factor on every delay."""
        self.biases = USUAL
        self.changed: list[Callable[[], None]] = []
        self._blocked: Counter[Pair] = Counter()
        self._late_rng = random.Random()  # noqa: S311 - its draws do not change the rest of a schedule
        self._late_rng.setstate(rng.getstate())

    def late_s(self) -> float | None:
        """Seconds after which a write that got no answer arrives after all; None: it is lost."""
        return self._late_rng.uniform(0.2, 6.0) if self._late_rng.random() < LATE_SHARE else None

    def delay_s(self) -> float:
        """Delay of one message, in seconds."""
        return self.slowness * (0.0005 + 0.006 * self.rng.random() ** 3)

    def read_delay_s(self) -> float:
        """Seconds that an arrived message waits for its reader."""
        slow = self.biases.slow_reader and self.rng.random() < self.biases.slow_reader
        return self.rng.uniform(0.0, self.biases.slowest_read_s) if slow else 0.0

    def open(self, source: str, target: str) -> bool:
        """Whether messages arrive in this direction. A host always reaches itself."""
        return source == target or not self._blocked[source, target]

    def both(self, one: str, other: str) -> bool:
        """Whether messages arrive in both directions."""
        return self.open(one, other) and self.open(other, one)

    def block(self, pairs: Iterable[Pair]) -> None:
        """Block these directions. A direction blocked twice must be healed twice."""
        self._blocked.update(pairs)
        self.tell()

    def heal(self, pairs: Iterable[Pair]) -> None:
        """Remove one block from each of these directions."""
        for pair in pairs:
            if self._blocked[pair] > 0:
                self._blocked[pair] -= 1
        self.tell()

    def heal_all(self) -> None:
        """Unblock all paths, and notify the streams."""
        self._blocked.clear()
        self.tell()

    def tell(self) -> None:
        """Notify the streams that a path or a process has changed."""
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
        """Messages sent to this end that it has not received."""
        self.held = 0
        """How many of them arrived while the direction was blocked."""
        self.last_arrival_s = 0.0
        self.suspicion: ScheduledCall | None = None
        """The timeout of its keep-alive, while the peer is unreachable."""


class Stream:
    """A connection with two ends. Each end detects a partition after its own timeout, unless it heals before."""

    def __init__(self, network: Network, one: End, other: End) -> None:
        self.network = network
        self.ends = (one, other)
        self.slowness = 1.0
        """Factor on its delays, in addition to the network's."""
        network.changed.append(self.look)

    def send(self, source: End, message: Any) -> None:
        """Send from an end. The message is lost without an error if the stream is broken."""
        target = self._peer(source)
        if source.open:
            target.coming.append(message)
            self._later(target, self._arrive, target)

    def close(self, end: End) -> None:
        """Close an end. The other end detects it as soon as the network allows."""
        if not end.open:
            return
        end.open = False
        peer = self._peer(end)
        if peer.open:
            self._later(peer, self._arrive_end, peer)
        else:
            self._forget()

    def abort(self, end: End) -> None:
        """Break the stream; this end detects it first."""
        self._later(end, end.owner.run, self._break, end)

    def look(self) -> None:
        """Start or cancel keep-alive timeouts and deliver what was held, after a path or a process has changed."""
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
