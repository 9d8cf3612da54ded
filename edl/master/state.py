"""The Master's state. ``Record`` survives it in the store; the next Master collects the rest again."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.config import HyperPolicy, JobSpec
from edl.master.policies.autoscale import NO_MEMORY, NOTHING_LEARNT, AutoscaleMemory, Learnt
from edl.master.policies.slots import Dropped, Strike
from edl.master.sizing import NO_SIZING, Departing, SeenRequest, Sizing
from edl.types import Incarnation, NodeId, Round
from edl.wire.messages import (
    NO_SETTINGS,
    NO_STATE,
    Failure,
    Finish,
    Holding,
    NodeInfo,
    Purpose,
    Settings,
    Version,
    World,
)


class Phase(enum.Enum):
    """The phases of a job."""

    FORMING = "forming"
    """No world should run; nodes stop their workers and report ready."""
    RUNNING = "running"
    """The recorded world should run."""
    ENDED = "ended"
    """The outcome is decided."""


class NodeStatus(enum.Enum):
    """The phases of a node, as known to the Master."""

    WARMING = "warming"
    """Alive, but not ready to run workers yet."""
    READY = "ready"
    """Runs no worker and has ports reserved; a spare while a world runs without it."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Has been ordered to stop its workers, or will be when it attaches."""
    DONE = "done"
    """All its workers of the current round exited with status 0."""
    PREPARING = "preparing"
    """Runs no worker of a round, and starts workers ahead of the next world; waited for only if it is needed."""
    LOADING = "loading"
    """Was ready, and reads the state from the checkpoint directory."""
    LEAVING = "leaving"
    """Leaves on purpose; no longer counted."""


NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.RUNNING, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.FORMING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""Allowed transitions between phases. ``tests/sim/test_transitions.py`` checks this table and the next one."""

_S = NodeStatus
NEXT_STATUSES: dict[NodeStatus, frozenset[NodeStatus]] = {
    # RUNNING, STOPPING: a new Master hears of a node that it had not known, or that comes back after a partition.
    _S.WARMING: frozenset({_S.READY, _S.PREPARING, _S.RUNNING, _S.STOPPING, _S.LEAVING}),
    # WARMING: its fork server was lost. STOPPING: it is asked to report again.
    _S.READY: frozenset({_S.RUNNING, _S.PREPARING, _S.LOADING, _S.STOPPING, _S.WARMING, _S.LEAVING}),
    _S.RUNNING: frozenset({_S.STOPPING, _S.DONE, _S.WARMING, _S.LEAVING}),
    _S.STOPPING: frozenset({_S.READY, _S.PREPARING, _S.WARMING, _S.LEAVING}),
    # STOPPING: another node failed before all were done, so this one repeats the round.
    _S.DONE: frozenset({_S.STOPPING, _S.LEAVING}),
    _S.PREPARING: frozenset({_S.READY, _S.STOPPING, _S.LEAVING}),
    _S.LOADING: frozenset({_S.READY, _S.PREPARING, _S.LEAVING}),
    _S.LEAVING: frozenset(),
}
"""Allowed transitions between node statuses. A lost node has no status: its entry is removed."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something to report at the end of the job, even if all workers succeed."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Record:
    """The state that the next Master needs. Written to the store, fenced, before it is sent to any node."""

    phase: Phase = Phase.FORMING
    round: Round = Round(0)
    """Number of the last world that was formed; never decreases."""
    world: World | None = None
    """The last world formed: running, or being replaced."""
    reason: str = "waiting for the first nodes"
    """The reason for the phase."""
    restarts: int = 0
    """Worker failures charged to the budget; one more than the budget means that the job is about to fail."""
    charged: bool = False
    """The current change was charged; the charge is returned if a node of the world turns out to have died."""
    done: tuple[NodeId, ...] = ()
    """Nodes of the running world whose workers have all exited with status 0."""
    saving: tuple[NodeId, ...] = ()
    """Those of them that still write saves: the job ends when they have, and the world is repeated if one is lost."""
    failures: tuple[Failure, ...] = ()
    """Failures of the last incident, in order of arrival."""
    rejoins: bool = False
    """Workers of this job have shown that they can rejoin in process; new nodes start theirs ahead."""
    era: int = 0
    """Era of the last world; never decreases."""
    newest: Version = NO_STATE
    """Newest commit from which a world has begun; a later world without any state has lost it."""
    kill: str = ""
    """The requester of the kill switch, if it is set. The job ends as soon as its workers have stopped."""
    settings: Settings = NO_SETTINGS
    """Current batch and LR of the last world; ``world.settings`` is what it began with."""
    policy: HyperPolicy | None = None
    """The manually changed policy; None if it was never changed."""
    settings_request: str = ""
    """The requester and content of a manual change, until it takes effect."""
    first_workers: int = 0
    """Workers of the first world, for which the script's LR is meant unless configured otherwise."""
    flaws: tuple[Flaw, ...] = ()
    """Reports of services for the end of the job; see ``edl.master.service.Flaw``."""
    outcome: Finish | None = None
    sizing: Sizing = NO_SIZING
    """The requested size and settings."""
    observed: int = 0
    """Generation of ``sizing`` that the world conforms to, as far as the available nodes allow."""
    seen: tuple[SeenRequest, ...] = ()
    """Requests that came with a key, oldest first."""
    departing: tuple[Departing, ...] = ()
    """Nodes that have to leave, until they are gone."""
    owed: str = ""
    """Why the world must write a checkpoint as soon as it trains: a node left without the time to write it."""
    learnt: Learnt = NOTHING_LEARNT
    """The autoscale policy's knowledge about sizes."""
    strikes: tuple[Strike, ...] = ()
    """Slots that have failed by themselves, the latest last."""
    dropped: tuple[Dropped, ...] = ()
    """Slots that take no part, on any node."""
    judged: bool = False
    """The end of the last world has been counted among the strikes."""


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """One node, as the Master knows it."""

    info: NodeInfo
    joined: int
    """Order in which this Master first saw the nodes."""
    status: NodeStatus
    registered: bool = False
    """Its key is in the store, so its lease lives. Without that a node takes no part."""
    attached: bool = False
    """Its stream to this Master is open."""
    seen_round: Round = Round(0)
    ports: tuple[int, ...] = ()
    due_s: float = float("inf")
    """Time until which others wait for this node before a world forms without it."""
    parked: bool = False
    """Its workers have been started and wait for their world."""
    prestarted: bool = False
    """It has been asked to start its workers ahead."""
    holdings: tuple[Holding, ...] = ()
    stored: Version = NO_STATE
    stored_sharded: bool = False
    refused: str = ""
    load_tried: bool = False
    """It has been asked to load the state since it last was in a world."""
    underway: bool = False
    """All its workers of the current round train and can be held at a step boundary."""
    how: str = ""
    """How its workers entered the current round."""
    draining: bool = False
    """It wants to leave, and trains until the others have a world without it."""
    copy_holder: NodeId = NodeId("")
    """The node to which it sends copies of its commits."""
    departing: bool = False
    """It has been ordered to leave, on the current stream."""
    idled: bool = False
    """It has been ordered to end waiting workers, on the current stream."""
    writes: Version = NO_STATE
    """Commit that it was asked to write while the job is suspended, on the current stream."""
    hurried: bool = False
    """It wants to leave without time for a checkpoint: the others write it."""
    not_kept: str = ""
    """Its last report of why its workers' commits are not kept in memory."""
    not_logged: str = ""
    """Its last report of why its workers' output is not written to files."""
    step_s: float = 0.0
    """Its last reported step time in seconds; 0: none."""
    uses: tuple[int, ...] = ()
    """Slots that it knows its next workers use; empty: the first ones."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """A step boundary being agreed on with all members of the running world."""

    number: int
    purpose: Purpose
    reason: str
    until_s: float
    answers: Mapping[NodeId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MasterState:
    """Everything that the Master's decisions depend on."""

    spec: JobSpec
    record: Record
    nodes: Mapping[NodeId, NodeEntry] = field(default_factory=dict)
    dead: frozenset[Incarnation] = frozenset()
    """Incarnations that this Master has seen die; they are expelled if they come back."""
    arrivals: int = 0
    forming_since_s: float = 0.0
    grace_until_s: float | None = None
    """End of the wait for further nodes, once enough are ready."""
    ended_at_s: float | None = None
    agreement: Agreement | None = None
    agreements: int = 0
    """Number of agreements so far."""
    at_boundary: bool = False
    """The last world is being left at a step boundary; any problem turns this into an interruption."""
    formed_at_s: float = 0.0
    """Time at which the last world was formed, or this Master took it over."""
    trained_s: float = 0.0
    """Seconds that that world lasted."""
    quick: int = 0
    """Number of worlds in a row whose workers failed as soon as they ran; see ``forming.pause_s``."""
    dropped_s: Mapping[tuple[NodeId, int], float] = field(default_factory=dict)
    """Time at which the cool-down of automatically dropped slots began, as far as this Master knows."""
    settings_failed: bool = False
    """No boundary could be agreed on for new settings: not tried again in this world."""
    resizing: bool = False
    """Another size has been requested since the world last conformed."""
    cooling_until_s: float = 0.0
    """Time until which other sizes wait; see ``JobSpec.cooldown_s``."""
    unwritten: tuple[Version, str] = (NO_STATE, "")
    """The newest checkpoint that could not be written, and why; empty once it or a later one is written."""
    save_s: float = 0.0
    """Seconds that writing the last checkpoint took; 0: none has been written."""
    scaling: AutoscaleMemory = NO_MEMORY
    """The autoscale policy's current measurement."""
    reason: str = ""
    """The reason of the last step; shown by ``edl status``."""
