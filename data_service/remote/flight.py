"""A reader of other nodes' data: decodes shards for trainers and streams them over Arrow Flight.

It knows no ledger and no lease: a trainer that holds a shard's lease asks for the shard's records from some number on,
and whoever answers gives the same ones. So a trainer goes on at another reader when one dies, and nothing is accounted
for here. HTTP/2 holds the server back while a trainer does not take: a batch is made when the one before has been sent.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from data_service.formats import Reader, open_reader
from data_service.formats.options import Options
from data_service.manifest import ShardRef
from data_service.remote.tls import server_arguments
from edl.arithmetic.permutation import Permutation
from edl.errors import DataError, DataFunctionError, EdlError, PortInUse, UsageError
from edl.wire.address import address

BATCH_BYTES = 1 << 20
"""About so large is a batch whose number of records nobody has chosen."""
DEFAULT_CAPACITY = 16
INDIRECT = frozenset({"cache_storage", "fo", "fs", "protocol", "target_options", "target_protocol"})
"""Options of fsspec that put one file system into another."""
MOST_READERS = 64
"""Readers of files that are kept for the next ticket with the same options."""


class RefusalKind:
    """Why a reader says no; the trainer goes by these."""

    BUSY = "busy"
    """As many streams as it serves at once. Ask another one."""
    DATA = "data"
    """The shard cannot be read, wherever that is tried."""
    MISSING = "missing"
    """There is no such file, or no permission to read it, here: another reader, or the trainer itself, may have it."""
    SCRIPT = "script"
    """The ticket asks for what cannot be: a function that is not there, an unknown option."""
    OTHER = "other"
    """Something else has gone wrong here. Ask another one."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a trainer asks for: the records of a shard from one on, in their order, in batches."""

    dataset: str
    """Readers of files are shared among the tickets of one data set only: all its files have the same columns."""
    format: str
    index: int
    file: str
    begin: int
    end: int
    records: int
    """As in ``ShardRef``: -1 for a shard whose records are counted when it is read."""
    upto: int = 0
    """How many records, in the order asked for, the trainer has already."""
    key: int | None = None
    """Order of the records: a ``Permutation`` with this key; None for that of the file."""
    rows: int = 0
    """Records of a batch, the last one may have fewer; 0 for batches of about a megabyte."""
    columns: tuple[str, ...] | None = None
    decode: str = ""
    """``module:function``, applied to each batch: takes a ``RecordBatch``, gives one with as many rows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the format: ``Options.plain()``."""
    storage: Mapping[str, Any] = field(default_factory=dict)
    """For fsspec, when the files are URLs."""

    @property
    def ref(self) -> ShardRef:
        """The shard."""
        return ShardRef(self.index, self.file, self.begin, self.end, self.records)

    @property
    def reader(self) -> str:
        """Equal for tickets that one reader of files can serve."""
        return json.dumps([self.dataset, self.format, self.columns, self.options, self.storage], sort_keys=True)

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, text: bytes) -> Ticket:
        """The inverse of ``encode``. Raises ``UsageError``."""
        try:
            plain = json.loads(text)
            plain["columns"] = tuple(plain["columns"]) if plain.get("columns") is not None else None
            return cls(**plain)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"not a ticket of this version of edl ({error}). Install the same one everywhere"
            ) from None


Decode = Callable[[pa.RecordBatch], Any]


def function_named(name: str) -> Decode | None:
    """The function of ``module:function``; None for an empty name. Raises ``UsageError``."""
    if not name:
        return None
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"decode={name}: cannot be imported here ({type(error).__name__}: {error}). Write package.module:function, "
            "and install the package, or set PYTHONPATH, wherever readers run"
        ) from None
    if not callable(found):
        raise UsageError(f"decode={name}: is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def batches_of(
    table: pa.Table, key: int | None, upto: int, rows: int, decode: Decode | None, name: str = ""
) -> Iterator[pa.RecordBatch]:
    """A shard in batches, from record ``upto`` of the order on; a single empty batch when nothing is left.

    Readers and trainers both make batches with this, so that it does not matter who has read a shard. Raises
    ``DataFunctionError`` when ``decode`` fails and ``UsageError`` when it gives no batch of as many rows.
    """
    total = table.num_rows
    rows = rows or max(1, total * BATCH_BYTES // max(1, table.nbytes))
    for batch in _pieces(table, key, min(upto, total), rows):
        yield batch if decode is None else _decoded(batch, decode, name)


def _pieces(table: pa.Table, key: int | None, upto: int, rows: int) -> Iterator[pa.RecordBatch]:
    total = table.num_rows
    if upto == total:
        yield pa.RecordBatch.from_pylist([], schema=table.schema)
        return
    order = None if key is None else Permutation(total, key)
    if order is not None:
        table = table.combine_chunks()
    for begin in range(upto, total, rows):
        if order is None:
            yield _one_batch(table.slice(begin, rows))  # a view, unless chunks are smaller
        else:
            yield _one_batch(table.take(pa.array(order.array(begin, min(begin + rows, total)))))


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _decoded(batch: pa.RecordBatch, decode: Decode, name: str) -> pa.RecordBatch:
    try:
        made = decode(batch)
    except EdlError:
        raise
    except Exception as error:
        advice = "Mend it; where the data are damaged, let it raise edl.errors.DataError, and the shard is left out"
        raise DataFunctionError(f"decode={name} has failed: {type(error).__name__}: {error}. {advice}") from error
    if isinstance(made, pa.Table):
        made = _one_batch(made)
    if not isinstance(made, pa.RecordBatch):
        raise UsageError(f"decode={name} gave a {type(made).__name__}; it must give a pyarrow.RecordBatch")
    if made.num_rows != batch.num_rows:
        raise UsageError(
            f"decode={name} made {made.num_rows} rows of {batch.num_rows}; each record must stay one row, or nobody "
            "knows which have been used"
        )
    return made


def _check_storage(ticket: Ticket) -> None:
    """fsspec can open a file through another file system: one that leaves copies in a folder of the caller's choice, or
    that fills in templates. Either can bring code. Raises ``UsageError``."""
    indirect = "::" in ticket.file or _names_of(ticket.storage) & INDIRECT
    if indirect:
        raise UsageError(
            f"{ticket.file}: readers open no files by way of other file systems (a URL with '::', or "
            f"{', '.join(sorted(INDIRECT))} in storage_options). Read these in the trainer: remote=''"
        )


def _names_of(options: Any) -> set[str]:
    """Keys at any depth."""
    if isinstance(options, Mapping):
        return {*options, *(name for value in options.values() for name in _names_of(value))}
    return {name for value in options for name in _names_of(value)} if isinstance(options, list) else set()


def refusal(error: Exception) -> fl.FlightError:
    """What the trainer gets for an error here."""
    kind, text = RefusalKind.OTHER, f"{type(error).__name__}: {error}"
    if isinstance(error, DataError):
        absent = isinstance(error.__cause__ or error.__context__, FileNotFoundError | PermissionError)
        kind, text = (RefusalKind.MISSING if absent else RefusalKind.DATA), str(error)
    elif isinstance(error, UsageError):
        kind, text = RefusalKind.SCRIPT, str(error)
    elif isinstance(error, FileNotFoundError | PermissionError):
        kind = RefusalKind.MISSING
    # Flight adds words of its own to the message, so the trainer reads ours here.
    return fl.FlightServerError(text, json.dumps({"kind": kind, "text": text}).encode())


class _SecretCheck(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Nobody passes without this reader's secret."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._wanted = f"Bearer {secret}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        """Called by Flight for each call. Raises ``FlightUnauthenticatedError``."""
        sent = (headers.get("authorization") or [""])[0]
        if not hmac.compare_digest(sent.encode() if isinstance(sent, str) else sent, self._wanted):
            raise fl.FlightUnauthenticatedError("wrong secret: this reader serves the trainers of another job")


class ReaderServer(fl.FlightServerBase):  # type: ignore[misc]
    """Serves tickets as soon as it is made, at most ``capacity`` at once. ``port`` says where. Raises ``PortInUse``."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        capacity: int = DEFAULT_CAPACITY,
        functions: Collection[str] = (),
        authority: str = "",
    ) -> None:
        """``functions``: those, as ``module:function``, that tickets may name; nothing else is imported for one.
        ``authority``: of the certificates that whoever connects has to have; empty for a job without a secret."""
        if not secret:
            raise ValueError("a reader without a secret would serve anybody")
        self._functions = frozenset(functions)
        try:
            super().__init__(**server_arguments(host, port, authority), middleware={"door": _SecretCheck(secret)})
        except (pa.ArrowException, OSError) as error:
            raise PortInUse(
                f"cannot listen on {address(host, port)}: {error}. Name an address of this host with --local-addr"
            ) from error
        self._free = threading.Semaphore(capacity)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, Reader] = OrderedDict()

    def do_get(self, context: Any, ticket: fl.Ticket) -> fl.GeneratorStream:
        """Called by Flight in a thread of its own."""
        if not self._free.acquire(blocking=False):
            text = f"serves {self._capacity} streams already"
            raise fl.FlightUnavailableError(text, json.dumps({"kind": RefusalKind.BUSY, "text": text}).encode())
        # Begun here: a generator that nobody has begun never comes to its end either, and its place were lost.
        outgoing = self._outgoing(ticket.ticket)
        return fl.GeneratorStream(next(outgoing), outgoing)

    def _outgoing(self, text: bytes) -> Iterator[Any]:
        """The schema, then each batch with the number of records in the whole shard beside it."""
        try:
            ticket = Ticket.parse(text)
            self._check_functions(ticket)
            _check_storage(ticket)
            decode = function_named(ticket.decode)
            table = self._reader(ticket).read(ticket.ref)
            total = str(table.num_rows).encode()
            batches = batches_of(table, ticket.key, ticket.upto, ticket.rows, decode, ticket.decode)
            batch = next(batches)
            schema = batch.schema
            yield schema
            while batch is not None:
                if not batch.schema.equals(schema):
                    raise UsageError(
                        f"decode={ticket.decode} gave batches of different types: {schema}; {batch.schema}"
                    )
                yield batch, total
                batch = next(batches, None)
        except Exception as error:
            raise refusal(error) from error
        finally:
            self._free.release()

    def _check_functions(self, ticket: Ticket) -> None:
        """A ticket selects among functions that this reader was started with: whoever can send one could otherwise run
        any code here. Before anything is imported. Raises ``UsageError``."""
        named = {"decode": ticket.decode, **{name: ticket.options.get(name) for name in ("read", "shards")}}
        for what, name in named.items():
            if name and name not in self._functions:
                listed = ", ".join(sorted(self._functions)) or "none"
                raise UsageError(
                    f"{what}={name}: this reader was not started with that function (it has {listed}). Start readers "
                    f"with --reader-functions={name}"
                )

    def _reader(self, ticket: Ticket) -> Reader:
        with self._lock:
            reader = self._readers.get(ticket.reader)
            if reader is None:
                columns = list(ticket.columns) if ticket.columns is not None else None
                reader = open_reader(
                    ticket.format, columns, storage_options=ticket.storage or None, options=Options.of(ticket.options)
                )
                self._readers[ticket.reader] = reader
                if len(self._readers) > MOST_READERS:
                    self._readers.popitem(last=False)  # not closed: another stream may still read with it
            self._readers.move_to_end(ticket.reader)
            return reader

    def drain(self, grace_s: float) -> bool:
        """Take no more tickets and let the streams under way end, for so long; whether they have."""
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        ending.join(grace_s)
        return not ending.is_alive()

    def _end(self) -> None:
        with contextlib.suppress(pa.ArrowException):
            self.shutdown()
