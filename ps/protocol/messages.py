"""What the Master's placement machine, the pservers and the trainers say to each other about who holds what.

JSON texts of frozen dataclasses. ``Orders`` is the whole of what a pserver has to know, each time: the newest version
wins, and one that has been lost does no harm. What pservers and trainers say is said again after a change of the
Master. Numbers of pservers and trainers are never used twice in a job: a process that takes another's place gets a new
one, so a number is an incarnation.
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

NOBODY = 0
"""In place of a pserver's number. Real numbers begin at 1."""
RESTORE = -1
"""In place of a giver's number: the bucket comes from a checkpoint."""


def pack(numbers: Sequence[int], code: str = "h") -> str:
    """One number a bucket (-1 .. 32767; with ``code="i"`` up to 2**31), as text."""
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
    """Buckets as half-open ranges, in order."""
    ranges: list[list[int]] = []
    for bucket in sorted(buckets):
        if ranges and ranges[-1][1] == bucket:
            ranges[-1][1] = bucket + 1
        else:
            ranges.append([bucket, bucket + 1])
    return tuple((begin, end) for begin, end in ranges)


def of_ranges(ranges: Iterable[tuple[int, int]], buckets: int = BUCKETS) -> list[int]:
    """The inverse of ``to_ranges``; what lies outside ``0 .. buckets`` is left out."""
    return [bucket for begin, end in ranges for bucket in range(max(begin, 0), min(end, buckets))]


@dataclass(frozen=True, slots=True)
class PserverAddress:
    """A pserver and where it is reached."""

    number: int
    name: str
    host: str
    port: int
    path: str = ""
    """Unix socket (abstract name) for those on the same host."""
    machine: str = ""
    """Which host it is on, to know whether ``path`` is of use (boot id and network namespace)."""


@dataclass(frozen=True, slots=True)
class PlacementMap:
    """Who holds each bucket. One owner a bucket a version."""

    version: int = 0
    history: int = 1
    """Raised when the parameters were rolled back to a checkpoint: trainers of an earlier history begin anew."""
    servers: tuple[PserverAddress, ...] = ()
    """Those that live. Who is not in this list is dead, for everybody."""
    owner: str = ""
    """``pack``ed. ``NOBODY``: the bucket waits to be restored, or the job for its first pservers."""
    backup: str = ""
    """Its copy, always in step: one that loses step becomes ``joining``. ``NOBODY``: there is none."""
    joining: str = ""
    """Who is being given a copy: the next owner or the next backup."""


@dataclass(frozen=True, slots=True)
class TrainerMember:
    """A trainer of the membership epoch."""

    number: int
    name: str
    """``node/slot``."""
    step: int = 0
    """The step it began with."""


@dataclass(frozen=True, slots=True)
class LrHold:
    """From this step on, the LR of every table (or of one) is the optimizer's times ``factor``."""

    step: int
    factor: float
    table: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointOrder:
    """A checkpoint under way, or one to begin from."""

    number: int
    phase: str
    """``find``: answer with ``FoundCheckpoints`` (sent to one pserver, before any bucket has an owner). ``mark``: note
    all rows as they are now, without delay. ``write``: write those of the buckets owned at the mark. ``complete``:
    write the manifest (sent to one pserver). ``restore``: load the buckets that the placement gives this pserver."""
    run: str = ""
    """``restore``: the checkpoint's folder, relative to the checkpoint directory. ``write``: the newest complete
    checkpoint of this history that these pservers wrote, to write only what has changed since; empty: write all."""
    extra: str = ""
    """``complete``: what the manifest has to say about trainers: step, positions and values, as JSON."""
    parts: tuple[str, ...] = ()
    """``complete``: what each pserver has told (``CheckpointPhaseDone.report``) about what it has written."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Master to pserver: everything that holds now."""

    token: int
    """The Master's fencing token: orders with a smaller one are refused."""
    you: int
    """The number of the pserver that this is said to."""
    placement: PlacementMap
    epoch: int
    """Of the membership."""
    members: tuple[TrainerMember, ...]
    training: Training
    tables: tuple[TableSpec, ...]
    lr: tuple[LrHold, ...] = ()
    """By rising step; of the holds that apply to a table the last one with ``step`` at or below a push's counts."""
    checkpoint: CheckpointOrder | None = None
    revoked: tuple[int, ...] = ()
    """Trainers that are gone but may still have a push under way: refuse them."""
    drain: bool = False
    """The pserver leaves: others take its buckets."""
    go: bool = False
    """It has none any more, and may end."""
    since: str = ""
    """``pack``ed with ``code="i"``: the version in which anything about the bucket was last changed. What a pserver
    says about a bucket counts only if it was said under that version or a later one."""
    giver: str = ""
    """``pack``ed: whose release the owner has to wait for before it serves the bucket; ``NOBODY``: nobody's;
    ``RESTORE``: it has to load it from the checkpoint in ``checkpoint``."""


@dataclass(frozen=True, slots=True)
class OrdersChanged:
    """Master to pserver: orders, as they differ from those of version ``base``. None: as they were."""

    token: int
    you: int
    base: int
    version: int
    epoch: int
    came: tuple[TrainerMember, ...] = ()
    went: tuple[int, ...] = ()
    placement: PlacementMap | None = None
    """If more of it than its version is different."""
    training: Training | None = None
    tables: tuple[TableSpec, ...] | None = None
    lr: tuple[LrHold, ...] | None = None
    revoked: tuple[int, ...] | None = None
    since: str | None = None
    giver: str | None = None
    checkpoint: CheckpointOrder | None = None
    """This one and what follows are as in ``Orders``, also if they are as they were."""
    drain: bool = False
    go: bool = False


# --- pserver to Master -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PserverHello:
    """First word on a line, and again on each new one."""

    name: str
    history: int
    version: int
    """Of the newest orders that it has followed; 0: none, it is empty."""
    holds: str
    """``pack``ed: per bucket 0 nothing, 1 as owner, 2 as copy in step, 3 as copy not in step."""
    most_bytes: int
    """Memory that its rows may take."""
    number: int = 0
    """The number that it goes by; 0: it has had no orders yet."""


@dataclass(frozen=True, slots=True)
class Followed:
    """Orders of this version are carried out as far as it is up to this pserver alone."""

    version: int


@dataclass(frozen=True, slots=True)
class GetOrders:
    """A change of orders went on from others than these: all that holds is needed."""

    version: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The owner says: ``follower`` has all of these buckets, and every push waits for it from now on."""

    version: int
    follower: int
    buckets: tuple[tuple[int, int], ...]
    """Half-open ranges."""


@dataclass(frozen=True, slots=True)
class Unsynced:
    """The owner says: the line to ``follower`` broke. Until orders take it out of step or away, no push is
    acknowledged that it should have. Of a giver: the new owner may not have got everything, nor the release."""

    version: int
    follower: int
    buckets: tuple[tuple[int, int], ...]
    """Half-open ranges."""


@dataclass(frozen=True, slots=True)
class Took:
    """The owner says: these buckets have been released to it, or loaded, and it serves them."""

    version: int
    buckets: tuple[tuple[int, int], ...]
    """Half-open ranges."""


@dataclass(frozen=True, slots=True)
class TrainerLost:
    """A trainer's connection broke without a farewell."""

    trainer: int


@dataclass(frozen=True, slots=True)
class CheckpointPhaseDone:
    """A phase of a checkpoint is done here, or cannot be (``failed``)."""

    number: int
    phase: str
    failed: str = ""
    report: str = ""
    """JSON: what was written or restored (files, rows, bytes, seconds)."""
    lasting: bool = False
    """The cause is the pserver, not the checkpoint: neither a retry nor another checkpoint would help."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint that looks usable: its rows have not been read yet."""

    run: str
    """Its folder, below the checkpoint directory."""
    number: int
    step: int
    tables: tuple[TableSpec, ...] = ()
    extra: str = ""
    """What its manifest says about trainers, as ``CheckpointOrder.extra`` of the phase ``complete`` gave it."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoints:
    """The answer to ``CheckpointOrder(phase="find")``: what lies in the checkpoint directory."""

    top: int
    """The highest number that any checkpoint there has, complete or not: new ones get higher ones."""
    checkpoints: tuple[FoundCheckpoint, ...] = ()
    """Newest first, at most 3: when one cannot be restored, the next is tried."""
    refused: tuple[str, ...] = ()
    """Why others cannot be used, a line each. With ``checkpoints`` empty: the job must not begin anew by itself."""


@dataclass(frozen=True, slots=True)
class PserverLoad:
    """Now and then: what this pserver does. All counts since its start, except ``rows`` and ``bytes``."""

    rows: int
    bytes: int
    most_bytes: int
    pulls: int
    pushes: int
    keys: int
    top_step: int
    """The highest step that a push has had."""
    lag_s: float
    """How far copies are behind, at most."""
    hot: tuple[tuple[int, int], ...] = ()
    """(bucket, keys served since the last word) of those with the most, at most 16."""
    damaged: int = 0
    """Gradients skipped or clipped because of NaN or an infinity."""
    text: str = ""
    """What a person should know: memory nearly full, for example."""


# --- trainer to Master, over the worker server ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A trainer begins, or asks again. ``nonce``: drawn once by each process; the same nonce gets the same number."""

    nonce: str
    tables: tuple[TableSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Begin:
    """The trainer counts in the membership from now on (sync: others wait for its pushes)."""

    number: int


@dataclass(frozen=True, slots=True)
class LeaveMembership:
    """It has no more to do: nobody waits for it."""

    number: int


@dataclass(frozen=True, slots=True)
class GetPlacement:
    """Whatever is newer than ``version``."""

    version: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A pserver cannot be reached: have a look."""

    server: int
    why: str


@dataclass(frozen=True, slots=True)
class SetLr:
    """From ``step`` on (0: as soon as everybody can)."""

    number: int
    hold: LrHold


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint, please. Answered with ``CheckpointSaved`` or ``RequestRefused`` of the same ``ask``."""

    ask: int


@dataclass(frozen=True, slots=True)
class AtCheckpoint:
    """The trainer has come to a boundary: all it has pushed is acknowledged, its data positions are told."""

    checkpoint: int
    step: int
    value: str = ""
    """What the script wants back after a restore, as JSON."""


@dataclass(frozen=True, slots=True)
class DataNamed:
    """The trainer that received ``NameData`` has named the data positions. ``ledgers``: the positions by data set, for
    the manifest."""

    checkpoint: int
    ledgers: tuple[tuple[str, str], ...]


# --- Master to trainer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to ``Join``, as soon as every bucket has an owner."""

    number: int
    token: int
    placement: PlacementMap
    epoch: int
    members: tuple[TrainerMember, ...]
    training: Training
    tables: tuple[TableSpec, ...]
    step: int
    """Where to begin: the step of those that train, or of the restored checkpoint."""
    restored: str = ""
    """The checkpoint that the parameters come from, and what it says of trainers, as JSON; empty: none."""
    secret: str = field(default="", repr=False)
    """What pservers want to be shown."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The answer to ``Join`` comes later; for people, what is waited for."""

    text: str


@dataclass(frozen=True, slots=True)
class PlacementUpdate:
    """All of the placement and the membership: whoever says this has been asked."""

    token: int
    placement: PlacementMap
    epoch: int
    """-1: nothing is said of the membership."""
    members: tuple[TrainerMember, ...]


@dataclass(frozen=True, slots=True)
class PlacementChanged:
    """The placement has changed."""

    token: int
    placement: PlacementMap


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """The membership has changed. Who knows another one than that of epoch ``since`` asks for it (``GetPlacement``)."""

    token: int
    since: int
    epoch: int
    came: tuple[TrainerMember, ...]
    went: tuple[int, ...]
    """Numbers."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop at the next boundary for this checkpoint, and say ``AtCheckpoint``."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class NameData:
    """To one trainer: all have stopped; name the data positions ``checkpoint-<number>`` and say ``DataNamed``."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The checkpoint is marked, or given up: train on."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The checkpoint that was asked for is complete. ``run``: its folder."""

    ask: int
    checkpoint: int
    run: str


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """``kind``: ``table`` (differs), ``stale`` (number or history is gone: begin anew), ``save``, ``word``."""

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
