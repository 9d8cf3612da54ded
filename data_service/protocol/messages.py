"""The messages between workers and the Master's lease machine: frozen dataclasses and their JSON encoding.

A client is one worker and one data set. It sends one request, waits for the answer that repeats its ``id``, and sends
the next request with a higher ``id``. An unanswered request may be sent again *with the same id*: the machine executes
it once and repeats its answer. The client drops answers with any other id than the pending one. Ids increase over the
client's whole life, across rounds too. A process that replaces another one within a round may start with any id; if it
is too low, ``DataRefused(kind="old")`` gives the highest id so far (``DataRefused.last``).

A round in mode "steps": rank 0 sends ``RegisterFiles``, every rank sends ``Open``, then ``Lease`` as often as it needs
more shards. After ``Reattached`` (another Master, or a new stream to the same one) a client repeats what may be lost,
each message with a new id and in this order: rank 0 its ``RegisterFiles``; every rank ``Open`` with all shards granted
to it in this round and epoch; then the complete unanswered request, if any. Repeating is always allowed, and has no
effect if nothing was lost. A shard that the machine has granted and that is missing in ``Open`` becomes pending again:
the client has not received that answer, and must drop it if it still arrives.

Independent mode: ``Open`` as well, then ``Lease`` and ``Ack``. Answers have ``number`` and ``kept``: an ``Ack`` (or the
``finished`` and ``failed`` of a ``Lease``) whose answer has a ``number`` above the last ``kept`` received is not in the
store yet. The client remembers these and repeats them in ``Open.acks`` of its next ``Open``, with the ``fence`` of the
``Opened`` under which they were leased. An unanswered ``Ack`` is repeated there too, and not sent again by itself. A
repeated acknowledgement counts once.
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
"""Independent mode, for trainers that do not step together: the Master's ledger is authoritative."""
MORE, DRY, FINISHED = "more", "dry", "finished"
"""States of an epoch in the answer to ``Lease``; see ``LeasesGranted.state``."""


@dataclass(frozen=True, slots=True)
class DataSetOptions:
    """How a data set is distributed; the same for all of its clients."""

    seed: Whole = 0
    """Determines the order of the shards, and of the records within each."""
    shuffle: bool = True
    mode: Annotated[str, Meta(pattern=rf"^({STEPS}|{INDEPENDENT})\Z")] = STEPS
    """``steps`` or ``free``."""
    failures: Annotated[int, Meta(ge=1, lt=1 << 62)] = 3
    """Failed attempts to read a shard after which it is quarantined; at least 1."""


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterFiles:
    """Register the shards of a data set. From rank 0, or from any worker in independent mode. Idempotent."""

    id: Natural
    dataset: Name
    manifest: bytes
    """``Manifest.encode()``; base64 in the text."""
    options: DataSetOptions = DataSetOptions()


@dataclass(frozen=True, slots=True)
class Open:
    """Join this round. Answered with ``Opened`` once the data set is registered.

    ``Lease`` is answered only after rank 0 has opened the data set; after a change of the Master, only after all ranks
    have.
    """

    id: Natural
    dataset: Name
    rank: Natural
    epoch: Natural = 0
    ledger: str = ""
    """From rank 0 in mode "steps": ``Ledger.encode()`` of the consumed records, including announced ones; empty if
    nothing of ``epoch`` is consumed."""
    digest: str = ""
    """Digest of the manifest that the client expects; empty if it has none."""
    granted: Ranges = ()
    """Mode "steps": every shard granted to this rank in this round and ``epoch``, except those in ``returned``; empty
    at the start of a round. Finished ones are included, because rank 0 may have sent its position to another Master
    before the last messages of the other ranks were answered. Independent mode: the shards that the worker holds."""
    finished: Ranges = ()
    """The shards of ``granted`` whose end the client has reported, or was about to report."""
    returned: tuple[tuple[Natural, Natural], ...] = ()
    """Shards that the client has returned as failed in this round and epoch, with the number of consumed records."""
    acks: tuple[tuple[Natural, Natural, bool], ...] = ()
    """Independent mode: acknowledgements that may not be in the store yet (see ``Ack.shards``), and the number of
    acknowledged records of each shard in ``granted`` that is partly consumed."""
    fence: Natural = 0
    """Independent mode: the fence of the last ``Opened``. ``granted`` and ``acks`` from before a rollback do not
    count."""
    trainer: Natural = 0
    """Independent mode: the number of this worker's process in the parameter servers; 0 if it has none."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Request more shards, and report the outcome of earlier ones."""

    id: Natural
    dataset: Name
    epoch: Natural
    want: Natural
    """Most shards to grant; 0: the message is only a report."""
    finished: tuple[tuple[Natural, Natural], ...] = ()
    """Shards of this epoch that have been read completely, with their number of records. In mode "steps" all these
    records have been announced to all ranks."""
    failed: tuple[tuple[Natural, Natural, str], ...] = ()
    """Shards that cannot be read further: the shard, the number of its records that are consumed nevertheless, and the
    reason. In mode "steps", a failure is reported only after these records have been announced."""
    unreached: Ranges = ()
    """The shards of ``failed`` whose files were inaccessible; these are never quarantined."""


@dataclass(frozen=True, slots=True)
class NextEpoch:
    """End the current epoch. From rank 0, or from any worker in independent mode."""

    id: Natural
    dataset: Name
    epoch: Natural
    """The epoch that starts."""
    dropped: Natural = 0
    """Records skipped on purpose (``tail="drop"``). If 0, all shards of the previous epoch must be finished."""


@dataclass(frozen=True, slots=True)
class Ack:
    """Independent mode: acknowledge consumed records."""

    id: Natural
    dataset: Name
    epoch: Natural
    shards: tuple[tuple[Natural, Natural, bool], ...]
    """Shard, number of its records consumed so far (not since the last ``Ack``), whether that is all of it."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Independent mode: store the current position under a name. Answered when it is in the store; ``Done.ledger`` is
    the position."""

    id: Natural
    dataset: Name
    name: Name


@dataclass(frozen=True, slots=True)
class Rollback:
    """Independent mode: return to a named position. Voids all leases; every worker must open the data set again."""

    id: Natural
    dataset: Name
    name: Name
    ledger: str = ""
    """The position itself, ``Ledger.encode()``, for a Master that does not know the name."""
    history: Natural = 0
    """History of the parameters that belong to the position. The rollback is executed once per history, for the first
    request, and never for an older history than the last one. 0: always executed."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The worker has closed the data set. In independent mode its shards become available to others at once."""

    id: Natural
    dataset: Name


@dataclass(frozen=True, slots=True)
class ReadRate:
    """A worker's throughput, for ``edl status``, and a sign of life. Not answered; ``id`` is ignored."""

    id: Natural
    dataset: Name
    records_per_s: Number
    """Records per second that this worker's script receives."""
    waited: Number = 0.0
    """Share of the time in which training waited for data, from 0 to 1."""


Request = RegisterFiles | Open | Lease | NextEpoch | Ack | Commit | Rollback | Gone | ListFiles | Grow | ReadRate

# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilesRegistered:
    """Answer to ``RegisterFiles``: the data set as it is registered now."""

    id: Natural
    dataset: Name
    digest: str
    shards: Natural
    records: Whole
    """-1 if unknown before reading."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Answer to ``Open``: the worker has joined the round."""

    id: Natural
    dataset: Name
    digest: str
    format: str
    shards: Natural
    records: Whole
    options: DataSetOptions
    epoch: Natural
    """The current epoch. In mode "steps", the epoch of the worker's own ``Open`` until rank 0 has sent its ledger."""
    quarantined: Ranges = ()
    refused: tuple[tuple[Natural, str], ...] = ()
    """Independent mode: entries of ``granted`` and ``acks`` that do not count: shard and reason."""
    fence: Natural = 0
    """Independent mode: number of rollbacks so far."""
    number: Natural = 0
    kept: Natural = 0
    types: tuple[tuple[str, str], ...] = ()
    """Columns whose types the files do not declare, and those types: ``FileList.types``."""


@dataclass(frozen=True, slots=True)
class Given:
    """One leased shard, and where reading continues in it."""

    shard: ShardRef
    upto: int
    """Number of its records, in the shard's order, that are already consumed; reading continues after them."""


@dataclass(frozen=True, slots=True)
class LeasesGranted:
    """Answer to ``Lease``: the granted shards, and the state of the epoch."""

    id: Natural
    dataset: Name
    epoch: Natural
    leases: tuple[Given, ...]
    state: str
    """``more``: there may be more shards to lease. ``dry``: none at present, but other workers hold shards that may be
    returned. ``finished``: every shard of the epoch is done or quarantined."""
    refused: tuple[tuple[Natural, str], ...] = ()
    """Entries of ``finished`` and ``failed`` that do not count: shard and reason."""
    number: Natural = 0
    kept: Natural = 0
    ended: tuple[Natural, ...] = ()
    """Independent mode: trainers (``Open.trainer``) lost in this epoch while they held shards, oldest first."""
    version: Natural = 0
    """Number of segments of the file list that belong to ``epoch``."""
    shards: Natural = 0
    """Number of shards in these segments."""
    digest: str = ""
    """Digest of these segments."""
    records: Whole = -1
    """Records in these segments; -1 if unknown."""


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to ``NextEpoch``, ``Ack``, ``Commit``, ``Rollback`` and ``Gone``."""

    id: Natural
    dataset: Name
    epoch: Natural
    refused: tuple[tuple[Natural, str], ...] = ()
    """Entries of ``Ack.shards`` that do not count: shard and reason."""
    number: Natural = 0
    """Independent mode: number of acknowledgements of all workers so far, including this one."""
    kept: Natural = 0
    """Number of acknowledgements that are in the store."""
    ledger: str = ""
    """After ``Commit``: the position that now has the name."""


@dataclass(frozen=True, slots=True)
class DataRefused:
    """The request was not executed; sending it again unchanged does not help."""

    id: Natural
    dataset: str
    kind: str
    """``stale``: from another round. ``malformed``: not a valid message. ``unknown``: no such data set. ``rank``: only
    allowed for rank 0. ``differs``: from the registered files. ``ledger``: does not match the files. ``unopened``: send
    ``Open`` first (also after a rollback). ``old``: the id is too low. ``epoch``: not the current one. ``unfinished``:
    the epoch is not over. ``mode``: not allowed in this mode. ``commit``: no position has this name."""
    text: str
    """The reason, for people."""
    last: Natural = 0
    """With ``old``: the highest id received from this client."""


@dataclass(frozen=True, slots=True)
class ReaderList:
    """The live remote readers (``remote.flight``), sent to each worker that opens a data set, and on each change."""

    readers: tuple[tuple[str, str, Natural, str], ...]
    """Name, host, port and secret of each."""
    authority: str = field(default="", repr=False)
    """In a job with a secret: the key from which readers and workers derive certificates for each other, and nothing
    else."""


Answer = FilesRegistered | Opened | LeasesGranted | Done | Listed | Grown | DataRefused
DataMessage = Request | Answer | ReaderList | AddFiles

# --- text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PackedLeases:
    """The leases of a ``LeasesGranted``, encoded beside its other fields. Each file is listed once, because it usually
    contains many shards."""

    rows: list[tuple[int, int, int, int, int, int]]
    """Shard, records consumed, index of its file, begin, end, records (see ``Manifest.rows``)."""
    files: list[str]
    sizes: list[int]
    """Bytes of each file."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The fields of any request that its refusal repeats."""

    id: Natural = 0
    dataset: str = ""


_TAGS: dict[type[Any], str] = {
    RegisterFiles: "register",
    FilesRegistered: "registered",
    LeasesGranted: "granted",
    DataRefused: "refused",
    ReaderList: "readers",
    ReadRate: "pace",
}
"""Tags of messages whose tag is not the name of their class in lower case."""
_UNION: TaggedUnion[DataMessage] = TaggedUnion(
    *(RegisterFiles, Open, Lease, NextEpoch, Ack, Commit, Rollback, Gone, ListFiles, Grow, ReadRate),
    *(FilesRegistered, Opened, LeasesGranted, Done, Listed, Grown, DataRefused),
    *(ReaderList, AddFiles),
    tag="word",
    what="a message about data",
    advice="All launchers and workers of a job must run the same version of edl",
    name=lambda kind: _TAGS.get(kind, kind.__name__.lower()),
)
_RANGES: dict[type[Any], tuple[str, ...]] = {
    Open: ("granted", "finished"),
    Lease: ("unreached",),
    Opened: ("quarantined",),
}
"""Fields of type ``Ranges``."""


def encode(message: DataMessage) -> str:
    """Encode a message as JSON."""
    if isinstance(message, LeasesGranted):
        return encode_granted(message, *_pack(message.leases))
    return _UNION.encode(message).decode()


def encode_granted(granted: LeasesGranted, rows: list[list[int]], files: list[str], sizes: list[int]) -> str:
    """Encode a ``LeasesGranted`` whose leases are given as rows of ``Manifest.rows``, without an object for each."""
    text = _UNION.encode(replace(granted, leases=()))
    leases = json_messages.encode({"rows": rows, "files": files, "sizes": sizes})
    return f"{text[:-1].decode()},{leases[1:].decode()}"


def decode(text: str) -> DataMessage:
    """Decode a message from JSON. Raises ``ProtocolError`` that names the invalid field."""
    message = _UNION.decode(text)
    for name in _RANGES.get(type(message), ()):
        _check_ranges(name, getattr(message, name))
    return replace(message, leases=_unpack(text)) if isinstance(message, LeasesGranted) else message


def salvage(text: str) -> tuple[int, str]:
    """Id and data set of a message that ``decode`` refused, for the refusal; 0 and "" if it has none."""
    try:
        head = json_messages.decode(_Head, text)
    except ProtocolError:
        return 0, ""
    return head.id, json_messages.short(head.dataset)


def ranges(shards: Iterable[int]) -> Ranges:
    """Convert shard numbers, in any order, to ranges."""
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
    """Rows of numbers, the files that these refer to by index, and the sizes of the files in bytes."""
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
        raise ProtocolError(f"a granted message refers to more than its {min(len(files), len(sizes))} files") from None


def _check_ranges(name: str, given: Ranges) -> None:
    last = 0
    for begin, end in given:
        if not last <= begin < end:
            raise ProtocolError(f"{name}: ranges must rise and not overlap, but {begin}-{end} does not")
        last = end
