"""Messages between agents, the Master and the command line: frozen dataclasses with no logic but look-ups. ``codec.py``
converts each to and from the protobuf message of the same name in ``edl.proto``."""

from __future__ import annotations

from dataclasses import dataclass

from edl.types import NodeId, Round
from edl.wire.alarm import Alarm
from edl.wire.health import CheckHealth, HealthChecked
from edl.wire.purpose import Purpose
from edl.wire.rank_pace import RankPace
from edl.wire.records import NO_SETTINGS, NO_STATE, Failure, Holding, NodeInfo, Settings, Version, World
from edl.wire.scale_requests import DrainMode

NOT_THE_MASTER = "this launcher is not the Master"
"""What a launcher answers to a call for the Master before it takes office and after it steps down."""


@dataclass(frozen=True, slots=True)
class Attach:
    """First message on a stream: identifies the node and reports its state, so that a new Master need not ask."""

    info: NodeInfo
    seen_round: Round
    """Highest round that this incarnation was asked to start; 0: none."""
    running_round: Round
    """Round whose workers are alive here, or have all ended with status 0; 0: none."""
    done: bool
    """All workers of ``running_round`` ended with status 0."""
    underway: bool = False
    """All workers of ``running_round`` are in training; see ``Underway``."""
    uses: tuple[int, ...] = ()
    """Slots that it would use for the next world, from the last ``UseSlots``; empty: the first ones."""
    saving: bool = False
    """Saves are still being written; see ``WorkersDone``."""
    unsaved: str = ""
    """Why the newest save is not written; see ``WorkersDone``."""
    unbroken: bool = False
    """Nothing has interrupted the workers of a round: they train, or go on to an agreed step boundary."""
    in_doubt: bool = False
    """They wait for a ``Switch`` after a binding ``Hold``."""


@dataclass(frozen=True, slots=True)
class Ready:
    """No worker of a round runs here; this node can join the next round. Sent again at each attach while idle."""

    seen_round: Round
    ports: tuple[int, ...]
    parked: bool = False
    """Every slot has a worker process that waits for a place in a world; else workers are started with the world."""
    holdings: tuple[Holding, ...] = ()
    stored: Version = NO_STATE
    """Newest commit that this node knows to be complete in the checkpoint directory."""
    stored_sharded: bool = False
    """The workers read that commit themselves (see ``World.stored``); ``LoadState`` only verifies it."""
    refused: str = ""
    """Why none of the existing checkpoints can be used; empty otherwise."""
    stopped_itself: bool = False
    """The workers of the last round were killed here before the Master asked for it, because their launcher was silent:
    lost peers that other workers report are a consequence."""
    commit_age_s: float = 0.0
    """Seconds since the newest commit of ``holdings`` was made by workers of this node; 0: they made none in the last
    world."""


@dataclass(frozen=True, slots=True)
class Preparing:
    """No worker of a round runs here; new ones are being started ahead of the next world. ``Ready`` follows."""

    seen_round: Round
    reason: str
    holdings: tuple[Holding, ...] = ()
    stopped_itself: bool = False
    """Its workers were killed before the Master asked; see ``Ready``."""
    commit_age_s: float = 0.0
    """See ``Ready``."""


@dataclass(frozen=True, slots=True)
class Underway:
    """All workers of the round on this node use ``edl.run``, have state and communicator, and train. From now on they
    can hold at a step boundary and rejoin without a restart."""

    round: Round
    how: str
    """How each worker recovered: ``in process``, ``restarted: …``."""
    connect_s: float = 0.0
    """Seconds that forming the communicator took, of the slowest worker."""
    restore_s: float = 0.0
    """Seconds that restoring the state took, of the slowest worker."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Answer to ``Hold``: no worker here passes a step boundary above ``commit + 1`` until a ``Switch`` allows it."""

    round: Round
    hold: int
    commit: int
    """Highest commit that a worker on this node has passed."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A commit was written to the checkpoint directory, or the write failed."""

    version: Version
    where: str
    error: str = ""
    took_s: float = 0.0
    """Duration of the write in seconds."""
    sharded: bool = False
    """What was written is one part per worker; a world of any size can read it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a checkpoint, for the end of the job with one, or for other settings (see ``Purpose``)."""

    purpose: Purpose
    by: str
    """Source of the request, for display: a file, a command line."""
    argument: str = ""
    """With ``SET``: the settings, as ``name=value`` separated by spaces; with ``DATA``: the request as JSON."""


@dataclass(frozen=True, slots=True)
class Hanging:
    """Workers on this node have made no progress for ``--hang-timeout``. Repeated until the round ends."""

    round: Round
    what: str
    for_s: float = 0.0
    """Seconds without progress."""
    learnt: bool = False
    """The limit is learnt, and no worker of this node shows a sign of life: the round is to be restarted if the same
    is true of all other nodes of the world."""
    workers: tuple[Failure, ...] = ()
    """The workers that hang, with their stacks."""


@dataclass(frozen=True, slots=True)
class HangLimit:
    """The limit that this node has learnt for the detection of hangs. Sent when it changes, and at each attach."""

    limit_s: float
    """Seconds; 0: not known yet."""
    pauses: int
    """Number of pauses between signs of progress that it is learnt from."""
    needed: int = 0
    """Number of pauses from which a limit is learnt."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed without being stopped. The node's other workers may still run."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkersDone:
    """All workers of the round on this node ended with status 0."""

    round: Round
    saving: bool = False
    """The node still writes their saves. The message is sent again without this flag once they are written."""
    unsaved: str = ""
    """Why their newest save is not in the checkpoint directory; empty if it is, or if there was no save."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """This node leaves the job on purpose; its workers are being stopped, or soon will be with ``grace_s``."""

    reason: str
    grace_s: float = 0.0
    """If positive: the workers train on for at most this long, until the others have switched."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed of this node's workers, sent from time to time while they commit."""

    round: Round
    commit: int
    """Number of the newest commit."""
    step_s: float
    """Seconds per commit, averaged since the last message; positive."""
    age_s: float = 0.0
    """Seconds since the newest commit."""
    commit_share: float = 0.0
    """Share of the time since the last message that the workers waited for commits; 0 to 1."""
    data_share: float = 0.0
    """The same for data, as far as edl or a ``DataLoader`` of torch loads it."""
    ranks: tuple[RankPace, ...] = ()
    """By local rank: the workers that have completed a window since the last message."""
    holders: int = 0
    """The smallest number of nodes that hold a recent commit of this node's in memory, this node included; 0: not
    known."""


@dataclass(frozen=True, slots=True)
class NotKept:
    """There is no memory for the commits of this node's workers, so a failure rolls back to the last checkpoint."""

    why: str
    """Empty: memory is available again."""


@dataclass(frozen=True, slots=True)
class NotLogged:
    """The output of this node's workers is not written to files, to keep disk space for what matters more."""

    why: str
    """Empty: output is written again."""


@dataclass(frozen=True, slots=True)
class Alarms:
    """All alarms of this node's own watchdogs at this moment. Sent when they change, and at each attach."""

    alarms: tuple[Alarm, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceFromWorker:
    """A worker's message to a service hosted by the Master, such as the data service."""

    service: str
    slot: int
    """Slot of the worker; together with the node it identifies the process even when its rank changes."""
    round: Round
    """Round that the worker believes it is in; 0: none."""
    body: str
    """Opaque to the Master; interpreted by the service."""


AgentMessage = (
    Attach
    | Ready
    | Preparing
    | Underway
    | Boundary
    | Kept
    | Asked
    | Hanging
    | WorkerFailed
    | WorkersDone
    | Leaving
    | Pace
    | NotKept
    | NotLogged
    | Alarms
    | HangLimit
    | HealthChecked
    | ServiceFromWorker
)


# --- Master to agent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopRound:
    """Stop the workers of this round (and any older one), then say ``Ready``. Workers that can rejoin keep their
    process: they abort the communicator and park."""

    round: Round
    reason: str
    dump: bool = False
    """Dump the stacks of all workers first."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Let no worker of the round pass its next step boundary, and report their position with ``Boundary``."""

    round: Round
    hold: int
    """Number of this hold; ``Switch`` and ``Boundary`` repeat it."""
    binding: bool = False
    """All workers act, or none: those that have answered continue only after a ``Switch``, even if the Master is lost
    meanwhile. The next Master then repeats the ``Switch`` that is in the record, or sends one of hold 0 that ``SET``s
    the current settings and lets them train on."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Let the workers train up to exactly this commit and carry out the purpose there. Commit 0: the hold is cancelled;
    let them continue."""

    round: Round
    hold: int
    commit: int
    purpose: Purpose
    reason: str
    settings: Settings = NO_SETTINGS
    """With ``SET``: the settings from there on."""


@dataclass(frozen=True, slots=True)
class Prestart:
    """Start workers now and let them wait in ``edl.run`` for the next world. ``Ready`` follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class LoadState:
    """Read the newest usable commit of the checkpoint directory into memory, or verify its bytes if it is sharded, and
    send ``Ready`` again."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeepWith:
    """From now on send a copy of each of this node's commits to ``node``; empty: to no node."""

    node: NodeId
    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Dismissed:
    """This leaving node may go: the others continue in a world without it and have all that they need."""

    reason: str
    needed: bool = False
    """The node may go, but no world is possible without it: the job waits for another node."""
    save: bool = True
    """It has time to save the newest commit where it survives; else the others do that."""


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave the job gracefully, as on SIGTERM, and exit with the status of a drained node."""

    reason: str
    deadline_s: float
    """Seconds until this node must be gone; 0: ``--shutdown-timeout`` applies."""
    mode: DrainMode = DrainMode.TRY


@dataclass(frozen=True, slots=True)
class Idle:
    """End the workers that wait here for a world: there will be none for a while. Commits in memory stay."""

    reason: str
    save: Version = NO_STATE
    """Write this node's parts of this commit if there is a checkpoint directory; ``NO_STATE``: write nothing."""


@dataclass(frozen=True, slots=True)
class UseSlots:
    """From the next world on, run workers in these slots, ascending; workers that wait in other slots end."""

    slots: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start this node's workers of this world, or hand the world to workers that wait."""

    world: World
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: stop all workers and exit with this status."""

    exit_code: int
    reason: str
    failures: tuple[Failure, ...] = ()
    """Root cause first; empty on success."""


@dataclass(frozen=True, slots=True)
class Expelled:
    """This incarnation is no longer part of the job: stop the workers.

    With ``exit_code`` 0 the agent may register again under a new lease; any other value ends the launcher.
    """

    reason: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class ServiceToWorker:
    """A service's message to a worker of this node; dropped if the worker is gone."""

    service: str
    slot: int
    body: str


MasterMessage = (
    StopRound
    | StartRound
    | Hold
    | Switch
    | Prestart
    | LoadState
    | KeepWith
    | Dismissed
    | Depart
    | Idle
    | UseSlots
    | CheckHealth
    | Finish
    | Expelled
    | ServiceToWorker
)
