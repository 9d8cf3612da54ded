"""Messages between an agent and its workers whose script uses ``edl.torch`` or ``edl.paddle``.

The agent listens on the abstract ``AF_UNIX`` ``SOCK_SEQPACKET`` address named by ``EDL_AGENT``. Each worker opens one
connection; the agent identifies the worker by the peer's session, because every worker leads its own. Large data is
passed as descriptors of memory files: the ``Seat`` of a ``Place``, buffers, and parts of the state.

A worker's life: ``Enter``; then, for each world, ``Place`` … ``TrainingStarted`` … ``Break`` or a boundary …
``Parked``. State: ``Want`` → ``Buffer`` (once for each size), copy into it, ``Committed`` → the next ``Buffer``;
``Fetch`` → ``Piece``. In a world of another size, a sharded state: ``FetchHeaders`` → ``Piece``, ``FetchRanges`` →
``Piece``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.wire.json_messages import TaggedUnion
from edl.wire.rank_pace import UNKNOWN
from edl.wire.records import NO_SETTINGS, Settings

AGENT_VARIABLE = "EDL_AGENT"
"""Environment variable that holds the address without the leading NUL."""

# --- worker to agent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enter:
    """First message: this worker uses edl."""

    framework: str
    rejoins: bool
    """The worker can rejoin in process; else it is restarted, and the connection serves only state and boundaries."""
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Parked:
    """The worker is in no world and waits for a ``Place``. ``round``: the world that it left; 0: none."""

    round: int


@dataclass(frozen=True, slots=True)
class TrainingStarted:
    """The worker has its state and a communicator, and starts to train."""

    round: int
    connect_s: float = 0.0
    """Seconds that forming the communicator took."""
    restore_s: float = 0.0
    """Seconds that restoring the state took."""


@dataclass(frozen=True, slots=True)
class Here:
    """Answer to ``HoldAtBoundary``: the worker passes no boundary above ``commit + 1`` before the next message."""

    hold: int
    commit: int


@dataclass(frozen=True, slots=True)
class Want:
    """The worker needs a buffer of at least this many bytes for a stream."""

    stream: str
    size: int
    saves: bool = False
    """Commits of this stream will be written to the checkpoint directory; while one is read, a third buffer is
    needed."""
    waits: bool = False
    """The worker has no place yet: the answer may wait until there is also a buffer for the commit that it will
    restore."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The buffer holds a complete snapshot of ``size`` bytes (``edl.wire.snapshot``)."""

    stream: str
    buffer: int
    size: int
    era: int
    commit: int
    shard: int
    shards: int
    save: bool
    """The commit is to be written to the checkpoint directory."""
    others: tuple[str, ...] = ()
    """Of a sharded state: some other nodes whose workers keep the same part."""
    committing_s: float = 0.0
    """Seconds that training has waited for commits since this process started, this one not included."""
    waiting_s: float = 0.0
    """The same for data of edl's loader."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """The worker needs a part of the commit that its world starts from. ``stream`` "own": the slot's own values."""

    stream: str
    era: int
    commit: int
    shard: int
    round: int = 0
    """The worker's round: the answer names it."""


@dataclass(frozen=True, slots=True)
class FetchHeaders:
    """The worker restores a sharded state of ``shards`` parts, made by a world of another size, and needs the headers
    of all parts (``edl.wire.parts``). ``stream`` names the answer."""

    stream: str
    era: int
    commit: int
    shards: int


@dataclass(frozen=True, slots=True)
class FetchRanges:
    """The worker needs ranges of these parts. Comes with a memory file that lists them (``edl.wire.parts``); the answer
    holds their bytes one after another. ``stream`` names the answer."""

    stream: str
    era: int
    commit: int


@dataclass(frozen=True, slots=True)
class WroteThrough:
    """Sent by the worker that writes for all: without memory for a commit, it wrote the commit to the checkpoint
    directory itself. The agent compares the checksum and adds the manifest that completes it."""

    era: int
    commit: int
    size: int = 0
    crc32: int = 0
    error: str = ""
    """Why it was not written."""


@dataclass(frozen=True, slots=True)
class Call:
    """A message to a service of the Master, such as the data service. A body too long for a datagram comes as a memory
    file, with ``body`` empty. Messages are lost while no Master is reachable; see ``Reattached``."""

    service: str
    round: int
    body: str


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How the worker spent its last window: at least some seconds, and at least one step. See ``RankPace``."""

    round: int
    step_s: float
    """Median seconds from commit to commit."""
    slowest_s: float
    peers_share: float = UNKNOWN
    commit_share: float = 0.0
    data_share: float = 0.0
    idle_share: float = 1.0
    samples: float = 0.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The worker is about to fail, and a restart would not help: end the job with this status."""

    exit_code: int


# --- agent to worker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a world. Comes with a memory file holding ``Seat`` as JSON."""

    round: int


@dataclass(frozen=True, slots=True)
class Break:
    """The round is over: abort pending collectives and park."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class HoldAtBoundary:
    """Answer with ``Here`` and wait at the next boundary for ``Target`` or ``Release``."""

    round: int
    hold: int


@dataclass(frozen=True, slots=True)
class Target:
    """Continue to the boundary of this commit and carry out the action there."""

    hold: int
    commit: int
    purpose: str
    reason: str
    settings: Settings = NO_SETTINGS
    """With ``set``: the settings from there on. They apply even if another ``HoldAtBoundary`` arrives first."""


@dataclass(frozen=True, slots=True)
class Release:
    """The hold is cancelled: continue."""

    hold: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Buffer for the next snapshot of a stream. Its descriptor is attached if the buffer is new or has grown."""

    stream: str
    buffer: int
    size: int


@dataclass(frozen=True, slots=True)
class NoBuffer:
    """No memory for the buffer: this state is not kept in memory, only saved on request."""

    stream: str
    why: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What was requested by ``Fetch``, ``FetchHeaders`` or ``FetchRanges``, with its read-only descriptor attached."""

    stream: str
    size: int
    round: int = 0
    """That of the ``Fetch``, whose transfer may only end in a later round; 0 for other requests, which name their
    answers."""


@dataclass(frozen=True, slots=True)
class NoPiece:
    """The requested part is not available. A missing part of the slot's own stream is no error."""

    stream: str
    why: str
    round: int = 0
    """As in ``Piece``."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End gracefully: a parked worker exits, any other parks at its next boundary."""

    reason: str


@dataclass(frozen=True, slots=True)
class ServiceMessage:
    """A message from a service. A long body comes as a memory file, with ``body`` empty."""

    service: str
    body: str


@dataclass(frozen=True, slots=True)
class Reattached:
    """The agent is attached to a Master with this token: earlier messages to a service may be lost."""

    token: int


ToAgent = (
    Enter
    | Parked
    | TrainingStarted
    | Here
    | Want
    | Committed
    | Fetch
    | FetchHeaders
    | FetchRanges
    | WroteThrough
    | Call
    | StepTimes
    | GiveUp
)
ToWorker = (
    Place
    | Break
    | HoldAtBoundary
    | Target
    | Release
    | Buffer
    | NoBuffer
    | Piece
    | NoPiece
    | Stop
    | ServiceMessage
    | Reattached
)

_TO_AGENT: TaggedUnion[ToAgent] = TaggedUnion(
    *(
        Enter,
        Parked,
        TrainingStarted,
        Here,
        Want,
        Committed,
        Fetch,
        FetchHeaders,
        FetchRanges,
        WroteThrough,
        Call,
        StepTimes,
        GiveUp,
    ),
    tag="kind",
    what="what a worker says to its launcher",
)
_TO_WORKER: TaggedUnion[ToWorker] = TaggedUnion(
    *(
        Place,
        Break,
        HoldAtBoundary,
        Target,
        Release,
        Buffer,
        NoBuffer,
        Piece,
        NoPiece,
        Stop,
        ServiceMessage,
        Reattached,
    ),
    tag="kind",
    what="what a launcher says to its worker",
)

STATE, OWN = "state", "own"
"""Streams: the state shared by the whole world (or the worker's shard of it), and the state of this slot only, such as
random number generators."""


def offered(message: Committed) -> bool:
    """Whether the agent answers a commit with the next buffer. Not for a part of a sharded state: until its worker
    asks for the next buffer the agent keeps one snapshot more, which a lost node may be behind."""
    return message.stream != STATE or message.shards == 1


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's place in a world, as sent in its memory file."""

    round: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: str
    nodes: int
    position: int
    """Index of the node in the world."""
    endpoints: tuple[str, ...]
    """``host:port`` of each rank, in order; the port is reserved for that worker in this round."""
    master: str
    """``host:port`` reserved for rank 0's store."""
    era: int
    restore_era: int
    restore_commit: int
    """0: start without a saved state."""
    shards: int
    stored: bool
    checkpoint_dir: str
    token: str
    """Secret by which this round's workers identify each other."""
    settings: Settings = NO_SETTINGS
    slot: int = -1
    """Slot of the node; unlike the local rank it never changes for a process. -1: unknown."""
    environment: dict[str, str] = field(default_factory=dict)
    """Complete environment of a worker started into this place."""


encode_to_agent = _TO_AGENT.encode
"""Encode a message as one datagram."""
decode_to_agent = _TO_AGENT.decode
"""Decode a datagram. Raises ``ProtocolError``."""


encode_to_worker = _TO_WORKER.encode
"""Encode a message as one datagram."""
decode_to_worker = _TO_WORKER.decode
"""Decode a datagram. Raises ``ProtocolError``."""
