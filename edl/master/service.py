"""The interface of the services that the Master hosts: pure machines beside the Master's own, such as the data service.

The Master knows none of them by name; ``launch/compose.py`` passes them in. A service gets events about the world and
messages from workers, in one order. The shell steps it, writes what it wants to keep (in guarded transactions), and
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
from edl.wire.records import Settings, World
from edl.wire.status import ServiceShare

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorldBegan:
    """A world has been formed, or a new Master has taken over a running one."""

    world: World
    taken_over: bool = False
    """Whether the world was running when this Master took over."""


@dataclass(frozen=True, slots=True)
class WorldEnded:
    """A world is over, because the next one begins or the job has ended. Only those results of its workers count that
    are in the next world's state. Not sent before that, because workers may train on up to a step boundary."""

    round: Round
    reason: str


@dataclass(frozen=True, slots=True)
class Said:
    """A message from a worker that is in round ``round``, which may be an earlier one than the running world's."""

    caller: Caller
    round: Round
    body: str


@dataclass(frozen=True, slots=True)
class KeyPut:
    """A helper's key below the service's name was created or changed."""

    name: str
    """The key's name without the prefix."""
    value: bytes


@dataclass(frozen=True, slots=True)
class KeyGone:
    """A helper's key was deleted: its process has left, or the lease has ended."""

    name: str


@dataclass(frozen=True, slots=True, order=True)
class Caller:
    """A worker's slot. Together with the round it identifies the worker."""

    node: NodeId
    slot: int


@dataclass(frozen=True, slots=True)
class LineUp:
    """The connection to a helper process is open (again): earlier messages may be lost."""

    name: str
    """Name of its key."""


@dataclass(frozen=True, slots=True)
class LineDown:
    """The connection to a helper process has broken or could not be opened. It is retried as long as the key exists."""

    name: str
    refused: bool
    """Whether the port refuses connections: then the process is dead, even if its lease lives."""


@dataclass(frozen=True, slots=True)
class HelperSaid:
    """A message from a helper process."""

    name: str
    body: str


@dataclass(frozen=True, slots=True)
class SettingsHold:
    """The batch size and LR that apply from now on: sent when they change, and after a take-over."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Ordered:
    """A request of an operator or program (``edl data add``), to be answered with ``Answered``."""

    number: int
    """Identifies the request in the answer."""
    by: str
    """The requester, for messages."""
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
    """Write a value below the service's name to the store, before any message is sent. An empty value deletes the key.
    A value may have about 1 MB (etcd's limit for a request)."""

    name: str
    value: bytes


@dataclass(frozen=True, slots=True)
class AddToHistory:
    """Add a line to the job's history."""

    text: str


@dataclass(frozen=True, slots=True)
class ReportFlaw:
    """A flaw of the job: if all workers succeed, the job ends with ``ExitCode.INCOMPLETE`` and this text. A later flaw
    of the same name replaces it; an empty text removes it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a helper process, by the name of its key. It is lost if no connection is open."""

    name: str
    body: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the job as failed, with this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to ``Ordered``, sent once the results are in the store."""

    number: int
    ok: bool
    text: str


Effect = TellWorker | Keep | WakeAt | AddToHistory | ReportFlaw | Send | Fail | Answered


class Service(Protocol):
    """A hosted machine. It may change its tables in place, because no earlier state is kept."""

    name: str
    """One path segment: its keys are below ``/edl/<job>/services/<name>/``."""

    def load(self, kept: Mapping[str, bytes], now_s: float) -> tuple[Effect, ...]:
        """Called first. ``kept``: values that earlier Masters kept, by name; empty for a new job."""
        ...

    def step(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """Handle one event. Must not raise because of an invalid message from a worker."""
        ...

    def report(self) -> tuple[Progress, ...]:
        """Progress for ``edl status``."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of one thing that a service counts, such as a data set's epoch."""

    name: str
    text: str
    """For people."""
    counts: Mapping[str, float]
    """For programs; names end in the unit, if there is one: ``_records``, ``_shards``, ``_s``, ``_per_s``."""
    shares: tuple[ServiceShare, ...] = ()
    """The nodes that take part, by name."""
