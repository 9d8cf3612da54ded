"""The Master's state. ``Record`` is in the store, for the next Master, to which the agents report the rest."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from edl.config import HyperPolicy, JobSpec
from edl.master.policies.autoscale import NO_MEMORY, NOTHING_LEARNT, AutoscaleMemory, Learnt
from edl.master.policies.health import NO_CHECKS, HealthMemory
from edl.master.policies.slots import Dropped, Strike
from edl.master.sizing import NO_SIZING, Departing, SeenRequest, Sizing
from edl.stragglers.memory import NO_WINDOWS, StragglerMemory
from edl.types import Incarnation, NodeId, Round
from edl.wire.alarm import Alarm
from edl.wire.denylist import DenylistEntry
from edl.wire.health_records import NO_HEALTH, HealthRecord
from edl.wire.messages import Finish, Hanging, HangLimit, Switch
from edl.wire.purpose import Purpose
from edl.wire.rank_pace import RankPace
from edl.wire.records import NO_SETTINGS, NO_STATE, Failure, Holding, NodeInfo, Settings, Version, World


class Phase(enum.Enum):
    """The phases of a job."""

    FORMING = "forming"
    """No world should run: nodes stop their workers and report ready."""
    RUNNING = "running"
    """The recorded world should run."""
    ENDED = "ended"
    """The outcome is decided."""


class NodeStatus(enum.Enum):
    """The statuses of a node, as known to the Master."""

    WARMING = "warming"
    """Alive, but not ready to run workers yet."""
    READY = "ready"
    """Runs no worker and has ports reserved; a spare while a world runs without it."""
    RUNNING = "running"
    """Has been ordered to run workers of the current round."""
    STOPPING = "stopping"
    """Has been ordered to stop its workers, or will be when it attaches."""
    DONE = "done"
    """All its workers of the current round have exited with status 0."""
    PREPARING = "preparing"
    """Starts workers ahead of the next world, which waits for it only if it is needed."""
    LOADING = "loading"
    """Was ready, and reads the state from the checkpoint directory."""
    LEAVING = "leaving"
    """Leaves on purpose; not counted any more."""


NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.FORMING: frozenset({Phase.RUNNING, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.FORMING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""Allowed transitions between phases. ``tests/sim/test_transitions.py`` checks this table and the next one."""

_S = NodeStatus
NEXT_STATUSES: dict[NodeStatus, frozenset[NodeStatus]] = {
    # RUNNING, STOPPING: a node attaches that this Master did not know, or that was cut off.
    _S.WARMING: frozenset({_S.READY, _S.PREPARING, _S.RUNNING, _S.STOPPING, _S.LEAVING}),
    # WARMING: its fork server was lost. STOPPING: it was asked to report again.
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
    """A reason why the job ends with ``ExitCode.INCOMPLETE`` even if all workers succeed."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Away:
    """A node that was lost or has left. It returns as another incarnation."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Record:
    """The state that the next Master needs. Written to the store, guarded by the fencing token, before any message is
    sent."""

    phase: Phase = Phase.FORMING
    round: Round = Round(0)
    """Number of the last world that was formed; never decreases."""
    world: World | None = None
    """The last world that was formed: running, or being replaced."""
    reason: str = "waiting for the first nodes"
    """The reason for the phase."""
    switch: Switch | None = None
    """The order with which the last world is being left at a step boundary; None: it runs, or is interrupted. The
    next Master sends it again to nodes that may have missed it."""
    restarts: int = 0
    """Incidents charged to the restart budget; one more than the budget means that the job is about to fail."""
    charged: bool = False
    """Whether the current incident was charged; the charge is undone if a node of the world turns out to be dead."""
    done: tuple[NodeId, ...] = ()
    """Nodes of the running world whose workers have all exited with status 0."""
    saving: tuple[NodeId, ...] = ()
    """Those of ``done`` that are still writing saves: the job ends when they have written them, and the world is
    repeated if one is lost."""
    failures: tuple[Failure, ...] = ()
    """Failures of the last incident, in order of arrival."""
    rejoins: bool = False
    """Whether workers of this job can recover in process, as they have reported; then new nodes start theirs ahead."""
    era: int = 0
    """Era of the last world; never decreases."""
    newest: Version = NO_STATE
    """The commit from which the last world began. If the next one begins from an older commit, this one was lost."""
    saved: Version = NO_STATE
    """The newest commit that was reported to be complete in the checkpoint directory. Nodes that run workers do not
    report it again."""
    kill: str = ""
    """The requester of the end of the job; empty: none. The job ends as soon as its workers have stopped."""
    settings: Settings = NO_SETTINGS
    """Current batch and LR of the last world; ``world.settings`` is what it began with."""
    policy: HyperPolicy | None = None
    """The policy after manual changes; None: it was never changed."""
    settings_request: str = ""
    """Requester and content of a manual change, until it takes effect."""
    first_workers: int = 0
    """Number of workers of the first world, for which the script's LR was chosen unless configured otherwise."""
    flaws: tuple[Flaw, ...] = ()
    """Flaws reported by services (``edl.master.service.ReportFlaw``), and a lost last checkpoint."""
    outcome: Finish | None = None
    """The outcome of the job; None until it has ended."""
    sizing: Sizing = NO_SIZING
    """The requested size."""
    observed: int = 0
    """The generation of ``sizing`` to which the world conforms, as far as the available nodes allow."""
    seen: tuple[SeenRequest, ...] = ()
    """Answered requests with an idempotency key, oldest first."""
    departing: tuple[Departing, ...] = ()
    """Nodes that have to leave, until they are gone."""
    owed: str = ""
    """Why the world must write a checkpoint as soon as it trains, until one is agreed on: a node left without time to
    write one, or somebody asked for one."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms in the history that have not been cleared."""
    learnt: Learnt = NOTHING_LEARNT
    """The autoscale policy's knowledge about sizes."""
    strikes: tuple[Strike, ...] = ()
    """Strikes of slots, the latest last."""
    dropped: tuple[Dropped, ...] = ()
    """Dropped slots of all nodes."""
    judged: bool = False
    """Whether the last world's end has been taken into account for strikes."""
    health: HealthRecord = NO_HEALTH
    """Verdicts of health checks, and nodes that must be checked."""
    away: tuple[Away, ...] = ()
    """Nodes that were lost or have left, and have not returned; the latest last."""


TO_NOBODY = Incarnation(0)
"""Instead of the launcher to which a node sends copies of its commits: to none."""


class StreamOrders(NamedTuple):
    """What a node has been ordered on its current stream. Any of it may have been lost with an earlier stream, so it is
    decided again on the next one."""

    depart: bool = False
    """To leave."""
    idle: bool = False
    """To end waiting workers."""
    write: Version = NO_STATE
    """To write this commit while the job is suspended."""
    load: bool = False
    """To load the state, since it last was in a world."""
    prestart: bool = False
    """To start its workers ahead, or it has reported that it does so already."""
    copies: Incarnation | None = None
    """To send copies of its commits to this launcher, or ``TO_NOBODY``; None: no order."""


NO_ORDERS = StreamOrders()


class NodeEntry(NamedTuple):
    """One node, as the Master knows it. A ``NamedTuple``, because a new world copies each entry about three times, and
    that takes a tenth of what it takes to copy a dataclass with so many fields."""

    info: NodeInfo
    joined: int
    """Its place in the order in which this Master first saw the nodes."""
    status: NodeStatus
    registered: bool = False
    """Whether its key is in the store, so that its lease lives. Otherwise it is not in any world."""
    attached: bool = False
    """Whether its stream to this Master is open."""
    seen_round: Round = Round(0)
    """The last round for which it has received a start order."""
    ports: tuple[int, ...] = ()
    """Reserved ports, for the next world."""
    due_s: float = float("inf")
    """Time until which others wait for this node before a world forms without it."""
    report_due_s: float = 0.0
    """Time until which the first report of a spare is waited for that this Master knows only by its lease: it may hold
    the only copies. 0: it has reported, or came later."""
    parked: bool = False
    """Whether its workers have been started and wait for their world."""
    restarted: bool = False
    """Whether its workers are new processes, started ahead of their world."""
    holdings: tuple[Holding, ...] = ()
    """Commits and copies in its memory."""
    stored: Version = NO_STATE
    """The newest checkpoint that it knows of in the checkpoint directory."""
    stored_sharded: bool = False
    """Whether that checkpoint is sharded."""
    refused: str = ""
    """Why it cannot use any checkpoint in the checkpoint directory; empty: it can, or there is none."""
    underway: bool = False
    """Whether all its workers of the current round train and can be held at a step boundary."""
    finished: bool = False
    """Whether all its workers of the last world have ended with status 0."""
    how: str = ""
    """How its workers entered the current round, for the status."""
    draining: bool = False
    """Whether it is about to leave, and trains until the others have a world without it."""
    copy_holder: NodeId = NodeId("")
    """The node that was last chosen for copies of its commits, which is chosen again if possible."""
    orders: StreamOrders = NO_ORDERS
    hurried: bool = False
    """Whether it leaves without time for a checkpoint, which the others write then."""
    not_kept: str = ""
    """Why its workers' commits are not kept in memory, as it last reported; empty: they are."""
    not_logged: str = ""
    """Why its workers' output is not written to files, as it last reported; empty: it is."""
    alarms: tuple[Alarm, ...] | None = None
    """The alarms of its own watchdogs, as it last reported; None: it has not reported yet, or has no watchdogs."""
    step_s: float = 0.0
    """Its last reported step time in seconds; 0: none."""
    commit: int = 0
    """The newest commit in that report."""
    paced_round: Round = Round(0)
    """The round of that report; 0: none."""
    holders: int = 0
    """The smallest number of nodes that hold a recent commit of its workers in memory, by that report; 0: unknown."""
    ranks: tuple[RankPace, ...] = ()
    """The last windows of its workers in that round, by local rank."""
    uses: tuple[int, ...] = ()
    """The slots in which it will start its next workers, as it last reported; empty: the first ones."""
    lifeless: Hanging | None = None
    """Its last report that none of its workers shows a sign of life; None: there is none."""
    lifeless_s: float = 0.0
    """Time of that report."""
    hang_limit: HangLimit | None = None
    """The limit that it has learnt for hangs, as it last reported; None: it has reported none."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """An attempt to agree on a step boundary with all members of the running world."""

    number: int
    purpose: Purpose
    reason: str
    until_s: float
    """Time at which the attempt fails."""
    answers: Mapping[NodeId, int] = field(default_factory=dict)
    """The commits that the members have answered with."""


@dataclass(frozen=True, slots=True)
class FailedWrites:
    """The failed attempts of a suspended job to write the commit that it stopped with."""

    version: Version = NO_STATE
    count: int = 0
    """Number of attempts that have failed."""
    due_s: float = 0.0
    """Time of the next attempt; 0: it is under way."""
    nodes: tuple[NodeId, ...] = ()
    """Nodes that have failed, the latest last."""


@dataclass(frozen=True, slots=True)
class MasterState:
    """Everything that the Master's decisions depend on."""

    spec: JobSpec
    record: Record
    nodes: Mapping[NodeId, NodeEntry] = field(default_factory=dict)
    dead: frozenset[Incarnation] = frozenset()
    """Incarnations that this Master knows to be dead; they are expelled if they attach."""
    arrivals: int = 0
    """Number of nodes that this Master has seen so far."""
    began_s: float = 0.0
    """Time at which this Master took over."""
    away_s: Mapping[NodeId, float] = field(default_factory=dict)
    """Times at which the nodes of ``record.away`` were lost or dismissed, as far as this Master knows."""
    forming_since_s: float = 0.0
    """Time at which the current change of the world began."""
    grace_until_s: float | None = None
    """End of the wait for further nodes, once enough are ready; None: not waiting."""
    ended_at_s: float | None = None
    """Time at which the job ended; None: it has not."""
    agreement: Agreement | None = None
    agreements: int = 0
    """Number of agreements so far."""
    planned: bool = False
    """Whether the last change of the world was planned, and nothing has interrupted it."""
    formed_at_s: float = 0.0
    """Time at which the last world was formed, or this Master took it over."""
    trained_s: float = 0.0
    """Seconds that the last world ran."""
    quick: int = 0
    """Number of worlds in a row whose workers failed as soon as they ran; see ``forming.pause_s``."""
    held: tuple[Failure, ...] = ()
    """Failures in the running world whose cause is not known yet; see ``edl.master.incidents``."""
    held_until_s: float = 0.0
    """Time until which the cause of ``held`` is waited for."""
    dropped_s: Mapping[tuple[NodeId, int], float] = field(default_factory=dict)
    """Times at which the cool-downs of automatically dropped slots began, as far as this Master knows."""
    denylist: tuple[DenylistEntry, ...] = ()
    """The entries of the denylist that count, as far as this Master knows."""
    settings_failed: bool = False
    """Whether no step boundary could be agreed on for new settings; it is not tried again in this world."""
    resizing: bool = False
    """Whether another size has been requested since the world last conformed."""
    cooling_until_s: float = 0.0
    """Time until which a change of the size waits (``--scale-cooldown``)."""
    unwritten: tuple[Version, str] = (NO_STATE, "")
    """The newest checkpoint that could not be written, and why; empty once it or a later one is written."""
    failed_writes: FailedWrites = FailedWrites()
    """Attempts to write the newest commit while the job is suspended."""
    saving: bool = False
    """Whether the checkpoint that nodes wait for before they leave is under way: this Master has agreed on it, and no
    member has reconnected since."""
    save_s: float = 0.0
    """Seconds that writing the last checkpoint took; 0: none has been written."""
    scaling: AutoscaleMemory = NO_MEMORY
    """The autoscale policy's current measurement."""
    straggling: StragglerMemory = NO_WINDOWS
    """What has been measured of the ranks in this round."""
    health: HealthMemory = NO_CHECKS
    """The health check in progress, and times of verdicts."""
    reason: str = ""
    """The reason of the last step, shown by ``edl status``."""
