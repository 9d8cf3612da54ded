"""What agents, the Master and the command line say to each other: frozen dataclasses, no behaviour beyond look-ups.

``codec.py`` turns each into the protobuf message of the same name in ``edl.proto`` and back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.scale_requests import DrainMode


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Names one commit of a job's state; a larger one continues a smaller one. ``Version()`` means "no state".

    The commit number alone would not do: a world that goes back to commit 9 makes another commit 10.
    """

    era: int = 0
    """Counts the worlds in the whole life of a state, across restarts of the job, so it is not the round."""
    commit: int = 0
    """Calls of ``commit()`` since the state's first beginning."""


NO_STATE = Version()


@dataclass(frozen=True, slots=True)
class Holding:
    """One part of a commit that a node has in its memory and can give to others."""

    version: Version
    shard: int = 0
    shards: int = 1
    """Parts that make the whole: 1 when every worker has the same state, the world's size when each has its own."""


@dataclass(frozen=True, slots=True)
class Source:
    """A node that gives one part of the state to those of a world that lack it."""

    node: NodeId
    host: str
    port: int
    shard: int = 0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Who a node is. Also the value of its leased key in the store."""

    node: NodeId
    incarnation: Incarnation
    host: str
    """Name or address at which other nodes reach this one."""
    port: int
    """Where its agent listens; a refused connection there proves that the agent is gone."""
    slots: int
    """Workers it runs, at least 1."""
    node_rank: int = -1
    """Position asked for with ``--node-rank``, -1 for none."""
    state_port: int = 0
    """The port on which it sends and receives copies of commits."""
    rack: str = ""
    """Where it stands, in the user's words: copies of its state go to another rack if there is one."""
    index: int = -1
    """Number that its scheduler gave it and by which it takes nodes away, the highest first; -1 for none."""
    members: int = 0
    """Members of the embedded store, if its launcher runs one of them; 0: it runs none."""
    spare_slots: int = 0
    """Further slots that are idle until one takes the place of a dropped one; all are numbered from 0, these last."""
    devices: tuple[str, ...] = ()
    """What is in each slot, by UUIDs where they can be read (several: with commas); empty where nothing is known."""
    role: str = ""
    """torchrun's name for what its workers do (``ROLE_NAME``); empty: default."""


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a world."""

    node: NodeId
    incarnation: Incarnation
    host: str
    slots: int
    first_rank: Rank
    """Its workers have ranks ``first_rank .. first_rank + slots - 1``."""
    ports: tuple[int, ...]
    """Ports reserved on the node for this round: the master port, then one for each worker."""
    places: tuple[int, ...] = ()
    """Slots that its workers are in, ascending: local rank ``i`` is in ``places[i]``. Empty: ``0 .. slots - 1``."""
    role: str = ""
    """As in ``NodeInfo``."""

    @property
    def used(self) -> tuple[int, ...]:
        """``places``, also where nothing is said of them."""
        return self.places or tuple(range(self.slots))


@dataclass(frozen=True, slots=True)
class Settings:
    """Batch and learning rate that the Master prescribes, the same for all workers of a world from one commit on.

    What each worker makes of them is arithmetic (``edl.arithmetic.hyper``): its own batch, its micro-batches, the
    weights of its gradients, the LR factor of each step.
    """

    number: int = 0
    """Counts changes over the whole life of the job; 0: nothing is prescribed."""
    global_batch: int = 0
    """Samples of one step over all workers; 0: whatever the workers' own batches add up to."""
    local_batch: int = 0
    """Most samples that a worker takes at once (a micro-batch); 0: the script's own batch size."""
    logical_ranks: int = 0
    """Fixed number of logical ranks that live on the workers; 0: there are none."""
    lr: str = "none"
    """Rule by which the LR follows the size: ``none``, ``linear``, ``sqrt``, ``adascale``, ``user``."""
    reference: int = 0
    """Size that the script's own LR is meant for: samples of a step if the global batch is prescribed, else workers."""
    size: int = 0
    """The same measure of the world that these settings are for."""
    scale: float = 1.0
    """Set by hand: multiplies the LR beside the rule."""
    factor: float = 1.0
    """What the LR is multiplied by once the ramp is over (``scale`` included), as far as the Master can know it."""
    ramp_from: float = 1.0
    """What it was multiplied by when these settings came to hold."""
    ramp_begin: int = 0
    """Commit from which they hold."""
    ramp_steps: int = 0
    """Commits over which the factor goes from the one to the other; 0: at once."""


NO_SETTINGS = Settings()


@dataclass(frozen=True, slots=True)
class World:
    """The ordered members of one round; what every worker's environment is made from."""

    round: Round
    members: tuple[Member, ...]
    restarts: int
    """Restart budget used so far in the job."""
    era: int = 0
    """Era of the commits that this world makes."""
    restore: Version = NO_STATE
    """Commit that every worker begins from, the same for all; ``Version()`` for a state's first beginning."""
    shards: int = 1
    """Parts of that commit; see ``Holding``."""
    stored: bool = False
    """The commit is read by the workers themselves from the checkpoint directory: a sharded one, at another size."""
    sources: tuple[Source, ...] = ()
    """Who has parts of that commit; possibly nodes outside this world."""
    settings: Settings = NO_SETTINGS

    @property
    def size(self) -> int:
        """Number of workers."""
        return sum(member.slots for member in self.members)

    @property
    def master_host(self) -> str:
        """Where the worker of rank 0 serves the framework's store."""
        return self.members[0].host

    @property
    def master_port(self) -> int:
        """Port of the framework's store; fresh in each round."""
        return self.members[0].ports[0]

    def member(self, node: NodeId) -> Member | None:
        """The entry of a node, or None when it is not in this world."""
        index = _positions(self.members).get(node)
        return None if index is None else self.members[index]

    def position(self, node: NodeId) -> int:
        """Index of a node, which is its group rank. Raises ``KeyError`` when it is not in this world."""
        return _positions(self.members)[node]


_KNOWN = 8
_known: dict[int, tuple[tuple[Member, ...], dict[NodeId, int]]] = {}
"""Of the last few worlds that were asked about, by the identity of their members. The Master asks for every node of a
world at every event, so looking through all of them would make its work grow with the square of their number."""


def _positions(members: tuple[Member, ...]) -> dict[NodeId, int]:
    found = _known.get(id(members))
    if found is None or found[0] is not members:
        while len(_known) >= _KNOWN:
            _known.pop(next(iter(_known)), None)  # another thread may have been faster
        positions = {member.node: index for index, member in reversed(tuple(enumerate(members)))}
        found = _known[id(members)] = (members, positions)
    return found[1]


@dataclass(frozen=True, slots=True)
class Failure:
    """How one worker ended that should not have."""

    node: NodeId
    round: Round
    rank: Rank
    local_rank: int
    exit_code: int
    """Exit status, or minus the signal number."""
    what: str
    """In words: ``killed by SIGKILL``, ``exit status 3``, ``frozen by SIGSTOP for 3 s``."""
    exception: str = ""
    """Last line of the Python traceback, when there is one."""
    traceback: str = ""
    tail: str = ""
    """Last lines the worker wrote to stderr."""
    peer_loss: bool = False
    """It looks like the consequence of another worker's end (connection to a peer lost), not a cause."""
    slot: int = -1
    """Slot of the node that it was in; -1: the one with the number of its local rank."""
    host: str = ""
    """Name of the host, as it calls itself."""
    pid: int = 0
    time_s: float = 0.0
    """When its end was seen, in seconds since 1970 by that host's clock: to be shown, not to be compared."""
    error_file: str = ""
    """Path of the file on that host that describes the exception; empty: it has left none."""
    final: int = 0
    """Exit status with which the job ends at once, because no restart mends this; 0: restarts may."""


# --- agent to Master -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """First message on a stream: who this is and what it knows, so that a new Master need not ask."""

    info: NodeInfo
    seen_round: Round
    """Highest round this incarnation was told to start; 0 for none."""
    running_round: Round
    """Round whose workers are alive (or have all ended with status 0) here; 0 for none."""
    done: bool
    """All workers of ``running_round`` ended with status 0."""
    underway: bool = False
    """See ``Underway``; of ``running_round``."""
    uses: tuple[int, ...] = ()
    """Slots that it would fill for the next world, as it was told last; empty: the first ones."""
    saving: bool = False
    """See ``WorkersDone``."""
    unsaved: str = ""
    """See ``WorkersDone``."""


@dataclass(frozen=True, slots=True)
class Ready:
    """No worker of a round runs here; this node joins the next round. Sent again at each attaching while idle."""

    seen_round: Round
    ports: tuple[int, ...]
    parked: bool = False
    """Every slot has a worker process that waits for its place in a world; else they are started with the world."""
    holdings: tuple[Holding, ...] = ()
    stored: Version = NO_STATE
    """Newest commit that this node knows to lie complete in the checkpoint directory."""
    stored_sharded: bool = False
    """That one is read by the workers themselves (see ``World.stored``); ``LoadState`` only checks it."""
    refused: str = ""
    """Checkpoints lie there, and none of them can be used: why."""
    stopped_itself: bool = False
    """The workers of the last round were killed here before the Master asked for it, because their launcher was silent:
    what other workers report of lost peers is a consequence."""


@dataclass(frozen=True, slots=True)
class Preparing:
    """No worker of a round runs here, and new ones are being started ahead of the next world: ``Ready`` follows."""

    seen_round: Round
    reason: str
    holdings: tuple[Holding, ...] = ()
    stopped_itself: bool = False
    """As in ``Ready``."""


@dataclass(frozen=True, slots=True)
class Underway:
    """All workers of the round here use ``edl.run``, have their state and a communicator, and are in training.

    From now on they can hold at a step boundary, and rejoin without a restart.
    """

    round: Round
    how: str
    """The way back each took, in words: ``in process``, ``restarted: …``."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Answer to ``Hold``: no worker here will pass a step boundary above ``commit + 1`` before it is told to."""

    round: Round
    hold: int
    commit: int
    """Highest commit number that a worker here has passed."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A commit has been written to the checkpoint directory, or could not be."""

    version: Version
    where: str
    error: str = ""
    took_s: float = 0.0
    """How long the writing took."""


class Purpose(enum.Enum):
    """What is done at an agreed step boundary."""

    SWITCH = "switch"
    """Commit, park, join the next world."""
    SAVE = "save"
    """Commit, have it written to the checkpoint directory, go on."""
    KILL = "kill"
    """Commit and park; it is written, and the job ends."""
    SET = "set"
    """Commit, and go on under other settings."""
    DATA = "data"
    """Not at a boundary: the service that leases data is asked for something (``edl data add``)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody asks for a checkpoint, for the end of the job with one, or for other settings (see ``Purpose``)."""

    purpose: Purpose
    by: str
    """Who, in words: a file, a command line."""
    wish: str = ""
    """With ``SET``: which settings, as ``name=value``, separated by blanks; with ``DATA``: what, as JSON."""


@dataclass(frozen=True, slots=True)
class Hanging:
    """Workers here have made no progress for ``--hang-timeout``."""

    round: Round
    what: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker ended badly without having been told to. The node's other workers may still run."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class WorkersDone:
    """All workers of the round on this node ended with status 0."""

    round: Round
    saving: bool = False
    """The node still writes what they saved. It is said again, without this, when that is over."""
    unsaved: str = ""
    """Why the newest commit that they saved is not in the checkpoint directory; empty if it is, or if none was."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """This node goes away on purpose; its workers are being stopped, or with ``grace_s`` soon will be."""

    reason: str
    grace_s: float = 0.0
    """More than 0: the workers go on for at most so long, until the others have switched to a world without them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How quickly the workers of this node go, said now and then while they commit."""

    round: Round
    commit: int
    """Newest commit."""
    step_s: float
    """Seconds a commit, averaged since the last time; more than 0."""


@dataclass(frozen=True, slots=True)
class NotKept:
    """Commits of this node's workers find no memory, so a fault goes back to the last checkpoint."""

    why: str
    """Empty: there is memory again."""


@dataclass(frozen=True, slots=True)
class NotLogged:
    """What this node's workers write is not kept in files, so that the disk has room for what matters more."""

    why: str
    """Empty: it is again."""


@dataclass(frozen=True, slots=True)
class ServiceSaid:
    """A worker here says something to one of the services that the Master hosts, such as the one for data."""

    service: str
    slot: int
    """Slot of the worker; with the node it names the process, also where its rank changes."""
    round: Round
    """World that the worker believes to be in; 0 for none."""
    body: str
    """The service's own business."""


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
    | ServiceSaid
)


# --- Master to agent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StopRound:
    """Stop the workers of this round (and any older one), then say ``Ready``. Workers that can rejoin keep their
    process: they abort the communicator and park."""

    round: Round
    reason: str
    dump: bool = False
    """Have all workers write their stacks first."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Let no worker of the round pass its next step boundary, and say with ``Boundary`` where they are."""

    round: Round
    hold: int
    """Number of this agreement; ``Switch`` and ``Boundary`` repeat it."""
    binding: bool = False
    """All workers are to do it or none: who has answered goes on only when told what was agreed on, also if the Master
    is lost meanwhile. The next one tells it with a ``Switch`` of hold 0 to ``SET`` what holds already."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Let the workers go on to exactly this commit, and do there what is asked; commit 0: nothing comes of it, let them
    go on as if nothing had been asked."""

    round: Round
    hold: int
    commit: int
    purpose: Purpose
    reason: str
    settings: Settings = NO_SETTINGS
    """With ``SET``: those that hold from there on."""


@dataclass(frozen=True, slots=True)
class Prestart:
    """Start workers now and let them come to ``edl.run``: the next world is to find them waiting. ``Ready`` follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class LoadState:
    """Read the newest usable commit of the checkpoint directory into memory, or check its bytes if it is sharded, and
    say ``Ready`` again."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeepWith:
    """From now on send a copy of each commit of this node to that node; an empty ``node`` means to none."""

    node: NodeId
    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The others go on in a world of their own and have all they need: this node, which wanted to leave, may go."""

    reason: str
    needed: bool = False
    """It may go, and yet there is no world without it: the job waits for another node."""
    save: bool = True
    """It has the time to bring the newest commit where it survives; else the others do that."""


@dataclass(frozen=True, slots=True)
class Depart:
    """Leave the job in good order, as on SIGTERM, and end with the exit status of a node that was drained."""

    reason: str
    deadline_s: float
    """Seconds from now until which this node has to be gone; 0: as long as ``--shutdown-timeout``."""
    care: DrainMode = DrainMode.TRY


@dataclass(frozen=True, slots=True)
class Idle:
    """End the workers that wait here for their world: there is none for a while. The commits in memory stay."""

    reason: str
    save: Version = NO_STATE
    """Write what is here of this commit, if there is a checkpoint directory; none: write nothing."""


@dataclass(frozen=True, slots=True)
class UseSlots:
    """From the next world on run workers in these slots, ascending; what waits in others ends."""

    slots: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start this node's workers of this world, or hand it to those that wait."""

    world: World
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over; stop whatever runs and exit with this status."""

    exit_code: int
    reason: str
    failures: tuple[Failure, ...] = ()
    """Root cause first; empty on success."""


@dataclass(frozen=True, slots=True)
class Expelled:
    """This incarnation is not part of the job any more; stop the workers.

    With ``exit_code`` 0 the agent may come back under a new lease; any other value ends the launcher.
    """

    reason: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class ServiceTold:
    """A service's word to a worker of this node; nothing comes of it when the worker is gone."""

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
    | Finish
    | Expelled
    | ServiceTold
)
