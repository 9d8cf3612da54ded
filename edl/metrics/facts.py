"""What metrics are read from. Collected when somebody scrapes, except for the counters in ``HistoryTotals``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edl.wire.records import NO_STATE, Version
from edl.wire.status import JobStatus


@dataclass(frozen=True, slots=True)
class HistoryTotals:
    """What a Master has counted since it took over."""

    entries: Mapping[str, int] = field(default_factory=dict)
    """Entries of the history by kind."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Worlds that were formed, by cause."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Changes of the world that have passed a phase."""
    change_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that they took together, by phase."""
    unwritten: int = 0
    """Checkpoints that could not be written."""
    checkpoint_at_s: float = 0.0
    """Time at which the newest checkpoint was complete, in seconds since the Unix epoch; 0: unknown. Also from the
    history of earlier Masters."""


NO_TOTALS = HistoryTotals()


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the Master knows."""

    status: JobStatus
    totals: HistoryTotals = NO_TOTALS


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """The file system of one directory that this launcher writes to."""

    name: str
    """What the directory is for: ``checkpoints`` or ``logs``."""
    answers: bool
    """Whether the file system has answered in time. Otherwise the numbers are 0."""
    size_bytes: int = 0
    free_bytes: int = 0
    """Free for this user."""
    inodes: int = 0
    """0: the file system does not count them."""
    free_inodes: int = 0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one launcher knows of its node."""

    version: str
    python: str
    node: str
    host: str
    role: str
    is_master: bool
    phase: str
    """The value of an ``AgentPhase``."""
    slots: int
    round: int = 0
    """Round whose workers the node runs; 0: none."""
    attached: bool = False
    """Whether the stream to the Master is open."""
    draining: bool = False
    training: int = 0
    """Workers that belong to the world and have not ended."""
    waiting: int = 0
    """Workers that live and belong to no world."""
    exits: Mapping[str, int] = field(default_factory=dict)
    """Ended workers since the launcher's start by result: ``success``, ``error``, ``signal``."""
    store_answers: bool = True
    lease_age_s: float = 0.0
    """Seconds since the last successful renewal of the lease."""
    lease_ttl_s: float = 0.0
    held: Version = NO_STATE
    """The newest commit in memory."""
    stored: Version = NO_STATE
    """The newest checkpoint that the node knows of."""
    parts: int = 0
    """Parts of commits in memory, copies for other nodes included."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory of commits by use: ``workers``, ``replicas``, ``loaded``."""
    memory_limit_bytes: int = 0
    directories: Sequence[DirectoryFacts] = ()
