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

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from data_service import fields as needs
from data_service.manifest import ShardRef
from data_service.protocol import file_list_messages
from data_service.protocol.file_list_messages import AddFiles, Grow, Grown, Listed, ListFiles
from edl.errors import DataError

STEPS = "steps"
"""Mode in which the consumed records are part of the model's state, and a round's ledger comes from there."""
INDEPENDENT = "free"
"""Independent mode, for trainers that do not step together: the Master's ledger is the truth."""
MORE, DRY, FINISHED = "more", "dry", "finished"
"""States of an epoch as an answer to ``Lease`` tells them."""

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of shard numbers, rising and apart."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a data set is handed out. The same for all who use it."""

    seed: int = 0
    """Of the order of the shards, and of the records within one."""
    shuffle: bool = True
    mode: str = STEPS
    """``steps`` or ``free``."""
    failures: int = 3
    """Failed attempts to read a shard after which it is quarantined; at least 1."""


# --- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """Rank 0, or anybody in independent mode: these are the shards. The same again changes nothing."""

    id: int
    dataset: str
    manifest: bytes
    """``Manifest.encode()``; base64 in the text."""
    options: Options = Options()


@dataclass(frozen=True, slots=True)
class Open:
    """This worker takes part from here on in this round. Answered with ``Opened`` once the data set is registered.

    ``Lease`` is answered only when rank 0 has opened, and after a change of the Master when all ranks have.
    """

    id: int
    dataset: str
    rank: int
    epoch: int = 0
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
    returned: tuple[tuple[int, int], ...] = ()
    """Shards that it has given back as failed in this round and epoch, with the count of records consumed."""
    acks: tuple[tuple[int, int, bool], ...] = ()
    """Independent mode: see ``Ack.shards``; those that may not be in the store yet, and for each of ``granted`` that is
    begun the count of its records acknowledged so far."""
    fence: int = 0
    """Independent mode: of the last ``Opened``. ``granted`` and ``acks`` from before a rollback do not count."""
    trainer: int = 0
    """Independent mode: the number of this worker's process in the parameter servers; 0: it has none."""


@dataclass(frozen=True, slots=True)
class Lease:
    """More shards, please; and what became of earlier ones."""

    id: int
    dataset: str
    epoch: int
    want: int
    """At most so many; 0 only reports."""
    finished: tuple[tuple[int, int], ...] = ()
    """Shards of this epoch with the number of all their records: reading is over, and in mode "steps" all their records
    have been announced to all ranks."""
    failed: tuple[tuple[int, int, str], ...] = ()
    """Shards that cannot be read on, the count of their records that are consumed all the same (in mode "steps":
    announced; report the failure only then), and why."""
    unreached: Ranges = ()
    """Those of ``failed`` whose files could not be reached: they are never left out."""


@dataclass(frozen=True, slots=True)
class NextEpoch:
    """Rank 0, or anybody in independent mode: the epoch before this one is over."""

    id: int
    dataset: str
    epoch: int
    """The one that begins."""
    dropped: int = 0
    """Records left over on purpose (rule "drop"); without it the epoch before must be finished."""


@dataclass(frozen=True, slots=True)
class Ack:
    """Independent mode: these records are consumed."""

    id: int
    dataset: str
    epoch: int
    shards: tuple[tuple[int, int, bool], ...]
    """Shard, count of its records consumed so far (not since the last ``Ack``), whether that is all of it."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Independent mode: name the present position. In the store when answered; ``Done.ledger`` is the position."""

    id: int
    dataset: str
    name: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """Independent mode: back to a named position. All leases are void; everybody has to open again."""

    id: int
    dataset: str
    name: str
    ledger: str = ""
    """The position itself, ``Ledger.encode()``, for a Master that has never heard the name."""
    history: int = 0
    """Of the parameters that go with it: for each history this is done once, whoever asks first, and never for one
    before the last. 0: always."""


@dataclass(frozen=True, slots=True)
class Gone:
    """This worker takes no more part: what it has in hand goes to others at once (independent mode)."""

    id: int
    dataset: str


@dataclass(frozen=True, slots=True)
class Pace:
    """For ``edl status``, and a sign of life; no answer comes, and ``id`` is not looked at."""

    id: int
    dataset: str
    records_per_s: float
    """Records that this worker hands out."""
    waited: float = 0.0
    """Share of the time in which training waited for data, 0 to 1."""


Request = Register | Open | Lease | NextEpoch | Ack | Commit | Rollback | Gone | ListFiles | Grow | Pace

# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """The data set is known."""

    id: int
    dataset: str
    digest: str
    shards: int
    records: int
    """-1 when it is not known before they are read."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The worker takes part."""

    id: int
    dataset: str
    digest: str
    format: str
    shards: int
    records: int
    options: Options
    epoch: int
    """The present one; in mode "steps" the one of the worker's own ``Open`` until rank 0's ledger is there."""
    quarantined: Ranges = ()
    refused: tuple[tuple[int, str], ...] = ()
    """Independent mode: of ``granted`` and ``acks``, those that do not count: shard, and why."""
    fence: int = 0
    number: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """One leased shard."""

    shard: ShardRef
    upto: int
    """Records of it, in its own order, that are consumed already: reading goes on behind them."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to ``Lease``."""

    id: int
    dataset: str
    epoch: int
    leases: tuple[Given, ...]
    state: str
    """``more``: ask again when you need more. ``dry``: nothing now, but others hold shards that may come back.
    ``finished``: every shard of the epoch is done or quarantined."""
    refused: tuple[tuple[int, str], ...] = ()
    """Of ``finished`` and ``failed``, those that do not count: shard, and why."""
    number: int = 0
    kept: int = 0
    ended: tuple[int, ...] = ()
    """Independent mode: trainers (``Open.trainer``) that were lost with shards in hand in this epoch, oldest first."""
    version: int = 0
    """Segments of the list of files that ``epoch`` consists of; then its shards, digest and records (-1: unknown)."""
    shards: int = 0
    digest: str = ""
    records: int = -1


@dataclass(frozen=True, slots=True)
class Done:
    """Answer to ``NextEpoch``, ``Ack``, ``Commit``, ``Rollback`` and ``Gone``."""

    id: int
    dataset: str
    epoch: int
    refused: tuple[tuple[int, str], ...] = ()
    """Of ``Ack.shards``, those that do not count: shard, and why."""
    number: int = 0
    """Independent mode: acknowledgements of all workers so far, this one included."""
    kept: int = 0
    """Those of them that are in the store."""
    ledger: str = ""
    """After ``Commit``: the position that has the name now."""


@dataclass(frozen=True, slots=True)
class Refused:
    """It is not done, and sending it again unchanged does not help."""

    id: int
    dataset: str
    kind: str
    """``stale`` another round; ``malformed``; ``unknown`` data set, ``rank`` only rank 0 may; ``differs`` from what is
    registered; ``ledger`` does not fit; ``unopened``: send ``Open`` first (also after a rollback); ``old`` id;
    ``epoch``; ``unfinished``; ``mode``; ``commit`` of no such name."""
    text: str
    last: int = 0
    """With ``old``: highest id heard from this client."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Told to each worker that opens data, and when it changes: remote readers (``remote.flight``)."""

    readers: tuple[tuple[str, str, int, str], ...]
    """Name, host, port and secret of each."""
    authority: str = field(default="", repr=False)
    """In a job with a secret: by what readers and workers make certificates for one another, and for nothing else."""


Answer = Registered | Opened | Granted | Done | Listed | Grown | Refused
DataMessage = Request | Answer | Readers | AddFiles

# --- text ------------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (
        Register,
        Open,
        Lease,
        NextEpoch,
        Ack,
        Commit,
        Rollback,
        Gone,
        ListFiles,
        Grow,
        Pace,
        Registered,
        Opened,
        Granted,
        Done,
        Listed,
        Grown,
        Refused,
        Readers,
        AddFiles,
    )
}
_BYTES = {"manifest", "data"}
"""Fields that are base64 in the text."""
_NAMES = {kind: name for name, kind in _KINDS.items()}
_FIELDS = {kind: tuple(one.name for one in fields(kind)) for kind in _NAMES}
_dump = json.JSONEncoder(separators=(",", ":")).encode
W = TypeVar("W", bound=DataMessage)


def encode(message: DataMessage) -> str:
    """Encode a message as JSON."""
    kind = type(message)
    body: dict[str, Any] = {"word": _NAMES[kind]}
    for name in _FIELDS[kind]:
        body[name] = getattr(message, name)
    for name in _BYTES & body.keys():
        body[name] = base64.b64encode(body[name]).decode("ascii")
    if isinstance(message, Register | Opened):
        body["options"] = _options_body(message.options)
    if isinstance(message, Granted):
        body["leases"], body["files"], body["sizes"] = _pack(message.leases)
    return _dump(body)


def encode_granted(granted: Granted, rows: list[list[int]], files: list[str], sizes: list[int]) -> str:
    """The text of a ``Granted`` whose leases are given as ``Manifest.rows`` makes them: without an object for each."""
    body: dict[str, Any] = {"word": "granted"}
    for name in _FIELDS[Granted]:
        body[name] = getattr(granted, name)
    body["leases"], body["files"], body["sizes"] = rows, files, sizes
    return _dump(body)


def decode(text: str) -> DataMessage:
    """Decode a message from JSON. Raises ``DataError`` naming what is wrong with it."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a message that is not JSON ({error}): {needs.short(text)}") from None
    kind = (
        _KINDS.get(body.get("word", "")) if isinstance(body, dict) and isinstance(body.get("word", ""), str) else None
    )
    if kind is None:
        raise DataError(f"a message of no known kind (known: {', '.join(_KINDS)}): {needs.short(text)}")
    values: dict[str, Any] = {}
    checks = _CHECKS[kind]
    for name, value in body.items():
        check = checks.get(name)
        if check is None:
            continue  # from a newer client
        try:
            values[name] = check(value)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise DataError(f"{body['word']}.{name}={needs.short(value)}: {error}") from None
    try:
        if kind is Granted:
            values["leases"] = _unpack(values.pop("leases"), values.pop("files"), values.pop("sizes"))
        return cast(DataMessage, kind(**values))
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{body['word']}: {error}") from None


def expect(text: str, kind: type[W]) -> W:
    """Decode a message that must be of this kind. Raises ``DataError``, with a refusal's own text if it is one."""
    message = decode(text)
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused):
        raise DataError(message.text)
    raise DataError(f"a {_NAMES[kind]} was expected: {needs.short(text)}")


def salvage(text: str) -> tuple[int, str]:
    """Id and data set of a message that ``decode`` refused, as far as it has any; the refusal repeats them."""
    try:
        body = json.loads(text)
        return needs.natural(body.get("id", 0)), needs.short(needs.string(body.get("dataset", "")))
    except (ValueError, AttributeError, RecursionError):
        return 0, ""


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


def _options_body(options: Options) -> dict[str, Any]:
    return {one.name: getattr(options, one.name) for one in fields(Options)}


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


def _unpack(rows: list[list[int]], files: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Given, ...]:
    return tuple(
        Given(ShardRef(index, files[file], begin, end, records, sizes[file]), upto)
        for index, upto, file, begin, end, records in rows
    )


def _mode(value: object) -> str:
    if value not in (STEPS, INDEPENDENT):
        raise ValueError(f"{STEPS} or {INDEPENDENT} is needed")
    return str(value)


def _attempts(value: object) -> int:
    if needs.natural(value) < 1:
        raise ValueError("at least 1 attempt is needed")
    return needs.natural(value)


def options_from(value: object) -> Options:
    """Options of their JSON form. Raises ``ValueError``."""
    if not isinstance(value, Mapping):
        raise ValueError("an object is needed")
    checks = {"seed": needs.whole, "shuffle": needs.flag, "mode": _mode, "failures": _attempts}
    found: dict[str, Any] = {}
    for name, one in value.items():
        check = cast("Callable[[object], Any] | None", checks.get(name))
        if check is None:
            raise ValueError(f"there is no option {name!r}; there are {', '.join(checks)}")
        try:
            found[name] = check(one)
        except ValueError as error:
            raise ValueError(f"{name}={needs.short(one)}: {error}") from None
    return Options(**found)


def _leases(value: object) -> list[list[int]]:
    """Looked at lightly: it comes from the Master."""
    if not isinstance(value, list) or not all(len(row) == 6 and set(map(type, row)) == {int} for row in value):
        raise ValueError("a list of leases, 6 numbers each, is needed")
    return value


_HEAD = file_list_messages.HEAD
_COUNTS: dict[str, Callable[[object], Any]] = {
    "refused": needs.rows(needs.natural, needs.string),
    "number": needs.natural,
    "kept": needs.natural,
}
_SET: dict[str, Callable[[object], Any]] = {"digest": needs.string, "shards": needs.natural, "records": needs.whole}
_ACKS = needs.rows(needs.natural, needs.natural, needs.flag)
_CHECKS: dict[type[Any], dict[str, Callable[[object], Any]]] = {
    Register: {**_HEAD, "manifest": needs.encoded, "options": options_from},
    Open: {
        **_HEAD,
        "rank": needs.natural,
        "epoch": needs.natural,
        "ledger": needs.string,
        "digest": needs.string,
        "granted": needs.rising,
        "finished": needs.rising,
        "returned": needs.rows(needs.natural, needs.natural),
        "acks": _ACKS,
        "fence": needs.natural,
        "trainer": needs.natural,
    },
    Lease: {
        **_HEAD,
        "epoch": needs.natural,
        "want": needs.natural,
        "finished": needs.rows(needs.natural, needs.natural),
        "failed": needs.rows(needs.natural, needs.natural, needs.string),
        "unreached": needs.rising,
    },
    NextEpoch: {**_HEAD, "epoch": needs.natural, "dropped": needs.natural},
    Ack: {**_HEAD, "epoch": needs.natural, "shards": _ACKS},
    Commit: {**_HEAD, "name": needs.name},
    Rollback: {**_HEAD, "name": needs.name, "ledger": needs.string, "history": needs.natural},
    Gone: dict(_HEAD),
    **file_list_messages.CHECKS,
    Pace: {**_HEAD, "records_per_s": needs.number, "waited": needs.number},
    Registered: {**_HEAD, **_SET},
    Opened: {
        **_HEAD,
        **_SET,
        **_COUNTS,
        "format": needs.string,
        "options": options_from,
        "epoch": needs.natural,
        "fence": needs.natural,
        "quarantined": needs.rising,
    },
    Granted: {
        **_HEAD,
        **_COUNTS,
        "epoch": needs.natural,
        "leases": _leases,
        "files": needs.strings,
        "sizes": needs.wholes,
        "state": needs.string,
        "ended": needs.naturals,
        "version": needs.natural,
        **_SET,
    },
    Done: {**_HEAD, **_COUNTS, "epoch": needs.natural, "ledger": needs.string},
    Refused: {
        "id": needs.natural,
        "dataset": needs.string,
        "kind": needs.string,
        "text": needs.string,
        "last": needs.natural,
    },
    Readers: {
        "readers": needs.rows(needs.string, needs.string, needs.natural, needs.string),
        "authority": needs.string,
    },
}
