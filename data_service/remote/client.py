"""The trainer's side of remote readers: shards that other processes read and decode.

``Pool`` is the list of live readers, as sent by the Master. ``RemoteReader`` is a ``FormatReader`` that requests a
shard from one of them and continues at another, from the next record on, if that one dies, freezes or fails. The
trainer keeps the shard's lease throughout, so the accounting is the same as for local reading.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as fl

from data_service.formats import FormatReader
from data_service.formats.options import FormatOptions
from data_service.manifest import ShardRef
from data_service.remote import POLICIES
from data_service.remote.flight import RefusalKind, Ticket, batches_of, function_named
from data_service.remote.tls import client_arguments
from edl.errors import DataError, SettingError, UnreachableData, UsageError
from edl.wire.address import address

TIMEOUT_S = 30.0
"""A reader that sends nothing for this many seconds is abandoned."""
GONE_TIMEOUT_S = 3.0
"""The same for a reader that is no longer listed."""
LOOK_S = 0.25
"""Seconds between checks of a waiting thread whether the list has changed."""
LIFETIME_S = 1800.0
"""Longest life of a stream, in seconds. It bounds what a reader keeps for a trainer that has vanished; a slower trainer
continues with a new stream."""
DEPTH = 4
"""Batches buffered per stream."""
MOST_UNEXPECTED_ERRORS = 3
"""Number of consecutive readers with unexpected errors after which the shard counts as unreadable."""
MOST_PASSES = 64
AHEAD = 4
"""Shards fetched at once, from as many readers as are available."""

_log = logging.getLogger(__name__)


class Address(NamedTuple):
    """A live reader, as in the message ``ReaderList``."""

    id: str
    host: str
    port: int
    secret: str
    authority: str
    """Authority of its certificate and ours; empty: no TLS."""


_GRPC_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # no proxy for addresses in the cluster
    # What a stream may send ahead of its trainer. gRPC would derive it from the measured delay, which on a busy machine
    # is that of the processes, not of the network: without a bound, a slow trainer is sent more and more.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 8 << 20),
]


class _Link:
    """State of one reader in this process."""

    def __init__(self, where: Address) -> None:
        self.where = where
        self.streams = 0
        self.passes = 0
        """Number of times that it is still skipped after a failure."""
        self.failures = 0
        self.listed = True
        self._client: fl.FlightClient | None = None

    def client(self) -> fl.FlightClient:
        if self._client is None:
            where = client_arguments(self.where.host, self.where.port, self.where.authority)
            self._client = fl.FlightClient(**where, generic_options=_GRPC_OPTIONS)
        return self._client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(pa.ArrowException):
                client.close()

    def __str__(self) -> str:
        return f"reader {self.where.id} at {address(self.where.host, self.where.port)}"


class Pool:
    """The readers of a job. Thread-safe; one pool serves all data sets of a worker.

    ``first``: where to start among equally loaded readers, such as the rank, so that not all trainers start with the
    same one.
    """

    def __init__(self, first: int = 0) -> None:
        self._changed = threading.Condition()
        self._links: dict[str, _Link] = {}
        self._turn = first
        self._closed = False

    def update(self, readers: Iterable[Sequence[Any]], authority: str = "") -> None:
        """Replace the list; entries are ``(id, host, port, secret)``. Streams of removed readers may still finish.
        ``authority``: of a job with a secret."""
        found = (Address(str(one[0]), str(one[1]), int(one[2]), str(one[3]), authority) for one in readers)
        listed = {one.id: one for one in found}
        with self._changed:
            for name, link in list(self._links.items()):
                if listed.get(name) != link.where:
                    del self._links[name]
                    link.listed = False
                    if not link.streams:
                        link.close()
            for name, where in listed.items():
                self._links.setdefault(name, _Link(where))
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._links)

    def take(self, avoid: Collection[str] = (), *, pressing: bool = False) -> _Link | None:
        """The reader with the fewest streams of this process, round robin among equals; None if there is none.

        A failed reader is skipped a number of times that doubles with each failure, unless ``pressing``. Release it
        with ``give``.
        """
        with self._changed:
            self._turn += 1
            links = sorted(self._links.values(), key=lambda link: link.where.id)
            links = [link for link in links if link.where.id not in avoid]
            fit = [link for link in links if not link.passes]
            for link in links:
                link.passes = max(0, link.passes - 1)
            places = {id(link): place for place, link in enumerate(links)}
            best = min(
                links if pressing and not fit else fit,
                key=lambda link: (link.streams, (places[id(link)] - self._turn) % len(links)),
                default=None,
            )
            if best is not None:
                best.streams += 1
            return best

    def give(self, link: _Link, *, failed: bool) -> None:
        """Release a reader after a stream has ended."""
        with self._changed:
            link.streams -= 1
            link.failures = min(link.failures + 1, 10) if failed else 0
            link.passes = min(MOST_PASSES, 2**link.failures) if failed else 0
            if not (link.listed or link.streams):
                link.close()
            self._changed.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait until the list or the streams change, at most ``limit_s`` seconds. Returns False if the pool is
        closed."""
        with self._changed:
            if not self._closed:
                self._changed.wait(limit_s)
            return not self._closed

    def wake(self) -> None:
        """Wake all waiting threads to check their condition."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the pool; waiting threads are notified."""
        with self._changed:
            self._closed = True
            for link in self._links.values():
                link.listed = False
                if not link.streams:
                    link.close()
            self._links.clear()
            self._changed.notify_all()


_shared: list[Pool] = []
_sharing = threading.Lock()


def shared_pool(first: int = 0) -> Pool:
    """The pool of this process. ``first`` is used by the first call."""
    with _sharing:
        if not _shared:
            _shared.append(Pool(first))
        return _shared[0]


class _StreamError(Exception):
    """A stream has ended early. ``kind``: as reported by the reader; empty if it did not report one."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


class _RecordStream:
    """One Flight call. A thread receives up to ``depth`` batches ahead of the consumer."""

    def __init__(self, link: _Link, ticket: Ticket, depth: int) -> None:
        self._link = link
        self._pieces: queue.Queue[Any] = queue.Queue(depth)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reader: fl.FlightStreamReader | None = None
        self._thread = threading.Thread(target=self._receive, args=(ticket.encode(),), name="edl-remote", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> tuple[pa.RecordBatch, int] | None:
        """The next batch and the number of records in the whole shard; None at the end. Raises ``_StreamError``."""
        waited_s, piece = 0.0, None
        while True:
            try:
                piece = self._pieces.get(timeout=LOOK_S)
                break
            except queue.Empty:
                waited_s += LOOK_S
                limit_s = timeout_s if self._link.listed else min(timeout_s, GONE_TIMEOUT_S)
                if waited_s >= limit_s:
                    raise _StreamError(f"sent nothing for {waited_s:g} s") from None
        if isinstance(piece, BaseException):
            raise _as_stream_error(piece)
        if piece is None:
            return None
        return piece.data, int(piece.app_metadata.to_pybytes())

    def close(self) -> None:
        """Cancel the stream. The thread ends soon, or at the call's timeout."""
        with self._lock:
            self._closed.set()
            reader = self._reader
        if reader is not None:
            reader.cancel()
        with contextlib.suppress(queue.Empty):  # makes room: a blocked thread then sees the cancellation
            while True:
                self._pieces.get_nowait()
        self._thread.join(LOOK_S)

    def _receive(self, ticket: bytes) -> None:
        secret = self._link.where.secret
        try:
            call = fl.FlightCallOptions(timeout=LIFETIME_S, headers=[(b"authorization", f"Bearer {secret}".encode())])
            reader = self._link.client().do_get(fl.Ticket(ticket), call)
            with self._lock:
                self._reader = reader
                if self._closed.is_set():
                    reader.cancel()
            while self._put(reader.read_chunk()):
                pass
        except StopIteration:
            self._put(None)
        except Exception as error:  # noqa: BLE001 - top of the thread: passed on to the consumer
            self._put(error)

    def _put(self, piece: Any) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._pieces.put(piece, timeout=LOOK_S)
                return True
        return False


def _as_stream_error(error: BaseException) -> _StreamError:
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        sent = json.loads(error.extra_info)  # type: ignore[attr-defined]
        return _StreamError(str(sent["text"]), str(sent["kind"]))
    first = str(error).partition(". gRPC client debug context")[0]
    return _StreamError(f"{type(error).__name__}: {first}")


@dataclass(slots=True)
class ReaderCounts:
    """Counters of a ``RemoteReader``: shards by place, and takeovers."""

    remote_shards: int = 0
    local_shards: int = 0
    """Shards read locally, at least in part, because no reader could."""
    takeovers: int = 0
    """Number of times that another reader, or this process, had to continue."""


class _Fetch:
    """Fetches a shard on its own daemon thread."""

    def __init__(self, read: Callable[[ShardRef, threading.Event], pa.Table], ref: ShardRef) -> None:
        self.future: Future[pa.Table] = Future()
        self.unwanted = threading.Event()
        self._work = (read, ref)
        threading.Thread(target=self._run, name="edl-remote-shard", daemon=True).start()

    def _run(self) -> None:
        read, ref = self._work
        try:
            self.future.set_result(read(ref, self.unwanted))
        except BaseException as error:  # noqa: BLE001 - top of the thread: passed on to the reading thread
            self.future.set_exception(error)


class RemoteReader:
    """A ``FormatReader`` whose shards are read and decoded on other hosts.

    ``dataset``: name or digest. ``format``, ``columns``, ``options``, ``storage_options``: as for ``open_reader``.
    ``ahead``: number of expected shards that are fetched at once; all may be in memory. ``local``: reads what no reader
    can (``policy="prefer"``); with ``policy="only"`` the trainer waits for a reader instead. ``decode``:
    ``"module:function"``, applied to each batch where it is read. ``timeout_s``: a reader that sends nothing for this
    many seconds is abandoned. Raises ``SettingError``.
    """

    def __init__(
        self,
        pool: Pool,
        dataset: str,
        format: str,
        columns: Sequence[str] | None = None,
        *,
        local: FormatReader | None = None,
        policy: str = "prefer",
        decode: str = "",
        options: FormatOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        depth: int = DEPTH,
        ahead: int = AHEAD,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        if policy not in POLICIES:
            raise SettingError("remote", policy, f"must be one of {', '.join(POLICIES)}")
        if policy == "prefer" and local is None:
            raise ValueError('policy="prefer" needs a local reader')
        if not timeout_s > 0:
            raise SettingError("remote timeout", f"{timeout_s:g}", "must be more than 0 seconds")
        self._pool = pool
        self._local = local if policy == "prefer" else None
        self._ticket = Ticket(
            dataset=dataset,
            format=format,
            index=0,
            file="",
            begin=0,
            end=0,
            records=-1,
            columns=tuple(columns) if columns is not None else None,
            decode=decode,
            options=(options or FormatOptions()).plain(),
            storage=dict(storage_options or {}),
        )
        self._timeout_s = timeout_s
        self._depth = depth
        self._say = say
        self._lock = threading.Lock()
        self._schema: pa.Schema | None = None
        self._ahead = ahead
        self._expected: dict[ShardRef, _Fetch] = {}
        self._closing = threading.Event()
        self._interruptions = 0
        self.counts = ReaderCounts()

    def expect(self, refs: Iterable[ShardRef]) -> None:
        """Announce the shards that will be read next, in order: start fetching the first few and drop earlier
        announcements."""
        wanted = list(itertools.islice(refs, self._ahead))
        with self._lock:
            for ref in [ref for ref in self._expected if ref not in wanted]:
                self._expected.pop(ref).unwanted.set()
            for ref in wanted:
                if ref not in self._expected and not self._closing.is_set():
                    self._expected[ref] = _Fetch(self._read, ref)

    def read(self, ref: ShardRef) -> pa.Table:
        """See ``FormatReader.read``; the table may have many chunks."""
        with self._lock:
            expected = self._expected.pop(ref, None)
        return expected.future.result() if expected is not None else self._read(ref, self._closing)

    def _read(self, ref: ShardRef, unwanted: threading.Event) -> pa.Table:
        batches = []
        for batch in self.batches(ref):
            if unwanted.is_set():
                raise DataError(f"{ref.file}, shard {ref.index}: it is no longer needed")
            batches.append(batch)
        return pa.Table.from_batches(batches, batches[0].schema)

    def interrupt(self) -> None:
        """Make ``read`` raise ``DataError`` instead of waiting for a reader, and drop announced shards."""
        self._interruptions += 1
        self.expect(())
        self._pool.wake()

    def close(self) -> None:
        """Drop announced shards and end running streams. The pool stays open."""
        self._closing.set()
        self.interrupt()
        if self._local is not None:
            self._local.close()

    def batches(
        self, ref: ShardRef, *, upto: int = 0, key: int | None = None, rows: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over the shard's records from number ``upto`` on, as they arrive; yields an empty batch if none are
        left.

        ``key``: of the ``Permutation`` that orders them; None for file order. ``rows``: size of all batches but the
        last; 0 for batches of about 1 MiB. All batches of a data set have the same columns and types. Raises
        ``DataError`` as ``read`` does, and ``UsageError`` for a ``decode`` that readers cannot use.
        """
        ticket = replace(
            self._ticket,
            index=ref.index,
            file=ref.file,
            begin=ref.begin,
            end=ref.end,
            records=ref.records,
            size_bytes=ref.size_bytes,
        )
        return self._checked(_ShardRead(self, replace(ticket, upto=upto, key=key, rows=rows)).run(), ref)

    def _checked(self, batches: Iterator[pa.RecordBatch], ref: ShardRef) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with self._lock:
                if self._schema is None:
                    self._schema = batch.schema
            if batch.schema.names != self._schema.names and set(batch.schema.names) == set(self._schema.names):
                batch = batch.select(self._schema.names)  # a reader uses the column order of its first file
            if not batch.schema.equals(self._schema):
                raise DataError(
                    f"{ref.file}, shard {ref.index}: its columns are {_short(batch.schema)}, those of shards "
                    f"read before {_short(self._schema)}. Set the types (options), or select the common columns"
                )
            yield batch


class _ShardRead:
    """Reads one shard from one or more readers."""

    def __init__(self, owner: RemoteReader, ticket: Ticket) -> None:
        self._owner = owner
        self._ticket = ticket
        self._received = ticket.upto
        self._total = -1
        self._without_access: dict[str, str] = {}
        """Readers without access to the file, with their messages."""
        self._unreached = False
        """One of them has the file, perhaps, but cannot reach it."""
        self._busy: set[str] = set()
        """Readers that were at capacity when asked."""
        self._begun = owner._interruptions
        self._fruitless_attempts = 0
        """Consecutive attempts without any record."""
        self._unexpected_errors = 0
        """Consecutive unexpected errors without a record in between."""
        self._failure_reported = False

    def run(self) -> Iterator[pa.RecordBatch]:
        owner = self._owner
        while True:
            link = owner._pool.take({*self._without_access, *self._busy}, pressing=owner._local is None)
            if link is None and (owner._local is not None or (self._without_access and not self._busy)):
                yield from self._read_locally()
                return
            if link is None:
                if not owner._pool.wait(LOOK_S if self._busy else 1.0) or self._is_over():
                    raise DataError(f"{self._where()}: no remote reader is available, and waiting was cancelled")
                self._busy.clear()
                continue
            failure: _StreamError | None = None
            before = self._received
            finished = False
            try:
                yield from self._from(link)
                finished = True
            except _StreamError as error:
                failure = error
            finally:
                # Also if the consumer stops early, which is not the reader's fault.
                failed = failure is not None and failure.kind not in (
                    RefusalKind.DATA,
                    RefusalKind.SCRIPT,
                    RefusalKind.BUSY,
                )
                owner._pool.give(link, failed=failed)
            if finished:
                owner.counts.remote_shards += 1
                return
            assert failure is not None  # noqa: S101 - either finished or failed
            self._handle_failure(link, failure, self._received > before)

    def _from(self, link: _Link) -> Iterator[pa.RecordBatch]:
        stream = _RecordStream(link, replace(self._ticket, upto=self._received), self._owner._depth)
        nothing_left = False
        try:
            while (piece := stream.next(self._owner._timeout_s)) is not None:
                batch, total = piece
                self._check_total(total)
                if batch.num_rows or self._received == self._ticket.upto:
                    self._received += batch.num_rows
                    if self._received > total:
                        raise DataError(f"{self._where()}: {link} sent more than its {total} records")
                    yield batch
                nothing_left = self._received == total
        finally:
            stream.close()
        if not nothing_left:
            raise _StreamError(f"ended the stream after {self._received} of {self._total} records")

    def _check_total(self, total: int) -> None:
        if self._total not in (-1, total):
            raise DataError(
                f"{self._where()}: has {total} records for one reader and {self._total} for another. Do all nodes see "
                "the same file? Do not change files while a job runs"
            )
        self._total = total

    def _handle_failure(self, link: _Link, error: _StreamError, progress: bool) -> None:
        """Classify a failure; returns if another reader should be tried. Raises ``DataError`` and ``UsageError``."""
        if error.kind == RefusalKind.DATA:
            raise DataError(str(error))
        if error.kind == RefusalKind.SCRIPT:
            raise UsageError(f"{link}: {error}")
        if error.kind == RefusalKind.BUSY:
            self._busy.add(link.where.id)
            return
        if progress:
            self._unexpected_errors = self._fruitless_attempts = 0
        else:
            self._fruitless_attempts += 1
        if error.kind in (RefusalKind.MISSING, RefusalKind.UNREACHED):
            self._without_access[link.where.id] = f"{link}: {error}"
            self._unreached = self._unreached or error.kind == RefusalKind.UNREACHED
        elif error.kind:
            self._unexpected_errors += 1
            if self._unexpected_errors >= MOST_UNEXPECTED_ERRORS and self._owner._local is None:
                failures = f"{self._unexpected_errors} readers failed"
                raise DataError(f"{self._where()}: {failures}; the last one, {link}: {error}")
        if not self._failure_reported:
            self._failure_reported = True
            self._owner._say(
                f"{link}: {error}. Continuing at record {self._received} of {self._where()} with another reader"
            )
        self._owner.counts.takeovers += 1
        if self._fruitless_attempts > len(self._owner._pool):  # do not retry too often
            self._owner._pool.wait(LOOK_S)
            if self._is_over():
                raise DataError(f"{self._where()}: no remote reader responds, and waiting was cancelled")

    def _is_over(self) -> bool:
        return self._owner._closing.is_set() or self._owner._interruptions != self._begun

    def _read_locally(self) -> Iterator[pa.RecordBatch]:
        """Read in this process if allowed. Raises ``DataError``."""
        owner, ticket = self._owner, self._ticket
        if owner._local is None:
            listed = "; ".join(self._without_access.values())
            text = f"{self._where()}: no reader can open it: {listed}. Do the readers have access to these files?"
            raise UnreachableData(text) if self._unreached else DataError(text)
        owner.counts.local_shards += 1
        table = owner._local.read(ticket.ref)
        self._check_total(table.num_rows)
        if self._received == table.num_rows and self._received > ticket.upto:
            return
        decode = function_named(ticket.decode)
        yield from batches_of(table, ticket.key, self._received, ticket.rows, decode, ticket.decode)

    def _where(self) -> str:
        return f"{self._ticket.file}, shard {self._ticket.index}"


def _short(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
