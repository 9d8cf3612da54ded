"""The interface of services that the Master hosts: pure machines beside the Master's own, such as the one that leases
data.

The Master knows none of them by name; ``launch/compose.py`` plugs them in. A service gets events about the world and
messages from workers, in one order. The shell steps it, writes what it wants kept (in one guarded transaction), and
only then sends its messages. It fails over with the Master: the next one creates a new machine and loads what was kept.
Messages may be lost; their senders repeat them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edl.machine import Tick as Tick
from edl.machine import WakeAt as WakeAt
from edl.types import NodeId, Round
from edl.wire.messages import Settings, World

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorldBegan:
    """A world has been formed; also the first event of a Master that takes over a running one."""

    world: World
    taken_over: bool = False


@dataclass(frozen=True, slots=True)
class WorldEnded:
    """The world is over, because the next one begins or the job has ended: of its workers' results only those in the
    next state count. Sent late on purpose, since workers train on until they leave a world at a step boundary."""

    round: Round
    reason: str


@dataclass(frozen=True, slots=True)
class Said:
    """A message from a worker of the running world, or from one that still believes it is in ``round``."""

    caller: Caller
    round: Round
    body: str


@dataclass(frozen=True, slots=True)
class KeyPut:
    """A leased key below the service's name appeared or changed, such as one that a helper process registers."""

    name: str
    """Name without the prefix."""
    value: bytes


@dataclass(frozen=True, slots=True)
class KeyGone:
    """Such a key is gone: the holder of its lease is dead or has left."""

    name: str


@dataclass(frozen=True, slots=True, order=True)
class Caller:
    """A worker's slot. Together with the round it identifies the worker."""

    node: NodeId
    slot: int


@dataclass(frozen=True, slots=True)
class LineUp:
    """The line to a helper process is up (again): messages sent before may be lost."""

    name: str
    """Name of its key."""


@dataclass(frozen=True, slots=True)
class LineDown:
    """The line to a helper process broke or could not be opened; retried while the key exists."""

    name: str
    refused: bool
    """Its port refuses connections: the process is dead, whatever its lease says."""


@dataclass(frozen=True, slots=True)
class HelperSaid:
    """A helper process sent a message over its line."""

    name: str
    body: str


@dataclass(frozen=True, slots=True)
class SettingsHold:
    """Batch size and LR of the world have changed, or are those found by a new Master."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Ordered:
    """A request from outside of the world (``edl data add``), to be answered with ``Answered``."""

    number: int
    """Number for the answer."""
    by: str
    """The requester, as text."""
    body: str


Event = (
    WorldBegan | WorldEnded | Said | KeyPut | KeyGone | Tick | LineUp | LineDown | HelperSaid | SettingsHold | Ordered
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellWorker:
    """Send a message to a worker. It is lost if the worker, its node or the stream is gone."""

    caller: Caller
    body: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Write a value below the service's name in the store, before any message is sent; an empty value deletes. At most
    about 1 MB each (etcd's limit for one request)."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class AddToHistory:
    """Add a line to the job's history."""

    text: str


@dataclass(frozen=True, slots=True)
class ReportFlaw:
    """Something to report at the end of the job: a job whose workers all succeed then ends with ``ExitCode.INCOMPLETE``
    and this text. A later text with the same name replaces it; an empty one withdraws it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a helper process, by the name of its key. It is lost while the line is down."""

    name: str
    body: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The job cannot continue: end it now, as failed, with this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer to ``Ordered``, sent once everything is written."""

    number: int
    ok: bool
    text: str


Effect = TellWorker | Keep | WakeAt | AddToHistory | ReportFlaw | Send | Fail | Answered


class Service(Protocol):
    """One service. Large tables may be changed in place, since no copy of the state is kept."""

    name: str
    """One path segment: its keys are below ``/edl/<job>/services/<name>/``."""

    def load(self, kept: Mapping[str, bytes], now_s: float) -> tuple[Effect, ...]:
        """First call, with what the last Master kept, by name; empty for a new job."""
        ...

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Handle one event. Never raises because of a worker's message, however wrong: it answers."""
        ...

    def report(self) -> tuple[Progress, ...]:
        """Counters for ``edl status``."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """One counted thing of a service, such as a data set's epoch."""

    name: str
    text: str
    """Text for people."""
    counts: Mapping[str, float]
    """Numbers for tools: names end in the unit (``_records``, ``_shards``, ``_s``, ``_per_s``), if any."""
