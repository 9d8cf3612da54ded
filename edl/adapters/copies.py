"""Copies snapshots from one launcher's memory to another's, over TCP.

Each connection carries one request, served by its own thread so that the launcher's event loop never blocks:

1. Both sides prove that they belong to this job (``copy_connection``).
2. The client sends one frame: ``put`` with a label and a checksum, ``get``, ``header``, or ``read`` followed by the
   ranges. Further connections for the same ``get`` only help, and the server refuses some of them.
3. The server answers ``go`` (or the label, or sizes), ``have``, or ``no`` with a reason; ``wait`` means that it is
   still preparing. Memory is allocated before the first byte is sent.
4. The bytes follow, by ``sendfile`` on one side and directly into memory on the other. After a ``put`` a last frame
   says whether they arrived intact. After a ``get`` the client asks for one range after the other, up to ``done``; each
   is followed by its checksum, as is a ``read``.

Data is accepted only if its CRC-32 is right. Every socket operation has a deadline, and so has the transfer as a whole.
Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edl.adapters.copy_connection import CopyConnection, CopyLimits, admit, call, check_sum, count_in, short
from edl.adapters.file_copies import CHANGES, FILE, give_changes, give_file
from edl.adapters.range_fetch import RangeFetch
from edl.errors import CheckpointError, PortInUse, ProtocolError
from edl.ports import Arrival, Clock, FileSource, Label, Lent, Piece, SnapshotPool
from edl.types import NodeId
from edl.wire.address import address
from edl.wire.parts import PartRange, check_ranges
from edl.wire.records import Holding, Version
from edl.wire.snapshot import raw_header

log = logging.getLogger(__name__)

HELPING_SHARE = 4
"""One in so many connections served at once may only help another one of the same client. With more, few clients would
take all places, and those that come later would get no answer in time."""
FILES_SHARE = 2
"""One in so many connections served at once may be about files of synchronised directories: those wait for a disk,
which may hang, and the state must be served all the same."""
ACCEPT_AGAIN_S = 1.0
"""Pause after a connection that could not be accepted, probably for lack of descriptors."""
_RANGE = struct.Struct(">QQ")
_MOST_RANGES = 1_000_000
_BACKGROUND_NICENESS = 15


class TcpCopies:
    """Implements ``edl.ports.Copies`` over TCP."""

    def __init__(
        self,
        node: NodeId,
        token: Callable[[], str],
        clock: Clock,
        limits: CopyLimits | None = None,
        *,
        rate_bytes_per_s: int = 0,
        files: FileSource | None = None,
    ) -> None:
        """``rate_bytes_per_s`` limits the copies that this node sends (``put``), 0: no limit. Replies to ``get`` are
        never limited, because the other node needs them at once. ``files``: what is served of synchronised
        directories."""
        self._files = files
        self._rate = rate_bytes_per_s
        self._ended = threading.Event()
        self._node = node
        self._token = token
        self._clock = clock
        self._limits = limits or CopyLimits()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._places = threading.BoundedSemaphore(self._limits.connections)
        self._filing = threading.Semaphore(max(1, self._limits.connections // FILES_SHARE))
        self._helping = threading.Semaphore(max(1, self._limits.connections // HELPING_SHARE))
        self._stopped = False
        self._listener: socket.socket | None = None

    def start(self, snapshot_pool: SnapshotPool, host: str, port: int = 0) -> int:
        """Start serving other nodes; returns the port. Raises ``PortInUse``."""
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=self._limits.connections)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {address(host, port)} for copies of the state: {error.strerror}. Name an address of "
                "this host with --local-addr"
            ) from error
        self._launch(self._accept, self._listener, snapshot_pool)
        return int(self._listener.getsockname()[1])

    def put(self, host: str, port: int, lent: Lent, *, urgent: bool = False) -> None:
        """Send a copy to another node; returns when that node has all of it. Raises ``CheckpointError``."""
        label = lent.label
        # Before the call: beside training the checksum of a large state takes longer than the peer waits for a request.
        how = {"crc32": lent.crc32, **({"urgent": True} if urgent else {})}
        with self._call(host, port) as line:
            line.send_frame({"op": "put", **_from_label(label), **how})
            answer = line.receive_answer()
            if "have" in answer:
                return
            if "go" not in answer:
                raise ProtocolError(f"unexpected answer to put: {short(answer)}")
            line.send_file(lent.descriptor, label.size, self._rate, self._ended.wait)
            answer = line.receive_answer()
            if "whole" not in answer:
                raise ProtocolError(f"unexpected answer at the end of a copy: {short(answer)}")

    def get(
        self, host: str, port: int, version: Version, shard: int, arriving: Callable[[Label], Arrival | None]
    ) -> None:
        """Fetch a part of a commit from another node. Raises ``CheckpointError``."""
        with self._asked(host, port, version, shard) as (line, label):
            arrival = line.wait_for(lambda: arriving(label), _discard)
            if arrival is None:
                return
            try:
                what = f"shard {shard} of {version}"
                RangeFetch(arrival.view, what).run(
                    line,
                    lambda: self._asked_again(host, port, label, helps=True),
                    lambda: self._asked_again(host, port, label, helps=False),
                )
                arrival.accept()
            finally:
                arrival.discard()

    @contextlib.contextmanager
    def _asked(
        self, host: str, port: int, version: Version, shard: int, *, helps: bool = False
    ) -> Iterator[tuple[CopyConnection, Label]]:
        """A connection on which a node offers a part of a commit. ``helps``: it is not the first one of a transfer."""
        with self._call(host, port) as line:
            line.send_frame({"op": "get", **_from_part(version, shard), **({"helps": True} if helps else {})})
            label = _to_label(line.receive_answer())
            if (label.holding.version, label.holding.shard) != (version, shard):
                raise ProtocolError(f"the peer sent {label.holding} instead of shard {shard} of {version}")
            yield line, label

    @contextlib.contextmanager
    def _asked_again(self, host: str, port: int, label: Label, *, helps: bool) -> Iterator[CopyConnection]:
        """Another connection on which the same snapshot is offered. ``helps``: as in ``_asked``."""
        holding = label.holding
        with self._asked(host, port, holding.version, holding.shard, helps=helps) as (line, again):
            if (again.holding, again.size) != (holding, label.size):
                raise ProtocolError(f"the peer offers {again} and {label}")
            yield line

    def header(self, host: str, port: int, version: Version, shard: int) -> tuple[bytes, int]:
        """The header of a part in another node's memory, and the size of the part. Raises ``CheckpointError``."""
        with self._call(host, port) as line:
            line.send_frame({"op": "header", **_from_part(version, shard)})
            answer = line.receive_answer()
            length, size = count_in(answer, "header"), count_in(answer, "size")
            line.within(line.time_for(length))
            return line.read(length), size

    def read(self, host: str, port: int, version: Version, shard: int, pieces: Sequence[Piece]) -> None:
        """Read ranges of a part in another node's memory. Raises ``CheckpointError``."""
        with self._call(host, port) as line:
            line.send_frame({"op": "read", **_from_part(version, shard), "ranges": len(pieces)})
            line.write(b"".join(_RANGE.pack(one.start, one.size) for one, _ in pieces))
            if "go" not in (answer := line.receive_answer()):
                raise ProtocolError(f"unexpected answer to read: {short(answer)}")
            line.within(line.time_for(sum(one.size for one, _ in pieces)))
            crc32 = 0
            for _, view in pieces:
                crc32 = line.read_into(view, crc32)
            check_sum(f"a piece of shard {shard} of {version}", crc32, count_in(line.receive_answer(), "crc32"))

    def stop(self) -> None:
        """Abort all transfers in both directions and stop serving."""
        self._ended.set()
        with self._lock:
            self._stopped = True
            sockets, threads = list(self._open), list(self._threads)
        if self._listener is not None:
            _hang_up(self._listener)
            self._listener.close()
        for one in sockets:
            _hang_up(one)
        with contextlib.suppress(ValueError):
            self._places.release()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(1.0)

    # --- client ------------------------------------------------------------------------------------------------------

    def _call(self, host: str, port: int) -> contextlib.AbstractContextManager[CopyConnection]:
        """A connection to a node that has proved to belong to this job. Failures in the block become
        ``CheckpointError``."""
        return call(host, port, self._token(), self._clock, self._limits, self._live)

    @contextlib.contextmanager
    def _live(self, connection: socket.socket) -> Iterator[None]:
        """Let ``stop`` shut this connection down while the block runs."""
        with self._lock:
            if self._stopped:
                raise ProtocolError("this launcher is ending")
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    # --- server ------------------------------------------------------------------------------------------------------

    def _launch(self, target: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                target(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="edl-copies", daemon=True)
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def _accept(self, listener: socket.socket, snapshot_pool: SnapshotPool) -> None:
        said = ""
        while True:
            self._places.acquire()
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._stopped or listener.fileno() < 0:
                    return
                if str(error) != said:
                    said = str(error)
                    log.warning("Snapshot copies: cannot accept a connection: %s", said)
                self._places.release()
                self._ended.wait(ACCEPT_AGAIN_S)
                continue
            said = ""
            try:
                self._launch(self._serve, connection, snapshot_pool)
            except RuntimeError as error:  # there can be no further thread at present
                log.warning("Snapshot copies: cannot serve a connection: %s", error)
                connection.close()
                self._places.release()

    def _serve(self, connection: socket.socket, snapshot_pool: SnapshotPool) -> None:
        try:
            with connection, self._live(connection):
                line = CopyConnection(connection, self._clock, self._limits)
                admit(line, self._token())
                request = line.receive_frame()
                match request.get("op"):
                    case "put":
                        self._take(line, snapshot_pool, request)
                    case "get" if request.get("helps") is True:
                        self._help(line, snapshot_pool, request)
                    case "get":
                        self._give(line, snapshot_pool, request)
                    case "header":
                        self._give_header(line, snapshot_pool, request)
                    case "read":
                        self._give_ranges(line, snapshot_pool, request)
                    case kind if kind in (CHANGES, FILE) and self._files is not None:
                        self._give_files(line, self._files, request)
                    case other:
                        raise ProtocolError(f"unknown request {other!r}")
        except (OSError, ProtocolError, CheckpointError) as error:
            log.debug("Snapshot copies: a connection ended: %s", error)
        except Exception:
            log.exception("Snapshot copies: a request failed")
        finally:
            with contextlib.suppress(ValueError):
                self._places.release()

    def _take(self, line: CopyConnection, snapshot_pool: SnapshotPool, request: dict[str, Any]) -> None:
        label, crc32 = _to_label(request), count_in(request, "crc32")
        if request.get("urgent") is not True:
            _lower_priority()  # copies arrive while workers train
        try:
            arrival = line.wait_for(lambda: snapshot_pool.arriving(label), _discard)
        except CheckpointError as error:
            line.refuse(str(error))
            return
        if arrival is None:
            line.send_frame({"have": True})
            return
        try:
            line.send_frame({"go": True})
            _receive(line, label, crc32, arrival)
        except CheckpointError as error:
            line.refuse(str(error))
            return
        finally:
            arrival.discard()
        line.send_frame({"whole": True})

    def _give_files(self, line: CopyConnection, files: FileSource, request: dict[str, Any]) -> None:
        if not self._filing.acquire(timeout=self._limits.silence_s / 3):
            line.refuse(f"node {self._node} serves too many requests for files already; does its disk hang?")
            return
        try:
            if request["op"] == CHANGES:
                give_changes(line, files, request)
            else:
                _lower_priority()
                give_file(line, files, request)
        finally:
            self._filing.release()

    def _help(self, line: CopyConnection, snapshot_pool: SnapshotPool, request: dict[str, Any]) -> None:
        if not self._helping.acquire(blocking=False):
            line.refuse("enough connections help already")
            return
        try:
            self._give(line, snapshot_pool, request)
        finally:
            self._helping.release()

    def _give(self, line: CopyConnection, snapshot_pool: SnapshotPool, request: dict[str, Any]) -> None:
        version, shard = _to_part(request)
        with self._held(line, version, shard, snapshot_pool.borrow) as lent:
            if lent is None:
                return
            line.send_frame(_from_label(lent.label))
            while "done" not in (asked := line.receive_answer()):
                wanted = PartRange(shard, count_in(asked, "start"), count_in(asked, "size"))
                check_ranges([wanted], lent.label.size, f"shard {shard} of {version}")
                line.send_frame({"crc32": line.send_checked(lent.descriptor, lent.view, wanted.start, wanted.size)})

    def _give_header(self, line: CopyConnection, snapshot_pool: SnapshotPool, request: dict[str, Any]) -> None:
        with self._held(line, *_to_part(request), snapshot_pool.borrow) as lent:
            if lent is not None:
                header = raw_header(lent.view)
                line.send_frame({"header": len(header), "size": len(lent.view)})
                line.write(header)

    def _give_ranges(self, line: CopyConnection, snapshot_pool: SnapshotPool, request: dict[str, Any]) -> None:
        (version, shard), count = _to_part(request), count_in(request, "ranges")
        if count > _MOST_RANGES:
            raise ProtocolError(f"{count} ranges in one request; at most {_MOST_RANGES} are allowed")
        ranges = [PartRange(shard, *one) for one in _RANGE.iter_unpack(line.read(count * _RANGE.size))]
        with self._held(line, version, shard, snapshot_pool.borrow) as lent:
            if lent is None:
                return
            view = lent.view
            try:
                check_ranges(ranges, len(view), f"shard {shard} of {version}")
            except CheckpointError as error:
                line.refuse(str(error))
                return
            line.send_frame({"go": True})
            crc32 = 0
            for one in ranges:
                crc32 = line.send_checked(lent.descriptor, view, one.start, one.size, crc32)
            line.send_frame({"crc32": crc32})

    @contextlib.contextmanager
    def _held(
        self, line: CopyConnection, version: Version, shard: int, lend: Callable[[Version, int], Lent | None]
    ) -> Iterator[Lent | None]:
        """The part that is asked for, until the block ends; None, after a refusal to the peer, if it is not here."""
        lent = lend(version, shard)
        if lent is None:
            line.refuse(f"node {self._node} does not hold shard {shard} of {version} any more")
        try:
            yield lent
        finally:
            _release(lent)


def _receive(line: CopyConnection, label: Label, expected: int, arrival: Arrival) -> None:
    """Receive a snapshot into its memory and accept it if its checksum is right."""
    try:
        line.within(line.time_for(label.size))
        crc32 = line.read_into(arrival.view)
        check_sum(f"shard {label.holding.shard} of {label.holding.version}", crc32, expected)
        arrival.accept(crc32)
    finally:
        arrival.discard()


def _from_part(version: Version, shard: int) -> dict[str, Any]:
    return {"era": version.era, "commit": version.commit, "shard": shard}


def _to_part(frame: dict[str, Any]) -> tuple[Version, int]:
    return Version(count_in(frame, "era"), count_in(frame, "commit")), count_in(frame, "shard")


def _from_label(label: Label) -> dict[str, Any]:
    holding = label.holding
    return {
        "owner": label.owner,
        "era": holding.version.era,
        "commit": holding.version.commit,
        "shard": holding.shard,
        "shards": holding.shards,
        "size": label.size,
        "owed_era": label.owed.era,
        "owed_commit": label.owed.commit,
    }


def _to_label(frame: dict[str, Any]) -> Label:
    owner = frame.get("owner")
    version = Version(count_in(frame, "era"), count_in(frame, "commit"))
    holding = Holding(version, count_in(frame, "shard"), count_in(frame, "shards"))
    owed = Version(count_in(frame, "owed_era"), count_in(frame, "owed_commit"))
    label = Label(NodeId(str(owner)), holding, count_in(frame, "size"), owed)
    if not isinstance(owner, str) or not owner or holding.shard >= holding.shards or not label.size:
        raise ProtocolError(f"not a label: {short(frame)}")
    return label


def _discard(arrival: Arrival | None) -> None:
    if arrival is not None:
        arrival.discard()


def _release(lent: Lent | None) -> None:
    if lent is not None:
        lent.release()


def _lower_priority() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
