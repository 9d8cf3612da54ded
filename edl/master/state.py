"""What a Master knows. ``Record`` survives it in the store; the rest is learnt again by the next Master."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.config import HyperPolicy, JobSpec
from edl.master.policies.autoscale import NO_MEMORY, NOTHING_LEARNT, Learnt, Memory
from edl.master.policies.slots import Dropped, Strike
from edl.master.sizing import NO_SIZING, Departing, Seen, Sizing
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
    """Where the job stands."""

    FORMING = "forming"
    """No world is meant to run; nodes stop their workers and say they are ready."""
    RUNNING = "running"
    """The recorded world is meant to run."""
    ENDED = "ended"
    """The outcome is decided."""


class NodeStatus(enum.Enum):
    """What one node does, as far as the Master was told."""

    WARMING = "warming"
    """Alive, but not ready to run workers yet."""
    READY = "ready"
    """Runs no worker and has ports reserved; a spare while a world runs without it."""
    RUNNING = "running"
    STOPPING = "stopping"
    """Has been told to stop its workers, or will be when it attaches."""
    DONE = "done"
    """All its workers of the current round ended with status 0."""
    PREPARING = "preparing"
    """Runs no worker of a round, and starts workers ahead of the next world; waited for only where it is needed."""
    LOADING = "loading"
    """Was ready, and reads the state from the checkpoint directory."""
    LEAVING = "leaving"
    """Goes away on purpose; counted out."""


NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.RUNNING, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.FORMING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""Which phase may follow which. ``tests/sim/test_transitions.py`` holds the machine to this table and the next one."""

_S = NodeStatus
NEXT_STATUSES: dict[NodeStatus, frozenset[NodeStatus]] = {
    # RUNNING, STOPPING: a new Master hears of a node that it had not known, or that comes back after a cut.
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
"""Which status of a node may follow which. A node that is lost has no status: its entry goes."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something that the end of the job has to tell, even if all workers end well."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Record:
    """What the next Master must know. Written to the store, fenced, before anybody is told about it."""

    phase: Phase = Phase.FORMING
    round: Round = Round(0)
    """Number of the last world that was formed; never goes back."""
    world: World | None = None
    """The last world formed: running, or the one being replaced."""
    reason: str = "waiting for the first nodes"
    """Why the phase is what it is."""
    restarts: int = 0
    """Worker failures charged to the budget; one more than the budget means that the job is about to fail."""
    charged: bool = False
    """The change under way was charged; given back when a node of the world turns out to have died."""
    done: tuple[NodeId, ...] = ()
    """Nodes of the running world whose workers have all ended with status 0."""
    saving: tuple[NodeId, ...] = ()
    """Those of them that still write what was saved: the job ends when they have, and goes back if one is lost."""
    failures: tuple[Failure, ...] = ()
    """Failures of the last incident, in order of arrival."""
    rejoins: bool = False
    """Workers of this job have shown that they can rejoin in process; newcomers start theirs ahead."""
    era: int = 0
    """Era of the last world; never goes back."""
    newest: Version = NO_STATE
    """Newest commit that a world has begun from; one without any state after that has lost it."""
    kill: str = ""
    """Somebody has set the kill switch: who. The job ends as soon as its workers have stopped."""
    settings: Settings = NO_SETTINGS
    """Batch and LR that hold in the last world, as last agreed on; ``world.settings`` is what it began with."""
    policy: HyperPolicy | None = None
    """What has been made of the spec's by hand; None if it never was."""
    wish: str = ""
    """Who has changed it and how, until that holds."""
    first_workers: int = 0
    """Workers of the first world: what the script's LR is meant for, if nobody says otherwise."""
    flaws: tuple[Flaw, ...] = ()
    """What services have to say at the end; see ``edl.master.service.Flaw``."""
    outcome: Finish | None = None
    sizing: Sizing = NO_SIZING
    """What is wanted."""
    observed: int = 0
    """Generation of it that the world conforms to, as far as the nodes that are there allow."""
    seen: tuple[Seen, ...] = ()
    """Wishes that came with a key, oldest first."""
    departing: tuple[Departing, ...] = ()
    """Nodes that have to leave, until they are gone."""
    owed: str = ""
    """Why the world is to write a checkpoint as soon as it trains: somebody has left who had not the time."""
    learnt: Learnt = NOTHING_LEARNT
    """What the autoscale policy knows about sizes."""
    strikes: tuple[Strike, ...] = ()
    """Slots that have failed by themselves, the last one to do so at the end."""
    dropped: tuple[Dropped, ...] = ()
    """Slots that take no part, of whatever node has them."""
    judged: bool = False
    """What led to the end of the last world has been counted among the strikes."""


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """One node in the Master's eyes."""

    info: NodeInfo
    joined: int
    """Order of first sight by this Master."""
    status: NodeStatus
    registered: bool = False
    """Its key is in the store, so its lease lives. Without that a node takes no part."""
    attached: bool = False
    """Its stream to this Master is open."""
    seen_round: Round = Round(0)
    ports: tuple[int, ...] = ()
    due_s: float = float("inf")
    """Until when others wait for this node before a world forms without it."""
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
    """By which way its workers came into the current round."""
    draining: bool = False
    """It wants to leave, and trains on until others have a world without it."""
    keeper: NodeId = NodeId("")
    """Where it was told to send copies of its commits."""
    departing: bool = False
    """It has been told to leave, on the stream that is open now."""
    idled: bool = False
    """It has been told to end the workers that wait for a world, on the stream that is open now."""
    writes: Version = NO_STATE
    """Commit that it was asked to write while the job rests, on the stream that is open now."""
    hurried: bool = False
    """It wants to leave, and has not the time to write a checkpoint: the others do."""
    not_kept: str = ""
    """Why its workers' commits are not kept in memory, as it has said last."""
    not_logged: str = ""
    """Why what its workers write is not kept in files, as it has said last."""
    step_s: float = 0.0
    """What a step takes there, as it has said last; 0: it has not."""
    uses: tuple[int, ...] = ()
    """Slots that it knows its next workers to be in; empty: the first ones."""


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
    """Everything a Master decides from."""

    spec: JobSpec
    record: Record
    nodes: Mapping[NodeId, NodeEntry] = field(default_factory=dict)
    dead: frozenset[Incarnation] = frozenset()
    """Incarnations this Master has seen die; they are told so if they come back."""
    arrivals: int = 0
    forming_since_s: float = 0.0
    grace_until_s: float | None = None
    """End of the wait for further nodes, once enough stand ready."""
    ended_at_s: float | None = None
    agreement: Agreement | None = None
    agreements: int = 0
    """Numbers given out so far."""
    at_boundary: bool = False
    """The last world is being left at a step boundary: any trouble on the way makes it an interruption."""
    formed_at_s: float = 0.0
    """When the last world was formed, or this Master took it over."""
    trained_s: float = 0.0
    """How long that world lasted."""
    quick: int = 0
    """Worlds in a row whose workers failed as soon as they ran; see ``forming.pause_s``."""
    dropped_s: Mapping[tuple[NodeId, int], float] = field(default_factory=dict)
    """Since when, as far as this Master knows, slots cool down that were dropped by themselves."""
    settings_failed: bool = False
    """No boundary could be agreed on for other settings: not tried again in this world."""
    resizing: bool = False
    """Another size has been asked for since the world last conformed."""
    cooling_until_s: float = 0.0
    """Until then other sizes wait; see ``JobSpec.cooldown_s``."""
    unwritten: tuple[Version, str] = (NO_STATE, "")
    """The newest checkpoint that was to be written and was not, and why; no reason once it or a later one is."""
    save_s: float = 0.0
    """What it took to write the last checkpoint; 0: none has been written."""
    scaling: Memory = NO_MEMORY
    """What the autoscale policy measures just now."""
    reason: str = ""
    """Why the last step did what it did; shown by ``edl status``."""
