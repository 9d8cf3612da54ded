"""What workers and the leases' machine say to each other: frozen dataclasses and their JSON text.

A client is one worker and one data set. It sends one request, waits for the answer that repeats its ``id``, and sends
the next one with a higher ``id``. A request that stays without an answer may be sent again *with the same id*: the
machine does it once and answers it again. An answer with another id than the one waited for is dropped. Ids rise over
the client's whole life, also across rounds; a process that takes the place of another one within a round may begin
anywhere, and is told with ``Refused(kind="old")`` above which number to go on (``Refused.last``).

A round, mode "steps": rank 0 sends ``Register``, every rank sends ``Open``, then ``Lease`` as often as it needs more.
After ``Reattached`` (another Master, or a new stream to the same one) a client says again what may be lost, each with
a new id and in this order: rank 0 its ``Register``; everybody ``Open`` with all that it has been granted in this round
and epoch; then the request that was without an answer, if any, with everything in it. That is always allowed, and
changes nothing where nothing was lost. A shard that the machine has granted and that is missing in ``Open`` goes back
to the pending ones: that answer has not arrived, and must be dropped if it still does.

Independent mode: ``Open`` as well, then ``Lease`` and ``Ack``. Answers have ``number`` and ``kept``: an ``Ack`` (or the
``finished`` and ``failed`` of a ``Lease``) whose answer has a ``number`` above the last ``kept`` heard is not in the
store yet. The client remembers those, and says them again in ``Open.acks`` of the next ``Open``, with the ``fence`` of
the ``Opened`` that they were leased under; an ``Ack`` without an answer goes there too, and is not sent again itself.
Said twice they count once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

from data_service.manifest import ShardRef
from data_service.protocol.fields import Name, Natural, Number, Ranges, Whole
from data_service.protocol.file_list_messages import AddFiles, Grow, Grown, Listed, ListFiles
from edl.errors import ProtocolError
from edl.wire import json_messages
from edl.wire.json_messages import TaggedUnion

STEPS = "steps"
"""Mode in which the consumed records are part of the model's state, and a round's ledger comes from there."""
INDEPENDENT = "free"
"""Independent mode, for trainers that do not step together: the Master's ledger is the truth."""
MORE, DRY, FINISHED = "more", "dry", "finished"
"""States of an epoch as an answer to ``Lease`` tells them."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a data set is handed out. The same for all who use it."""

    seed: Whole = 0
    """Of the order of the shards, and of the records within one."""
    shuffle: bool = True
    mode: Annotated[str, Meta(pattern=rf"^({STEPS}|{INDEPENDENT})\Z")] = STEPS
    """``steps`` or ``free``."""
    failures: Annotated[int, Meta(ge=1, lt=1 << 62)] = 3
    """Failed attempts to read a shard after which it is quarantined; at least 1."""


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """Rank 0, or anybody in independent mode: these are the shards. The same again changes nothing."""

    id: Natural
    dataset: Name
    manifest: bytes
    """``Manifest.encode()``; base64 in the text."""
    options: Options = Options()


@dataclass(frozen=True, slots=True)
class Open:
    """This worker takes part from here on in this round. Answered with ``Opened`` once the data set is registered.

    ``Lease`` is answered only when rank 0 has opened, and after a change of the Master when all ranks have.
    """

    id: Natural
    dataset: Name
    rank: Natural
    epoch: Natural = 0
    ledger: str = ""
    """Rank 0 in mode "steps": ``Ledger.encode()`` of what is consumed, announced included; "": nothing of ``epoch``."""
    digest: str = ""
    """Of the manifest that the client believes to use; "" when it knows none."""
    granted: Ranges = ()
    """Mode "steps": every shard granted to this rank in this round and ``epoch``, but not those of ``returned``; empty
    at a round's begin. All of them: rank 0 may have told another Master its position before the others' last messages
    were answered. Independent mode: what it has in hand."""
    finished: Ranges = ()
    """Those of ``granted`` that it has said to be finished, or would have."""
    returned: tuple[tuple[Natural, Natural], ...] = ()
    """Shards that it has given back as failed in this round and epoch, with the count of records consumed."""
    acks: tuple[tuple[Natural, Natural, bool], ...] = ()
    """Independent mode: see ``Ack.shards``; those that may not be in the store yet, and for each of ``granted`` that is
    begun the count of its records acknowledged so far."""
    fence: Natural = 0
    """Independent mode: of the last ``Opened``. ``granted`` and ``acks`` from before a rollback do not count."""
    trainer: Natural = 0
    """Independent mode: the number of this worker's process in the parameter servers; 0: it has none."""


@dataclass(frozen=True, slots=True)
class Lease:
    """More shards, please; and what became of earlier ones."""

    id: Natural
    dataset: Name
    epoch: Natural
    want: Natural
    """At most so many; 0 only reports."""
    finished: tuple[tuple[Natural, Natural], ...] = ()
    """Shards of this epoch with the number of all their records: reading is over, and in mode "steps" all their records
    have been announced to all ranks."""
    failed: tuple[tuple[Natural, Natural, str], ...] = ()
    """Shards that cannot be read on, the count of their records that are consumed all the same (in mode "steps":
    announced; report the failure only then), and why."""
    unreached: Ranges = ()
    """Those of ``failed`` whose files could not be reached: they are never left out."""


@dataclass(frozen=True, slots=True)
class NextEpoch:
    """Rank 0, or anybody in independent mode: the epoch before this one is over."""

    id: Natural
    dataset: Name
    epoch: Natural
    """The one that begins."""
    dropped: Natural = 0
    """Records left over on purpose (rule "drop"); without it the epoch before must be finished."""


@dataclass(frozen=True, slots=True)
class Ack:
    """Independent mode: these records are consumed."""

    id: Natural
    dataset: Name
    epoch: Natural
    shards: tuple[tuple[Natural, Natural, bool], ...]
    """Shard, count of its records consumed so far (not since the last ``Ack``), whether that is all of it."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Independent mode: name the present position. In the store when answered; ``Done.ledger`` is the position."""

    id: Natural
    dataset: Name
    name: Name


@dataclass(frozen=True, slots=True)
class Rollback:
    """Independent mode: back to a named position. All leases are void; everybody has to open again."""

    id: Natural
    dataset: Name
    name: Name
    ledger: str = ""
    """The position itself, ``Ledger.encode()``, for a Master that has never heard the name."""
    history: Natural = 0
    """Of the parameters that go with it: for each history this is done once, whoever asks first, and never for one
    before the last. 0: always."""


@dataclass(frozen=True, slots=True)
class Gone:
    """This worker takes no more part: what it has in hand goes to others at once (independent mode)."""

    id: Natural
    dataset: Name


@dataclass(frozen=True, slots=True)
class Pace:
    """For ``edl status``, and a sign of life; no answer comes, and ``id`` is not looked at."""

    id: Natural
    dataset: Name
    records_per_s: Number
    """Records that this worker hands out."""
    waited: Number = 0.0
    """Share of the time in which training waited for data, 0 to 1."""


Request = Register | Open | Lease | NextEpoch | Ack | Commit | Rollback | Gone | ListFiles | Grow | Pace

# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """The data set is known."""

    id: Natural
    dataset: Name
    digest: str
    shards: Natural
    records: Whole
    """-1 when it is not known before they are read."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The worker takes part."""

    id: Natural
    dataset: Name
    digest: str
    format: str
    shards: Natural
    records: Whole
    options: Options
    epoch: Natural
    """The present one; in mode "steps" the one of the worker's own ``Open`` until rank 0's ledger is there."""
    quarantined: Ranges = ()
    refused: tuple[tuple[Natural, str], ...] = ()
    """Independent mode: of ``granted`` and ``acks``, those that do not count: shard, and why."""
    fence: Natural = 0
    number: Natural = 0
    kept: Natural = 0


@dataclass(frozen=True, slots=True)
class Given:
    """One leased shard."""

    shard: ShardRef
    upto: int
    """Records of it, in its own order, that are consumed already: reading goes on behind them."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to ``Lease``."""

    id: Natural
    dataset: Name
    epoch: Natural
    leases: tuple[Given, ...]
    state: str
    """``more``: ask again when you need more. ``dry``: nothing now, but others hold shards that may come back.
    ``finished``: every shard of the epoch is done or quarantined."""
    refused: tuple[tuple[Natural, str], ...] = ()
    """Of ``finished`` and ``failed``, those that do not count: shard, and why."""
    number: Natural = 0
    kept: Natural = 0
    ended: tuple[Natural, ...] = ()
    """Independent mode: trainers (``Open.trainer``) that were lost with shards in hand in this epoch, oldest first."""
    version: Natural = 0
    """Segments of the list of files that ``epoch`` consists of; then its shards, digest and records (-1: unknown)."""
    shards: Natural = 0
    digest: str = ""
    records: Whole = -1


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to ``NextEpoch``, ``Ack``, ``Commit``, ``Rollback`` and ``Gone``."""

    id: Natural
    dataset: Name
    epoch: Natural
    refused: tuple[tuple[Natural, str], ...] = ()
    """Of ``Ack.shards``, those that do not count: shard, and why."""
    number: Natural = 0
    """Independent mode: acknowledgements of all workers so far, this one included."""
    kept: Natural = 0
    """Those of them that are in the store."""
    ledger: str = ""
    """After ``Commit``: the position that has the name now."""


@dataclass(frozen=True, slots=True)
class Refused:
    """It is not done, and sending it again unchanged does not help."""

    id: Natural
    dataset: str
    kind: str
    """``stale`` another round; ``malformed``; ``unknown`` data set, ``rank`` only rank 0 may; ``differs`` from what is
    registered; ``ledger`` does not fit; ``unopened``: send ``Open`` first (also after a rollback); ``old`` id;
    ``epoch``; ``unfinished``; ``mode``; ``commit`` of no such name."""
    text: str
    last: Natural = 0
    """With ``old``: highest id heard from this client."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Told to each worker that opens data, and when it changes: remote readers (``remote.flight``)."""

    readers: tuple[tuple[str, str, Natural, str], ...]
    """Name, host, port and secret of each."""
    authority: str = field(default="", repr=False)
    """In a job with a secret: by what readers and workers make certificates for one another, and for nothing else."""


Answer = Registered | Opened | Granted | Done | Listed | Grown | Refused
DataMessage = Request | Answer | Readers | AddFiles

# --- text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PackedLeases:
    """The leases of a ``Granted``, beside its other fields: many shards lie in one file, whose path is there once."""

    rows: list[tuple[int, int, int, int, int, int]]
    """Shard, records consumed, index of its file, begin, end, records (see ``Manifest.rows``)."""
    files: list[str]
    sizes: list[int]
    """Bytes of each file."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What a refusal of any request repeats."""

    id: Natural = 0
    dataset: str = ""


_UNION: TaggedUnion[DataMessage] = TaggedUnion(
    *(Register, Open, Lease, NextEpoch, Ack, Commit, Rollback, Gone, ListFiles, Grow, Pace),
    *(Registered, Opened, Granted, Done, Listed, Grown, Refused),
    *(Readers, AddFiles),
    tag="word",
    what="a message about data",
    advice="All launchers and workers of a job must run the same version of edl",
    name=lambda kind: kind.__name__.lower(),
)
_RANGES: dict[type[Any], tuple[str, ...]] = {
    Open: ("granted", "finished"),
    Lease: ("unreached",),
    Opened: ("quarantined",),
}
"""Fields of type ``Ranges``."""


def encode(message: DataMessage) -> str:
    """Encode a message as JSON."""
    if isinstance(message, Granted):
        return encode_granted(message, *_pack(message.leases))
    return _UNION.encode(message).decode()


def encode_granted(granted: Granted, rows: list[list[int]], files: list[str], sizes: list[int]) -> str:
    """The text of a ``Granted`` whose leases are given as ``Manifest.rows`` makes them: without an object for each."""
    text = _UNION.encode(replace(granted, leases=()))
    leases = json_messages.encode({"rows": rows, "files": files, "sizes": sizes})
    return f"{text[:-1].decode()},{leases[1:].decode()}"


def decode(text: str) -> DataMessage:
    """Decode a message from JSON. Raises ``ProtocolError`` naming what is wrong with it."""
    message = _UNION.decode(text)
    for name in _RANGES.get(type(message), ()):
        _check_ranges(name, getattr(message, name))
    return replace(message, leases=_unpack(text)) if isinstance(message, Granted) else message


def salvage(text: str) -> tuple[int, str]:
    """Id and data set of a message that ``decode`` refused, as far as it has any; the refusal repeats them."""
    try:
        head = json_messages.decode(_Head, text)
    except ProtocolError:
        return 0, ""
    return head.id, json_messages.short(head.dataset)


def ranges(shards: Iterable[int]) -> Ranges:
    """Shard numbers, in any order, as ranges."""
    found: list[tuple[int, int]] = []
    for shard in sorted(shards):
        if found and shard <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], shard + 1))
        else:
            found.append((shard, shard + 1))
    return tuple(found)


def shards_of(given: Ranges) -> list[int]:
    """The shard numbers of ranges."""
    return [shard for begin, end in given for shard in range(begin, end)]


def _pack(leases: tuple[Given, ...]) -> tuple[list[list[int]], list[str], list[int]]:
    """Rows of numbers, the paths that they point into, since many shards lie in one file, and the sizes of those."""
    files: dict[str, int] = {}
    sizes: list[int] = []
    rows = []
    for given in leases:
        ref = given.shard
        file = files.setdefault(ref.file, len(files))
        if file == len(sizes):
            sizes.append(ref.size_bytes)
        rows.append([ref.index, given.upto, file, ref.begin, ref.end, ref.records])
    return rows, list(files), sizes


def _unpack(text: str) -> tuple[Given, ...]:
    packed = json_messages.decode(_PackedLeases, text, what="a granted message")
    files, sizes = packed.files, packed.sizes
    try:
        return tuple(
            Given(ShardRef(index, files[file], begin, end, records, sizes[file]), upto)
            for index, upto, file, begin, end, records in packed.rows
        )
    except IndexError:
        raise ProtocolError(f"a granted message names more than its {min(len(files), len(sizes))} files") from None


def _check_ranges(name: str, given: Ranges) -> None:
    last = 0
    for begin, end in given:
        if not last <= begin < end:
            raise ProtocolError(f"{name}: ranges must rise and not overlap, unlike {begin}-{end}")
        last = end
