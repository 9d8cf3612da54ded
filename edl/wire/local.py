"""What an agent and its workers say to each other, once a script uses ``edl.torch`` or ``edl.paddle``.

The agent listens on the abstract ``AF_UNIX`` ``SOCK_SEQPACKET`` address named by ``EDL_AGENT``. One connection a
worker; the agent knows whose it is by the peer's session, because every worker leads its own. Large things travel as
descriptors of memory files: a ``Place`` with its JSON text, buffers and pieces of state.

A worker's life: ``Enter``; then, as often as worlds come and go, ``Place`` … ``Underway`` … ``Break`` or a boundary
… ``Parked``. State: ``Want`` → ``Buffer`` (once for each size), copy into it, ``Committed`` → the next ``Buffer``;
``Fetch`` → ``Piece``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edl.wire.json_messages import TaggedUnion
from edl.wire.messages import NO_SETTINGS, Settings

AGENT_VARIABLE = "EDL_AGENT"
"""Environment variable that holds the address without the leading NUL."""

# --- worker to agent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enter:
    """First message: this worker uses edl."""

    framework: str
    rejoins: bool
    """It can come back in process; else it is restarted, and the connection serves only state and boundaries."""
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Parked:
    """It is in no world and waits for a ``Place``. ``round``: the world it has left, 0 for none."""

    round: int


@dataclass(frozen=True, slots=True)
class Underway:
    """It has its state and a communicator, and enters training."""

    round: int


@dataclass(frozen=True, slots=True)
class Here:
    """Answer to ``Hold``: it will not pass a boundary above ``commit + 1`` before it hears more."""

    hold: int
    commit: int


@dataclass(frozen=True, slots=True)
class Want:
    """It needs a buffer of at least so many bytes for a stream."""

    stream: str
    size: int


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
    """It is to reach the checkpoint directory."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """It needs a piece of the commit that its world begins from. ``stream`` "own": its slot's own values, if any."""

    stream: str
    era: int
    commit: int
    shard: int


@dataclass(frozen=True, slots=True)
class WroteThrough:
    """Said by the worker that writes for all: it found no memory for a commit, and has written it into the checkpoint
    directory itself. The agent compares the checksum and adds the marker that makes it count."""

    era: int
    commit: int
    size: int = 0
    crc32: int = 0
    error: str = ""
    """Why it is not there."""


@dataclass(frozen=True, slots=True)
class Call:
    """It says something to a service of the Master, such as the one for data. A body too long for a datagram comes as a
    memory file instead, and ``body`` is empty. What is said while no Master is in reach is lost; see ``Reattached``."""

    service: str
    round: int
    body: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It is about to fail, and no restart mends that: the job is to end with this status."""

    exit_code: int


# --- agent to worker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a world. Comes with a memory file holding ``Seat`` as JSON."""

    round: int


@dataclass(frozen=True, slots=True)
class Break:
    """The round is over: abort what hangs on other workers, and park."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Answer with ``Here``, and wait at the next boundary for ``Target`` or ``Release``."""

    round: int
    hold: int


@dataclass(frozen=True, slots=True)
class Target:
    """Go on to the boundary of this commit and do there what is asked."""

    hold: int
    commit: int
    purpose: str
    reason: str
    settings: Settings = NO_SETTINGS
    """With ``set``: those that hold from there on. They hold even if another ``Hold`` comes before."""


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing comes of it: go on as if nothing had been asked."""

    hold: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """Where the next snapshot of a stream goes. Comes with its descriptor when the buffer is new or has grown."""

    stream: str
    buffer: int
    size: int


@dataclass(frozen=True, slots=True)
class NoBuffer:
    """There is no memory for it: this state is not kept in memory, only saved when asked."""

    stream: str
    why: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A snapshot asked for by ``Fetch``. Comes with its descriptor, to be read only."""

    stream: str
    size: int


@dataclass(frozen=True, slots=True)
class NoPiece:
    """It could not be had. An own piece that is missing is no error."""

    stream: str
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End in good order: a parked worker exits, another one parks at its next boundary."""

    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """A service's word. A long body comes as a memory file, and ``body`` is empty."""

    service: str
    body: str


@dataclass(frozen=True, slots=True)
class Reattached:
    """The agent has a stream to a Master, with this token: what was said to a service before may be lost."""

    token: int


ToAgent = Enter | Parked | Underway | Here | Want | Committed | Fetch | WroteThrough | Call | GiveUp
ToWorker = Place | Break | Hold | Target | Release | Buffer | NoBuffer | Piece | NoPiece | Stop | Told | Reattached

_TO_AGENT: TaggedUnion[ToAgent] = TaggedUnion(
    *(Enter, Parked, Underway, Here, Want, Committed, Fetch, WroteThrough, Call, GiveUp),
    tag="kind",
    what="what a worker says to its launcher",
)
_TO_WORKER: TaggedUnion[ToWorker] = TaggedUnion(
    *(Place, Break, Hold, Target, Release, Buffer, NoBuffer, Piece, NoPiece, Stop, Told, Reattached),
    tag="kind",
    what="what a launcher says to its worker",
)

STATE, OWN = "state", "own"
"""Streams: what the whole world shares (or the worker's shard of it), and what only this slot has, such as the state
of random number generators."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's place in a world, as its memory file says it."""

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
    """0: begin from nothing."""
    shards: int
    stored: bool
    checkpoint_dir: str
    token: str
    """Secret of this round's workers, to know one another by."""
    settings: Settings = NO_SETTINGS
    slot: int = -1
    """Slot of the node; unlike the local rank it never changes for a process. -1: nobody has said."""
    environment: dict[str, str] = field(default_factory=dict)
    """Complete environment of a worker started into this place."""


def encode_to_agent(message: ToAgent) -> bytes:
    """One datagram."""
    return _TO_AGENT.encode(message)


def decode_to_agent(datagram: bytes) -> ToAgent:
    """The inverse. Raises ``ProtocolError``."""
    return _TO_AGENT.decode(datagram)


def encode_to_worker(message: ToWorker) -> bytes:
    """One datagram."""
    return _TO_WORKER.encode(message)


def decode_to_worker(datagram: bytes) -> ToWorker:
    """The inverse. Raises ``ProtocolError``."""
    return _TO_WORKER.decode(datagram)
