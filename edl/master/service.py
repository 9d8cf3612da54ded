"""What a service that the Master hosts is: a pure machine beside the Master's own, such as the one that leases data.

The Master knows none of them by name; ``launch/compose.py`` plugs them in. A service is fed with what happens to the
world and with what workers say to it, in one order. The shell steps it, writes what it wants kept (in one guarded
transaction), and only then sends its words. It is failed over with the Master: the next one makes a new machine and
loads what was kept; what was only said may be lost, and whoever said it says it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edl.machine import Tick as Tick
from edl.machine import WakeAt as WakeAt
from edl.types import NodeId, Rank, Round
from edl.wire.messages import Settings, World

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorldBegan:
    """A world has been formed; also the first event of a Master that takes over a running one."""

    world: World
    taken_over: bool = False


@dataclass(frozen=True, slots=True)
class WorldEnded:
    """The world is over, because the next one begins or the job has ended: nothing of its workers counts any more but
    what the next state contains. Said late on purpose: workers train on while they leave a world at a step boundary."""

    round: Round
    reason: str


@dataclass(frozen=True, slots=True)
class Said:
    """A worker of the running world, or one that still believes to be in ``round``, says something."""

    caller: Caller
    round: Round
    body: str


@dataclass(frozen=True, slots=True)
class KeyPut:
    """A leased key below the service's name appeared or changed, such as one that a helper process registers."""

    name: str
    """Without the prefix."""
    value: bytes


@dataclass(frozen=True, slots=True)
class KeyGone:
    """Such a key is gone: whoever held its lease is dead or has left."""

    name: str


@dataclass(frozen=True, slots=True, order=True)
class Caller:
    """One worker's slot. Who sits in it, the round says."""

    node: NodeId
    slot: int


@dataclass(frozen=True, slots=True)
class LineUp:
    """The line to a helper process stands (again): what was sent before may be lost."""

    name: str
    """Of its key."""


@dataclass(frozen=True, slots=True)
class LineDown:
    """The line to a helper process broke, or could not be made; it is tried again as long as the key is there."""

    name: str
    refused: bool
    """Its port refuses connections: the process is dead, whatever its lease says."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A helper process says something over its line."""

    name: str
    body: str


@dataclass(frozen=True, slots=True)
class SettingsHold:
    """Batch and LR of the world have changed, or are those that a Master which takes over has found."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Ordered:
    """Somebody outside of the world asks for something (``edl data add``). To be answered with ``Answered``."""

    number: int
    """For the answer."""
    by: str
    """Who, in words."""
    body: str


Event = WorldBegan | WorldEnded | Said | KeyPut | KeyGone | Tick | LineUp | LineDown | Heard | SettingsHold | Ordered

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Say something to a worker. Lost when the worker, its node or the stream is gone."""

    caller: Caller
    body: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Write below the service's name in the store, before anything is told; an empty value deletes. At most about
    1 MB each (etcd takes no more in one request)."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the job's history."""

    text: str


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something that the job's end has to tell: a job whose workers all end well then ends with
    ``ExitCode.INCOMPLETE`` and this text instead of with success. A later text with the same name replaces it; an
    empty one takes it back."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Send:
    """Say something to a helper process, by the name of its key. Lost when its line is down."""

    name: str
    body: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot go on: it ends now, as failed, with this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """To ``Ordered``, once all is written."""

    number: int
    ok: bool
    text: str


Effect = Tell | Keep | WakeAt | Note | Flaw | Send | Fail | Answered


class Service(Protocol):
    """One service. Large tables may be changed in place: no copy of the state is kept by anybody."""

    name: str
    """One path segment: its keys lie below ``/edl/<job>/services/<name>/``."""

    def load(self, kept: Mapping[str, bytes], now_s: float) -> tuple[Effect, ...]:
        """First call: what the last Master kept, by name; empty for a new job."""
        ...

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Take one event. Raises nothing for what a worker says, however wrong: it answers."""
        ...

    def report(self) -> tuple[Progress, ...]:
        """What ``edl status`` shows."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """One thing that a service keeps count of, such as a data set's epoch."""

    name: str
    text: str
    """For people."""
    counts: Mapping[str, float]
    """For tools: names end in the unit (``_records``, ``_shards``, ``_s``, ``_per_s``) where there is one."""


def rank_of(world: World, caller: Caller) -> Rank | None:
    """The caller's rank in a world; None when it has none there."""
    member = world.member(caller.node)
    if member is None or caller.slot not in member.used:
        return None
    return Rank(member.first_rank + member.used.index(caller.slot))
