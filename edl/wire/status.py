"""What a Master answers to ``edl status`` and ``edl events``."""

from __future__ import annotations

from dataclasses import dataclass

from edl.wire.messages import NO_SETTINGS, NO_STATE, Failure, Settings, Version
from edl.wire.scale_requests import NO_SCALE, ScaleView


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line of a job's history."""

    number: int
    """Counts from 1 over the whole job, across Masters."""
    at_s: float
    """Wall clock of the Master's host, seconds since 1970; for display only, never compared."""
    kind: str
    text: str
    node: str = ""
    round: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as the Master sees it."""

    node: str
    host: str
    slots: int
    state: str
    """Status in lower case; ``spare`` for a ready node outside the running world."""
    attached: bool
    position: int
    """Group rank in the current world, -1 outside."""
    first_rank: int
    """First rank on the node, -1 outside."""
    underway: bool = False
    """All its workers use ``edl.run`` and train, and can be held at a step boundary."""
    how: str = ""
    """By which way they came into the current round; empty while they are not underway."""
    draining: bool = False
    """It wants to leave, and trains on until others have a world without it."""
    index: int = -1
    """See ``NodeInfo``."""
    places: tuple[int, ...] = ()
    """Slots that its workers are in; empty outside of the current world."""
    spare_slots: int = 0
    """See ``NodeInfo``."""


@dataclass(frozen=True, slots=True)
class DroppedSlot:
    """A slot of a node in which no worker is started any more."""

    node: str
    host: str
    slot: int
    device: str
    """UUID of what is in it, as far as that is known."""
    why: str
    round: int
    """The last round before it was dropped."""


@dataclass(frozen=True, slots=True)
class Count:
    """One number, for tools; the name ends in the unit where there is one."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class ServiceView:
    """One thing that a service of the Master keeps count of, such as a data set's epoch."""

    service: str
    name: str
    text: str
    """For people."""
    counts: tuple[Count, ...] = ()


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The whole job at one moment."""

    job: str
    phase: str
    round: int
    world_size: int
    """Workers of the current world."""
    reason: str
    nnodes: str
    fault_tolerance: str
    restarts_used: int
    restarts_allowed: int
    master: str
    """Node that rules."""
    nodes: tuple[NodeView, ...]
    journal: tuple[JournalEntry, ...]
    """The last lines of history, oldest first."""
    failures: tuple[Failure, ...]
    """Failures of the last incident, in order of arrival."""
    era: int = 0
    """Era of the commits that the current world makes."""
    restored: Version = NO_STATE
    """Commit that the current world began from."""
    saved: Version = NO_STATE
    """Newest commit known to lie complete in the checkpoint directory."""
    saved_in: str = ""
    """Where it lies, as far as the history still says so."""
    boundary: str = ""
    """What is to be done at a step boundary that is being agreed on; empty if none is."""
    kill: str = ""
    """Who has set the kill switch; empty if nobody has."""
    services: tuple[ServiceView, ...] = ()
    flaws: tuple[str, ...] = ()
    """What the job's end will have to tell, such as data that could not be read."""
    settings: Settings = NO_SETTINGS
    """Batch and LR of the current world, as last agreed on."""
    scale: ScaleView = NO_SCALE
    dropped: tuple[DroppedSlot, ...] = ()
    """Slots that take no part, also of nodes that are gone."""
    warnings: tuple[str, ...] = ()
    """What a fault would cost more for now: a checkpoint that could not be written, commits that find no memory."""


@dataclass(frozen=True, slots=True)
class Question:
    """Asks for the status."""


@dataclass(frozen=True, slots=True)
class EventsRequest:
    """Asks for history after a line number; ``follow`` keeps the answer open."""

    after: int = 0
    follow: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of an ``Asked``."""

    text: str
    ok: bool
    """It has been taken on; its outcome comes as history. Else ``text`` says why not, and nothing has changed."""
