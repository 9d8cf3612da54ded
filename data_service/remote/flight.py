"""The server of a remote reader: decodes shards for trainers and streams them over Arrow Flight.

It has no part in ledgers and leases: a trainer that holds a shard's lease requests its records from some number on, and
every reader returns the same ones. So a trainer continues at another reader when one dies, and no accounting is needed
here. HTTP/2 flow control blocks the server while a trainer does not read: a batch is made when the previous one has
been sent.
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

from data_service.formats import FormatReader, open_reader
from data_service.formats.options import FormatOptions
from data_service.formats.user import function_error
from data_service.manifest import ShardRef
from data_service.remote.tls import server_arguments
from edl.arithmetic.permutation import Permutation
from edl.errors import DataError, EdlError, PortInUse, UnreachableData, UsageError
from edl.wire.address import address

BATCH_BYTES = 1 << 20
"""Approximate size of a batch whose number of records is not given."""
DEFAULT_CAPACITY = 16
INDIRECT = frozenset({"cache_storage", "fo", "fs", "protocol", "target_options", "target_protocol"})
"""fsspec options that nest one file system in another."""
MOST_READERS = 64
"""File readers kept for tickets with the same options."""


class RefusalKind:
    """Reasons for a refusal; the trainer's reaction depends on them."""

    BUSY = "busy"
    """The reader is at capacity. Try another one."""
    DATA = "data"
    """The shard is unreadable everywhere."""
    MISSING = "missing"
    """The file does not exist here; another reader, or the trainer itself, may have it."""
    UNREACHED = "unreached"
    """The file cannot be reached from here, which says nothing about its content. Others may reach it."""
    SCRIPT = "script"
    """The ticket is invalid: a missing function, an unknown option."""
    OTHER = "other"
    """Another error of this reader. Try another one."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A trainer's request: the records of a shard from some number on, in order, in batches."""

    dataset: str
    """File readers are shared only among tickets of one data set, whose files have the same columns."""
    format: str
    index: int
    file: str
    begin: int
    end: int
    records: int
    """As in ``ShardRef``: -1 if unknown before reading."""
    upto: int = 0
    """Number of records, in the requested order, that the trainer already has."""
    key: int | None = None
    """Key of the ``Permutation`` that orders the records; None for file order."""
    rows: int = 0
    """Records per batch, except the last; 0 for batches of about 1 MiB."""
    columns: tuple[str, ...] | None = None
    decode: str = ""
    """``module:function``, applied to each batch: takes a ``RecordBatch`` and returns one with as many rows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the format: ``FormatOptions.plain()``."""
    storage: Mapping[str, Any] = field(default_factory=dict)
    """Options for fsspec, if the files are URLs."""
    size_bytes: int = -1
    """Size of the file when it was listed; -1 if unknown."""

    @property
    def ref(self) -> ShardRef:
        """The requested shard as a ``ShardRef``."""
        return ShardRef(self.index, self.file, self.begin, self.end, self.records, self.size_bytes)

    @property
    def reader(self) -> str:
        """A key that is equal for tickets which can share a file reader."""
        return json.dumps([self.dataset, self.format, self.columns, self.options, self.storage], sort_keys=True)

    def encode(self) -> bytes:
        """Encode the ticket as JSON."""
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
                f"not a ticket of this version of edl ({error}). Install the same version everywhere"
            ) from None


Decode = Callable[[pa.RecordBatch], Any]


def function_named(name: str) -> Decode | None:
    """Import ``module:function``; None for an empty name. Raises ``UsageError``."""
    if not name:
        return None
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"decode={name}: cannot be imported here ({type(error).__name__}: {error}). Use package.module:function, "
            "and install the package, or set PYTHONPATH, wherever readers run"
        ) from None
    if not callable(found):
        raise UsageError(f"decode={name}: is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def batches_of(
    table: pa.Table, key: int | None, upto: int, rows: int, decode: Decode | None, name: str = ""
) -> Iterator[pa.RecordBatch]:
    """A shard's records from number ``upto`` on in batches; a single empty batch if none are left.

    Readers and trainers both use this function, so it does not matter where a shard is read. Raises ``DataError`` if
    ``decode`` finds damaged data or cannot reach them, ``DataFunctionError`` if it fails otherwise, and ``UsageError``
    if it does not return a batch with as many rows.
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
    except (EdlError, MemoryError):
        raise
    except Exception as error:
        raise function_error(error, f"decode={name}") from error
    if isinstance(made, pa.Table):
        made = _one_batch(made)
    if not isinstance(made, pa.RecordBatch):
        raise UsageError(f"decode={name} returned a {type(made).__name__}; it must return a pyarrow.RecordBatch")
    if made.num_rows != batch.num_rows:
        raise UsageError(
            f"decode={name} returned {made.num_rows} rows for {batch.num_rows}; each record must stay one row, or used "
            "records cannot be counted"
        )
    return made


def _check_storage(ticket: Ticket) -> None:
    """Refuse nested file systems: fsspec can open a file through another one that stores copies in a folder of the
    caller's choice, or fills in templates. Either can inject code. Raises ``UsageError``."""
    indirect = "::" in ticket.file or _names_of(ticket.storage) & INDIRECT
    if indirect:
        raise UsageError(
            f"{ticket.file}: readers do not open files through other file systems (a URL with '::', or "
            f"{', '.join(sorted(INDIRECT))} in storage_options). Read them in the trainer: remote=''"
        )


def _names_of(options: Any) -> set[str]:
    """Keys at any depth."""
    if isinstance(options, Mapping):
        return {*options, *(name for value in options.values() for name in _names_of(value))}
    return {name for value in options for name in _names_of(value)} if isinstance(options, list) else set()


def refusal(error: Exception) -> fl.FlightError:
    """Convert an error to the one sent to the trainer."""
    kind, text = RefusalKind.OTHER, f"{type(error).__name__}: {error}"
    if isinstance(error, UnreachableData):
        kind, text = RefusalKind.UNREACHED, str(error)
    elif isinstance(error, DataError):
        absent = isinstance(error.__cause__ or error.__context__, FileNotFoundError)
        kind, text = (RefusalKind.MISSING if absent else RefusalKind.DATA), str(error)
    elif isinstance(error, UsageError):
        kind, text = RefusalKind.SCRIPT, str(error)
    elif isinstance(error, FileNotFoundError | PermissionError):
        kind = RefusalKind.MISSING
    # Flight adds text to the message, so the trainer reads this one.
    return fl.FlightServerError(text, json.dumps({"kind": kind, "text": text}).encode())


class _SecretCheck(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls without this reader's secret."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._wanted = f"Bearer {secret}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        """Called by Flight for each call. Raises ``FlightUnauthenticatedError``."""
        sent = (headers.get("authorization") or [""])[0]
        if not hmac.compare_digest(sent.encode() if isinstance(sent, str) else sent, self._wanted):
            raise fl.FlightUnauthenticatedError("wrong secret: this reader serves the trainers of another job")


class ReaderServer(fl.FlightServerBase):  # type: ignore[misc]
    """Serves tickets as soon as it is created, at most ``capacity`` at once. ``port`` is the bound port. Raises
    ``PortInUse``."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        capacity: int = DEFAULT_CAPACITY,
        functions: Collection[str] = (),
        authority: str = "",
    ) -> None:
        """``functions``: the functions that tickets may name, as ``module:function``; nothing else is imported for a
        ticket. ``authority``: of the certificates that clients need; empty for a job without a secret."""
        if not secret:
            raise ValueError("a reader must have a secret")
        self._functions = frozenset(functions)
        try:
            super().__init__(**server_arguments(host, port, authority), middleware={"door": _SecretCheck(secret)})
        except (pa.ArrowException, OSError) as error:
            raise PortInUse(
                f"cannot listen on {address(host, port)}: {error}. Set an address of this host with --local-addr"
            ) from error
        self._free = threading.Semaphore(capacity)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, FormatReader] = OrderedDict()

    def do_get(self, context: Any, ticket: fl.Ticket) -> fl.GeneratorStream:
        """Called by Flight, on its own thread."""
        if not self._free.acquire(blocking=False):
            text = f"already serves {self._capacity} streams"
            raise fl.FlightUnavailableError(text, json.dumps({"kind": RefusalKind.BUSY, "text": text}).encode())
        # Started here: a generator that is never started is never finished, which would leak its slot.
        outgoing = self._outgoing(ticket.ticket)
        return fl.GeneratorStream(next(outgoing), outgoing)

    def _outgoing(self, text: bytes) -> Iterator[Any]:
        """Yield the schema, then each batch with the number of records in the whole shard."""
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
                        f"decode={ticket.decode} returned batches of different types: {schema}; {batch.schema}"
                    )
                yield batch, total
                batch = next(batches, None)
        except Exception as error:
            raise refusal(error) from error
        finally:
            self._free.release()

    def _check_functions(self, ticket: Ticket) -> None:
        """Allow only functions that this reader was started with; otherwise a ticket could run any code. Checked before
        anything is imported. Raises ``UsageError``."""
        named = {"decode": ticket.decode, **{name: ticket.options.get(name) for name in ("read", "shards")}}
        for what, name in named.items():
            if name and name not in self._functions:
                listed = ", ".join(sorted(self._functions)) or "none"
                raise UsageError(
                    f"{what}={name}: this reader was not started with that function (it has {listed}). Start readers "
                    f"with --reader-functions={name}"
                )

    def _reader(self, ticket: Ticket) -> FormatReader:
        with self._lock:
            reader = self._readers.get(ticket.reader)
            if reader is None:
                columns = list(ticket.columns) if ticket.columns is not None else None
                reader = open_reader(
                    ticket.format,
                    columns,
                    storage_options=ticket.storage or None,
                    options=FormatOptions.of(ticket.options),
                )
                self._readers[ticket.reader] = reader
                if len(self._readers) > MOST_READERS:
                    self._readers.popitem(last=False)  # not closed, because a stream may still use it
            self._readers.move_to_end(ticket.reader)
            return reader

    def drain(self, grace_s: float) -> bool:
        """Accept no more tickets and wait at most ``grace_s`` seconds for running streams. Returns True if all have
        ended."""
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        ending.join(grace_s)
        return not ending.is_alive()

    def _end(self) -> None:
        with contextlib.suppress(pa.ArrowException):
            self.shutdown()
