"""Remote readers, a trainer's side: shards that other processes read and decode, as if they had been read here.

``Pool`` is the list of living readers, as the Master tells it. ``RemoteReader`` is a ``Reader`` that asks one of them
and goes on at another, from the next record on, when that one dies, freezes or cannot. The trainer holds the shard's
lease all the time, so the accounting is the same as for a shard that it has read itself.
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

from data_service.formats import Reader
from data_service.formats.options import Options
from data_service.manifest import ShardRef
from data_service.remote.flight import RefusalKind, Ticket, batches_of, function_named
from data_service.remote.tls import client_arguments
from edl.errors import DataError, SettingError, UsageError
from edl.wire.address import address

PATIENCE_S = 30.0
"""A reader that is asked and sends nothing for so long is given up."""
GONE_PATIENCE_S = 3.0
"""The same for one that is not on the list any more."""
LOOK_S = 0.25
"""How often somebody who waits looks whether the list has changed."""
LIFETIME_S = 1800.0
"""Longest life of one stream. It bounds what a reader keeps for a trainer that vanished without a word; a trainer that
is slower than that goes on with a new stream."""
DEPTH = 4
"""Batches that one stream holds ready."""
MOST_ANSWERS = 3
"""So many readers in a row may answer with an unexpected error before the shard counts as unreadable."""
MOST_PASSES = 64
AHEAD = 4
"""Shards that are fetched at once, from as many readers as there are."""
POLICIES = ("prefer", "only")

_log = logging.getLogger(__name__)


class Address(NamedTuple):
    """A living reader, as in the message ``Readers``."""

    id: str
    host: str
    port: int
    secret: str
    authority: str
    """Of its certificate and ours; empty: it speaks no TLS."""


class _Link:
    """What this process knows of one reader."""

    def __init__(self, where: Address) -> None:
        self.where = where
        self.streams = 0
        self.passes = 0
        """How many times it is still passed over, after it has failed."""
        self.failures = 0
        self.listed = True
        self._client: fl.FlightClient | None = None

    def client(self) -> fl.FlightClient:
        if self._client is None:
            # Addresses of a cluster are not for a proxy.
            where = client_arguments(self.where.host, self.where.port, self.where.authority)
            self._client = fl.FlightClient(**where, generic_options=[("grpc.enable_http_proxy", 0)])
        return self._client

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(pa.ArrowException):
                client.close()

    def __str__(self) -> str:
        return f"reader {self.where.id} at {address(self.where.host, self.where.port)}"


class Pool:
    """The readers of a job. All methods may be called from any thread; one pool serves all data sets of a worker.

    ``first``: where to begin among equals, such as the rank, so that trainers do not all ask the same reader.
    """

    def __init__(self, first: int = 0) -> None:
        self._changed = threading.Condition()
        self._links: dict[str, _Link] = {}
        self._turn = first
        self._closed = False

    def update(self, readers: Iterable[Sequence[Any]], authority: str = "") -> None:
        """The new list, each ``(id, host, port, secret)``. Streams of readers that have left it may still end well.
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
        """The reader with the fewest streams of this process, in turn among equals; None when there is none.

        One that has failed is passed over for a number of times that doubles with each failure, unless it is
        ``pressing``. Give it back with ``give``.
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
        """A stream of this reader has ended."""
        with self._changed:
            link.streams -= 1
            link.failures = min(link.failures + 1, 10) if failed else 0
            link.passes = min(MOST_PASSES, 2**link.failures) if failed else 0
            if not (link.listed or link.streams):
                link.close()
            self._changed.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Until the list or the streams have changed, or so long; False when the pool has been closed."""
        with self._changed:
            if not self._closed:
                self._changed.wait(limit_s)
            return not self._closed

    def wake(self) -> None:
        """Whoever waits looks again whether it still has to."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody reads any more. Whoever waits for a reader is told."""
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
    """The pool of this process. ``first`` counts at the first call."""
    with _sharing:
        if not _shared:
            _shared.append(Pool(first))
        return _shared[0]


class _Trouble(Exception):
    """A stream has ended early. ``kind`` as the reader says it; empty when it said nothing."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


class _RecordStream:
    """One call. A thread receives, at most ``depth`` batches ahead of whoever takes them."""

    def __init__(self, link: _Link, ticket: Ticket, depth: int) -> None:
        self._link = link
        self._pieces: queue.Queue[Any] = queue.Queue(depth)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reader: fl.FlightStreamReader | None = None
        self._thread = threading.Thread(target=self._receive, args=(ticket.encode(),), name="edl-remote", daemon=True)
        self._thread.start()

    def next(self, patience_s: float) -> tuple[pa.RecordBatch, int] | None:
        """The next batch and the number of records in the whole shard; None at the end. Raises ``_Trouble``."""
        waited_s, piece = 0.0, None
        while True:
            try:
                piece = self._pieces.get(timeout=LOOK_S)
                break
            except queue.Empty:
                waited_s += LOOK_S
                limit_s = patience_s if self._link.listed else min(patience_s, GONE_PATIENCE_S)
                if waited_s >= limit_s:
                    raise _Trouble(f"sent nothing for {waited_s:g} s") from None
        if isinstance(piece, BaseException):
            raise _understood(piece)
        if piece is None:
            return None
        return piece.data, int(piece.app_metadata.to_pybytes())

    def close(self) -> None:
        """Have the reader stop. The thread ends soon, or when the call's time is over."""
        with self._lock:
            self._closed.set()
            reader = self._reader
        if reader is not None:
            reader.cancel()
        with contextlib.suppress(queue.Empty):  # a thread that waits for room goes on, and sees that it is over
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
        except Exception as error:  # noqa: BLE001 - the top of this thread: whoever takes the batches is told
            self._put(error)

    def _put(self, piece: Any) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._pieces.put(piece, timeout=LOOK_S)
                return True
        return False


def _understood(error: BaseException) -> _Trouble:
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        told = json.loads(error.extra_info)  # type: ignore[attr-defined]
        return _Trouble(str(told["text"]), str(told["kind"]))
    first = str(error).partition(". gRPC client debug context")[0]
    return _Trouble(f"{type(error).__name__}: {first}")


@dataclass(slots=True)
class ReaderCounts:
    """What a ``RemoteReader`` has done so far."""

    remote_shards: int = 0
    local_shards: int = 0
    """Read here, in part at least, because no reader could."""
    takeovers: int = 0
    """Times that another reader, or this process, had to go on."""


class _Fetch:
    """A shard that is fetched in a thread of its own, which does not keep the process alive."""

    def __init__(self, read: Callable[[ShardRef, threading.Event], pa.Table], ref: ShardRef) -> None:
        self.future: Future[pa.Table] = Future()
        self.unwanted = threading.Event()
        self._work = (read, ref)
        threading.Thread(target=self._run, name="edl-remote-shard", daemon=True).start()

    def _run(self) -> None:
        read, ref = self._work
        try:
            self.future.set_result(read(ref, self.unwanted))
        except BaseException as error:  # noqa: BLE001 - the top of this thread: whoever reads the shard is told
            self.future.set_exception(error)


class RemoteReader:
    """A ``Reader`` whose shards are read and decoded elsewhere.

    ``dataset``: name or digest. ``format``, ``columns``, ``options``, ``storage_options``: as for ``open_reader``.
    ``ahead``: so many of the shards that ``expect`` has named are fetched at once; they may all be in memory.
    ``local``: reads here what no reader can (``policy="prefer"``); with ``policy="only"`` the trainer waits for a
    reader instead. ``decode``: ``"module:function"``, applied to each batch where it is read. ``patience_s``: a reader
    that sends nothing for so long is given up. Raises ``SettingError``.
    """

    def __init__(
        self,
        pool: Pool,
        dataset: str,
        format: str,
        columns: Sequence[str] | None = None,
        *,
        local: Reader | None = None,
        policy: str = "prefer",
        decode: str = "",
        options: Options | None = None,
        storage_options: Mapping[str, Any] | None = None,
        patience_s: float = PATIENCE_S,
        depth: int = DEPTH,
        ahead: int = AHEAD,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        if policy not in POLICIES:
            raise SettingError("remote", policy, f"must be one of {', '.join(POLICIES)}")
        if policy == "prefer" and local is None:
            raise ValueError('policy="prefer" needs a local reader')
        if not patience_s > 0:
            raise SettingError("remote patience", f"{patience_s:g}", "must be more than 0 seconds")
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
            options=(options or Options()).plain(),
            storage=dict(storage_options or {}),
        )
        self._patience_s = patience_s
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
        """These will be read next, in this order: begin to fetch the first few, and forget what was expected before."""
        wanted = list(itertools.islice(refs, self._ahead))
        with self._lock:
            for ref in [ref for ref in self._expected if ref not in wanted]:
                self._expected.pop(ref).unwanted.set()
            for ref in wanted:
                if ref not in self._expected and not self._closing.is_set():
                    self._expected[ref] = _Fetch(self._read, ref)

    def read(self, ref: ShardRef) -> pa.Table:
        """See ``Reader.read``; the table may consist of many chunks."""
        with self._lock:
            expected = self._expected.pop(ref, None)
        return expected.future.result() if expected is not None else self._read(ref, self._closing)

    def _read(self, ref: ShardRef, unwanted: threading.Event) -> pa.Table:
        batches = []
        for batch in self.batches(ref):
            if unwanted.is_set():
                raise DataError(f"{ref.file}, shard {ref.index}: nobody wants it any more")
            batches.append(batch)
        return pa.Table.from_batches(batches, batches[0].schema)

    def interrupt(self) -> None:
        """Who waits for a reader now waits in vain: ``read`` raises ``DataError``. What was expected is forgotten."""
        self._interruptions += 1
        self.expect(())
        self._pool.wake()

    def close(self) -> None:
        """See ``Reader.close``. The pool goes on."""
        self._closing.set()
        self.interrupt()
        if self._local is not None:
            self._local.close()

    def batches(
        self, ref: ShardRef, *, upto: int = 0, key: int | None = None, rows: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """The shard's records from number ``upto`` on, as they come; one empty batch when none is left.

        ``key``: of the ``Permutation`` that is their order, None for that of the file. ``rows``: of each batch but the
        last; 0 for batches of about a megabyte. All batches of a data set have the same columns of the same types.
        Raises ``DataError`` as ``read`` does, and ``UsageError`` for a ``decode`` that readers cannot use.
        """
        ticket = replace(
            self._ticket, index=ref.index, file=ref.file, begin=ref.begin, end=ref.end, records=ref.records
        )
        return self._checked(_ShardRead(self, replace(ticket, upto=upto, key=key, rows=rows)).run(), ref)

    def _checked(self, batches: Iterator[pa.RecordBatch], ref: ShardRef) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with self._lock:
                if self._schema is None:
                    self._schema = batch.schema
            if batch.schema.names != self._schema.names and set(batch.schema.names) == set(self._schema.names):
                batch = batch.select(self._schema.names)  # each reader takes the order of the first file it has opened
            if not batch.schema.equals(self._schema):
                raise DataError(
                    f"{ref.file}, shard {ref.index}: its columns are {_short(batch.schema)}, those of shards "
                    f"read before {_short(self._schema)}. Name the types (options), or the columns that all files have"
                )
            yield batch


class _ShardRead:
    """One shard, from reader to reader."""

    def __init__(self, owner: RemoteReader, ticket: Ticket) -> None:
        self._owner = owner
        self._ticket = ticket
        self._got = ticket.upto
        self._total = -1
        self._lacking: dict[str, str] = {}
        """Readers that have no such file, and what they say."""
        self._busy: set[str] = set()
        """Readers that had too much to do when they were asked."""
        self._begun = owner._interruptions
        self._vain = 0
        """Readers asked in a row without a single record."""
        self._answers = 0
        """Unexpected errors in a row, without a record in between."""
        self._troubled = False

    def run(self) -> Iterator[pa.RecordBatch]:
        owner = self._owner
        while True:
            link = owner._pool.take({*self._lacking, *self._busy}, pressing=owner._local is None)
            if link is None and (owner._local is not None or (self._lacking and not self._busy)):
                yield from self._here()
                return
            if link is None:
                if not owner._pool.wait(LOOK_S if self._busy else 1.0) or self._is_over():
                    raise DataError(f"{self._where()}: no remote reader is left, and nobody waits for one any more")
                self._busy.clear()
                continue
            trouble: _Trouble | None = None
            before = self._got
            finished = False
            try:
                yield from self._from(link)
                finished = True
            except _Trouble as error:
                trouble = error
            finally:
                # Also when whoever takes the batches has enough of them: that is no fault of the reader.
                failed = trouble is not None and trouble.kind not in (
                    RefusalKind.DATA,
                    RefusalKind.SCRIPT,
                    RefusalKind.BUSY,
                )
                owner._pool.give(link, failed=failed)
            if finished:
                owner.counts.remote_shards += 1
                return
            assert trouble is not None  # noqa: S101 - it has either finished or not
            self._judge(link, trouble, self._got > before)

    def _from(self, link: _Link) -> Iterator[pa.RecordBatch]:
        stream = _RecordStream(link, replace(self._ticket, upto=self._got), self._owner._depth)
        nothing_left = False
        try:
            while (piece := stream.next(self._owner._patience_s)) is not None:
                batch, total = piece
                self._check_total(total)
                if batch.num_rows or self._got == self._ticket.upto:
                    self._got += batch.num_rows
                    if self._got > total:
                        raise DataError(f"{self._where()}: {link} sent more than its {total} records")
                    yield batch
                nothing_left = self._got == total
        finally:
            stream.close()
        if not nothing_left:
            raise _Trouble(f"ended the stream after {self._got} of {self._total} records")

    def _check_total(self, total: int) -> None:
        if self._total not in (-1, total):
            raise DataError(
                f"{self._where()}: has {total} records for one reader and {self._total} for another. Do all nodes see "
                "the same file? Do not change files while a job runs"
            )
        self._total = total

    def _judge(self, link: _Link, trouble: _Trouble, progress: bool) -> None:
        """Return when another reader should be asked."""
        if trouble.kind == RefusalKind.DATA:
            raise DataError(str(trouble))
        if trouble.kind == RefusalKind.SCRIPT:
            raise UsageError(f"{link}: {trouble}")
        if trouble.kind == RefusalKind.BUSY:
            self._busy.add(link.where.id)
            return
        self._answers, self._vain = (0, 0) if progress else (self._answers, self._vain + 1)
        if trouble.kind == RefusalKind.MISSING:
            self._lacking[link.where.id] = f"{link}: {trouble}"
        elif trouble.kind:
            self._answers += 1
            if self._answers >= MOST_ANSWERS and self._owner._local is None:
                raise DataError(f"{self._where()}: {MOST_ANSWERS} readers have failed; the last one, {link}: {trouble}")
        if not self._troubled:
            self._troubled = True
            self._owner._say(f"{link}: {trouble}. Going on at record {self._got} of {self._where()} elsewhere")
        self._owner.counts.takeovers += 1
        if self._vain > len(self._owner._pool):  # they are asked again and again: not too often
            self._owner._pool.wait(LOOK_S)
            if self._is_over():
                raise DataError(f"{self._where()}: no remote reader answers, and nobody waits for one any more")

    def _is_over(self) -> bool:
        return self._owner._closing.is_set() or self._owner._interruptions != self._begun

    def _here(self) -> Iterator[pa.RecordBatch]:
        """In this process, where that is allowed."""
        owner, ticket = self._owner, self._ticket
        if owner._local is None:
            listed = "; ".join(self._lacking.values())
            raise DataError(f"{self._where()}: no reader can open it: {listed}. Do the readers see these files?")
        owner.counts.local_shards += 1
        table = owner._local.read(ticket.ref)
        self._check_total(table.num_rows)
        if self._got == table.num_rows and self._got > ticket.upto:
            return
        yield from batches_of(table, ticket.key, self._got, ticket.rows, function_named(ticket.decode), ticket.decode)

    def _where(self) -> str:
        return f"{self._ticket.file}, shard {self._ticket.index}"


def _short(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
