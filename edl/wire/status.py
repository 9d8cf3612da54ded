"""Answers of the Master to ``edl status`` and ``edl events``."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from edl.wire.alarm import Alarm
from edl.wire.health import HealthView
from edl.wire.rank_pace import RankPace
from edl.wire.records import NO_SETTINGS, NO_STATE, Failure, Settings, Version
from edl.wire.scale_requests import NO_SCALE, ScaleView


class Kind(enum.Enum):
    """Kinds of history entries, for people and for filters."""

    NODE_JOINED = "node-joined"
    NODE_RETURNED = "node-returned"
    NODE_LOST = "node-lost"
    NODE_LEAVING = "node-leaving"
    WORKER_FAILED = "worker-failed"
    WORLD_STOPPED = "world-stopped"
    WORLD_FORMED = "world-formed"
    WORLD_UNDERWAY = "world-underway"
    BOUNDARY = "boundary"
    STATE = "state"
    SETTINGS = "settings"
    SCALE = "scale"
    DRAIN = "drain"
    DRAIN_FAILED = "drain-failed"
    SLOT = "slot"
    HEALTH = "health"
    SERVICE = "service"
    WAITING = "waiting"
    ALARM = "alarm"
    ALARM_CLEARED = "alarm-cleared"
    JOB_ENDED = "job-ended"


SUSPENDED = "the job is suspended"
"""What an entry of kind ``scale`` begins with once no world is to run. The dashboard (``changes.js``) knows it, too."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One line of a job's history."""

    number: int
    """Counts from 1 over the whole job, across Masters."""
    at_s: float
    """Wall clock of the Master's host, seconds since 1970; for display only, never compared."""
    kind: str
    """The value of a ``Kind``, or one that only a newer Master knows."""
    text: str
    node: str = ""
    round: int = 0
    severity: str = ""
    """``info``, ``warning`` or ``critical``; empty: the one that its kind has."""


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
    """How its workers entered the current round; empty while they are not underway."""
    draining: bool = False
    """It is leaving, and trains on until the others have a world without it."""
    index: int = -1
    """See ``NodeInfo``."""
    places: tuple[int, ...] = ()
    """Slots of its workers; empty outside the current world."""
    spare_slots: int = 0
    """See ``NodeInfo``."""
    step_s: float = 0.0
    """Seconds from commit to commit, as last reported in the current round; 0: not reported."""
    members: int = 0
    """See ``NodeInfo``."""
    ranks: tuple[RankPace, ...] = ()
    """The last windows of its workers in the current round, by local rank."""
    hang_limit_s: float = 0.0
    """Seconds without progress that look like a hang, if that is learnt; 0: not known yet."""
    hang_pauses: int = 0
    """Number of pauses that the limit is learnt from."""
    hang_needed: int = 0
    """Number of pauses from which a limit is learnt; 0: none is, or the node has not said so yet."""


@dataclass(frozen=True, slots=True)
class DroppedSlot:
    """A slot in which no more workers are started."""

    node: str
    host: str
    slot: int
    device: str
    """UUID of its device; empty if unknown."""
    why: str
    round: int
    """Last round before the slot was dropped."""
    host_id: str = ""
    """``NodeInfo.host_id``; empty: unknown."""
    by: str = "job"
    """Who dropped it, or why: ``job``, ``hand`` (a request), ``denylist``, or ``straggler``."""


@dataclass(frozen=True, slots=True)
class Count:
    """One number, for tools; the name ends with the unit, if any."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class ServiceShare:
    """The part of one node in an item of a service."""

    node: str
    workers: int = 0
    """Workers that take part."""
    leases: int = 0
    """Leases that they hold."""
    records: int = 0
    """Records that they have finished in this epoch."""


@dataclass(frozen=True, slots=True)
class ServiceView:
    """Status of one item of a service, such as a data set."""

    service: str
    name: str
    text: str
    """Description for display."""
    counts: tuple[Count, ...] = ()
    shares: tuple[ServiceShare, ...] = ()
    """The nodes that take part, by name. Of services that do not say so, empty."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of the whole job at one moment."""

    job: str
    phase: str
    round: int
    world_size: int
    """Number of workers of the running world; 0: none runs."""
    reason: str
    nnodes: str
    fault_tolerance: str
    restarts_used: int
    restarts_allowed: int
    master: str
    """Node of the current Master."""
    nodes: tuple[NodeView, ...]
    history: tuple[HistoryEntry, ...]
    """Last lines of the history, oldest first."""
    failures: tuple[Failure, ...]
    """Failures of the last incident, in order of arrival."""
    era: int = 0
    """Era of the commits that the current world makes."""
    restored: Version = NO_STATE
    """Commit from which the current world started."""
    saved: Version = NO_STATE
    """Newest commit known to be complete in the checkpoint directory."""
    saved_in: str = ""
    """Location of that commit, if the history still contains it."""
    boundary: str = ""
    """Action planned at the step boundary that is being agreed on; empty: none."""
    kill: str = ""
    """Source of the stop request; empty: none."""
    services: tuple[ServiceView, ...] = ()
    flaws: tuple[str, ...] = ()
    """Remarks to report at the end of the job, such as data that could not be read."""
    settings: Settings = NO_SETTINGS
    """Batch and LR of the current world, as last agreed on."""
    scale: ScaleView = NO_SCALE
    dropped: tuple[DroppedSlot, ...] = ()
    """Slots that take no part, including those of nodes that are gone."""
    warnings: tuple[str, ...] = ()
    """Conditions that make a failure more costly: a failed checkpoint, no memory for commits."""
    goodput: tuple[Count, ...] = ()
    """Slot-seconds by use since the job began; see ``edl.master.goodput.slot_use.SlotUse``."""
    commit: int = 0
    """Newest commit that a node has reported in the current round; reports arrive every few seconds. 0: none."""
    alarms: tuple[Alarm, ...] = ()
    """Problems that watchdogs have found and that persist."""
    hang_timeout: str = ""
    """``--hang-timeout`` as on the command line; empty: hangs are not looked for, because workers are independent."""
    health: tuple[HealthView, ...] = ()
    """Nodes with a verdict of a health check, and those that are being checked or must be."""
    holders: int = 0
    """The smallest number of nodes that hold a recent commit, or a part of one, in memory; 0: not known."""


@dataclass(frozen=True, slots=True)
class Question:
    """Request for the job's status."""


@dataclass(frozen=True, slots=True)
class EventsRequest:
    """Request for the history after a line number; ``follow`` keeps the answer open."""

    after: int = 0
    follow: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to an ``Asked``."""

    text: str
    ok: bool
    """The request is accepted; its outcome appears in the history. Else ``text`` says why not; nothing changed."""
