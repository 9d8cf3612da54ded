"""What a Master answers to ``edl status`` and ``edl events``."""

from __future__ import annotations

from dataclasses import dataclass

from edl.wire.messages import Failure


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


@dataclass(frozen=True, slots=True)
class Question:
    """Asks for the status."""


@dataclass(frozen=True, slots=True)
class EventsRequest:
    """Asks for history after a line number; ``follow`` keeps the answer open."""

    after: int = 0
    follow: bool = False
