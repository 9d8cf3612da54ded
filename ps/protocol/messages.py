"""The messages between the Master's placement machine, the pservers and the trainers.

Frozen dataclasses, sent as JSON. ``Orders`` always contains everything that a pserver must know: the newest version
wins, and losing one does no harm. Pservers and trainers repeat their messages to a new Master. The numbers of pservers
and trainers are never reused in a job: a replacement process gets a new number, so a number is an incarnation.
"""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edl.errors import ProtocolError
from edl.job_records import Training
from edl.wire.json_messages import TaggedUnion
from ps.spec import BUCKETS, TableSpec

NO_PSERVER = 0
"""In place of a pserver's number: there is none. Real numbers begin at 1."""
MOST_NUMBER = 32767
"""The greatest number of a pserver: placement maps have 16 bits for it."""
RESTORE = -1
"""In place of a giver's number: the bucket comes from a checkpoint."""


def pack(numbers: Sequence[int], code: str = "h") -> str:
    """Encode one number per bucket (-1 .. 32767; with ``code="i"`` below 2**31) as text."""
    return base64.b64encode(zlib.compress(array(code, numbers).tobytes(), 1)).decode("ascii")


def unpack(text: str, buckets: int = BUCKETS, code: str = "h") -> array[int]:
    """The inverse of ``pack``. Raises ``ProtocolError``."""
    found = array(code)
    try:
        found.frombytes(zlib.decompress(base64.b64decode(text, validate=True), bufsize=found.itemsize * buckets))
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"not a list of numbers by bucket: {error}") from None
    if len(found) != buckets:
        raise ProtocolError(f"a list of numbers by bucket has {len(found)} entries instead of {buckets}")
    return found


def to_ranges(buckets: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Convert buckets to ascending half-open ranges."""
    ranges: list[list[int]] = []
    for bucket in sorted(buckets):
        if ranges and ranges[-1][1] == bucket:
            ranges[-1][1] = bucket + 1
        else:
            ranges.append([bucket, bucket + 1])
    return tuple((begin, end) for begin, end in ranges)


def of_ranges(ranges: Iterable[tuple[int, int]], buckets: int = BUCKETS) -> list[int]:
    """The inverse of ``to_ranges``; numbers outside ``0 .. buckets`` are left out."""
    return [bucket for begin, end in ranges for bucket in range(max(begin, 0), min(end, buckets))]


@dataclass(frozen=True, slots=True)
class PserverAddress:
    """A pserver and the addresses at which it is reached."""

    number: int
    name: str
    host: str
    port: int
    path: str = ""
    """Unix socket (abstract name) for processes on the same host."""
    machine: str = ""
    """Identity of its host (boot id and network namespace); ``path`` works only on the same one."""


@dataclass(frozen=True, slots=True)
class PlacementMap:
    """The pservers that hold each bucket. In each version a bucket has one owner."""

    version: int = 0
    history: int = 1
    """Incremented when the parameters are rolled back to a checkpoint; trainers of an earlier history start again."""
    servers: tuple[PserverAddress, ...] = ()
    """The live pservers. A pserver that is not in this list counts as dead."""
    owner: str = ""
    """``pack``ed. ``NO_PSERVER``: the bucket is waiting for a restore, or the job for its first pservers."""
    backup: str = ""
    """The replica, always in sync; one that falls out of sync becomes ``joining``. ``NO_PSERVER``: there is none."""
    joining: str = ""
    """The pserver that is receiving a copy: the next owner or the next backup."""


@dataclass(frozen=True, slots=True)
class TrainerMember:
    """A trainer of the membership epoch."""

    number: int
    name: str
    """``node/slot``."""
    step: int = 0
    """Its step when it became a member."""


@dataclass(frozen=True, slots=True)
class LrHold:
    """From this step on, the LR of every table (or of ``table``) is the optimizer's multiplied by ``factor``."""

    step: int
    factor: float
    table: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointOrder:
    """A phase of the checkpoint in progress, or the checkpoint to restore."""

    number: int
    phase: str
    """``find``: answer with ``FoundCheckpoints`` (sent to one pserver, before any bucket has an owner). ``mark``: note
    all rows as they are now, without delay. ``write``: write those of the buckets owned at the mark. ``complete``:
    write the manifest (sent to one pserver). ``restore``: load the buckets that the placement gives this pserver."""
    run: str = ""
    """``restore``: the checkpoint's folder, relative to the checkpoint directory. ``write``: the newest complete
    checkpoint of this history that these pservers wrote, to write only what has changed since; empty: write all."""
    extra: str = ""
    """``complete``: the trainers' state for the manifest: step, data positions and values, as JSON."""
    parts: tuple[str, ...] = ()
    """``complete``: the pservers' reports about their parts (``CheckpointPhaseDone.report``)."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Master to pserver: the complete current state, as far as pservers need it."""

    token: int
    """The Master's fencing token: orders with a smaller one are refused."""
    you: int
    """The number of the pserver that receives this."""
    placement: PlacementMap
    epoch: int
    """The membership epoch."""
    members: tuple[TrainerMember, ...]
    training: Training
    tables: tuple[TableSpec, ...]
    lr: tuple[LrHold, ...] = ()
    """By ascending step. For a push, the last one that names its table or none, with ``step`` at or below the push's,
    applies."""
    checkpoint: CheckpointOrder | None = None
    revoked: tuple[int, ...] = ()
    """Trainers that are gone but may still have a push in flight, which must be refused."""
    drain: bool = False
    """The pserver is leaving: its buckets move to others."""
    go: bool = False
    """It has no buckets left and may exit."""
    since: str = ""
    """``pack``ed with ``code="i"``: the version in which each bucket was last changed. A pserver's message about a
    bucket counts only if it was sent under that version or a later one."""
    giver: str = ""
    """``pack``ed: the pserver whose release the owner must await before it serves the bucket. ``NO_PSERVER``: no wait;
    ``RESTORE``: it must load the bucket from ``checkpoint``."""


@dataclass(frozen=True, slots=True)
class OrdersChanged:
    """Master to pserver: the differences between orders and those of version ``base``. None: unchanged."""

    token: int
    you: int
    base: int
    version: int
    epoch: int
    came: tuple[TrainerMember, ...] = ()
    went: tuple[int, ...] = ()
    placement: PlacementMap | None = None
    """Set if it differs in more than its version."""
    training: Training | None = None
    tables: tuple[TableSpec, ...] | None = None
    lr: tuple[LrHold, ...] | None = None
    revoked: tuple[int, ...] | None = None
    since: str | None = None
    giver: str | None = None
    checkpoint: CheckpointOrder | None = None
    """This field and those below are as in ``Orders``, even if unchanged."""
    drain: bool = False
    go: bool = False


# --- pserver to Master -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PserverHello:
    """The first message on every connection to the Master."""

    name: str
    history: int
    version: int
    """Version of the newest orders that it has carried out; 0: none, it is empty."""
    holds: str
    """``pack``ed, per bucket: 0 nothing, 1 as owner, 2 as replica in sync, 3 as replica out of sync."""
    most_bytes: int
    """Limit for the memory of its rows, in bytes."""
    number: int = 0
    """Its number; 0: it has not received orders yet."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Orders of this version have been carried out, as far as that depends on this pserver alone."""

    version: int


@dataclass(frozen=True, slots=True)
class GetOrders:
    """``OrdersChanged`` was based on another version than ``version``: send complete orders."""

    version: int


@dataclass(frozen=True, slots=True)
class Synced:
    """From an owner: ``follower`` has all of these buckets, and from now on every push waits for it."""

    version: int
    follower: int
    buckets: tuple[tuple[int, int], ...]
    """Half-open ranges."""


@dataclass(frozen=True, slots=True)
class Unsynced:
    """From an owner: the stream to ``follower`` broke. No push that it should have is acknowledged until orders mark
    it out of sync or remove it. From a giver: the new owner may lack content and the release."""

    version: int
    follower: int
    buckets: tuple[tuple[int, int], ...]
    """Half-open ranges."""


@dataclass(frozen=True, slots=True)
class Took:
    """From an owner: these buckets have been released to it, or loaded, and it serves them."""

    version: int
    buckets: tuple[tuple[int, int], ...]
    """Half-open ranges."""


@dataclass(frozen=True, slots=True)
class TrainerLost:
    """A trainer's connection ended without a farewell."""

    trainer: int


@dataclass(frozen=True, slots=True)
class CheckpointPhaseDone:
    """This pserver has finished a phase of a checkpoint, or failed (``failed`` is the reason)."""

    number: int
    phase: str
    failed: str = ""
    report: str = ""
    """JSON: what was written or restored (files, rows, bytes, seconds)."""
    lasting: bool = False
    """The cause is the pserver, not the checkpoint: neither a retry nor another checkpoint would help."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint that looks usable; its rows have not been read yet."""

    run: str
    """Its folder, relative to the checkpoint directory."""
    number: int
    step: int
    tables: tuple[TableSpec, ...] = ()
    extra: str = ""
    """The trainers' state from its manifest, as in ``CheckpointOrder.extra``."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoints:
    """The answer to ``CheckpointOrder(phase="find")``: the content of the checkpoint directory."""

    top: int
    """The highest number of any checkpoint there, complete or not; new ones get higher numbers."""
    checkpoints: tuple[FoundCheckpoint, ...] = ()
    """Newest first, at most 3; if one cannot be restored, the next one is tried."""
    refused: tuple[str, ...] = ()
    """The reasons why others are unusable, one line each. If ``checkpoints`` is empty, the job must not start from
    scratch."""


@dataclass(frozen=True, slots=True)
class PserverLoad:
    """Periodic statistics of a pserver. Counters run from its start; ``rows`` and ``bytes`` are current values."""

    rows: int
    bytes: int
    most_bytes: int
    pulls: int
    pushes: int
    keys: int
    top_step: int
    """The highest step of any push in this history."""
    lag_s: float
    """The largest lag of a replica, in seconds."""
    hot: tuple[tuple[int, int], ...] = ()
    """(bucket, keys served since the last report) of the busiest buckets, at most 16."""
    damaged: int = 0
    """Gradients skipped or clipped because of NaN or an infinity."""
    text: str = ""
    """A warning for people, for example that memory is nearly full."""
    history: int = 0
    """The history of ``top_step``; 0: the sender's version does not say."""


# --- trainer to Master, over the worker server ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A trainer joins, or repeats its request. ``nonce``: random, drawn once by each process; the same nonce gets the
    same number."""

    nonce: str
    tables: tuple[TableSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Begin:
    """The trainer becomes a member: in mode sync the others wait for its pushes from now on."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaveMembership:
    """The trainer ends its membership: the others no longer wait for it."""

    number: int


@dataclass(frozen=True, slots=True)
class GetPlacement:
    """Request for a placement map newer than ``version``, and for the membership."""

    version: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A trainer cannot reach a pserver; the Master should check it."""

    server: int
    why: str


@dataclass(frozen=True, slots=True)
class SetLr:
    """Request to change the LR from ``hold.step`` on; 0: as soon as possible for all trainers. Answered with ``LrSet``
    or ``RequestRefused`` with the same ``ask``; if that is 0, not answered with ``LrSet``."""

    number: int
    hold: LrHold
    ask: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Request for a checkpoint. Answered with ``CheckpointSaved`` or ``RequestRefused`` with the same ``ask``."""

    ask: int


@dataclass(frozen=True, slots=True)
class AtCheckpoint:
    """The trainer has stopped at a step boundary: its pushes are acknowledged, and its data positions are reported."""

    checkpoint: int
    step: int
    value: str = ""
    """The script's value to return after a restore, as JSON."""


@dataclass(frozen=True, slots=True)
class DataNamed:
    """The trainer that received ``NameData`` has named the data positions. ``ledgers``: the positions by data set, for
    the manifest."""

    checkpoint: int
    ledgers: tuple[tuple[str, str], ...]
    failed: str = ""
    """Why they could not be named; the checkpoint is abandoned."""


# --- Master to trainer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to ``Join``, sent once every bucket has an owner."""

    number: int
    token: int
    placement: PlacementMap
    epoch: int
    members: tuple[TrainerMember, ...]
    training: Training
    tables: tuple[TableSpec, ...]
    step: int
    """The step to start from: that of the running trainers, or of the restored checkpoint."""
    restored: str = ""
    """The checkpoint that the parameters come from, with the trainers' state in it, as JSON; empty: none."""
    secret: str = field(default="", repr=False)
    """The secret with which trainers authenticate to pservers."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The answer to ``Join`` will come later. ``text``: the reason, for people."""

    text: str


@dataclass(frozen=True, slots=True)
class PlacementUpdate:
    """The complete placement and membership, sent on request."""

    token: int
    placement: PlacementMap
    epoch: int
    """The membership epoch; -1: ``members`` is not set."""
    members: tuple[TrainerMember, ...]


@dataclass(frozen=True, slots=True)
class PlacementChanged:
    """A newer placement map, without the membership."""

    token: int
    placement: PlacementMap


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """The membership has changed. A trainer whose membership is not that of epoch ``since`` requests the complete one
    (``GetPlacement``)."""

    token: int
    since: int
    epoch: int
    came: tuple[TrainerMember, ...]
    went: tuple[int, ...]
    """Numbers of the trainers that are no longer members."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Order to stop at the next step boundary for this checkpoint and to answer with ``AtCheckpoint``."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class NameData:
    """To one trainer, once all have stopped: name the data positions ``checkpoint-<number>`` and send ``DataNamed``."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The checkpoint has been marked or abandoned: continue training."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The requested checkpoint is complete. ``run``: its folder."""

    ask: int
    checkpoint: int
    run: str


@dataclass(frozen=True, slots=True)
class LrSet:
    """The requested change of the LR is persisted."""

    ask: int


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request is refused. ``kind``: ``table`` (defined differently), ``stale`` (number or history no longer valid:
    start again), ``save``, or ``word`` (invalid message)."""

    kind: str
    text: str
    ask: int = 0


_UNION: TaggedUnion[Any] = TaggedUnion(
    *(
        Orders,
        OrdersChanged,
        PserverHello,
        Followed,
        GetOrders,
        Synced,
        Unsynced,
        Took,
        TrainerLost,
        CheckpointPhaseDone,
        FoundCheckpoints,
        PserverLoad,
    ),
    *(Join, Begin, LeaveMembership, GetPlacement, Suspect, SetLr, Save, AtCheckpoint, DataNamed),
    *(
        Joined,
        Waits,
        PlacementUpdate,
        PlacementChanged,
        MembersChanged,
        Halt,
        NameData,
        GoOn,
        CheckpointSaved,
        LrSet,
        RequestRefused,
    ),
    tag="word",
    what="a message of the parameter servers",
    advice="Master, pservers and trainers of a job must run the same version of edl",
)


def encode(message: Any) -> str:
    """A message as JSON text."""
    return _UNION.encode(message).decode()


def decode(text: str) -> Any:
    """The inverse of ``encode``. Raises ``ProtocolError`` naming what does not fit."""
    return _UNION.decode(text)
