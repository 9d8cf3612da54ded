"""Copies snapshots from one launcher's memory to another's, over TCP.

Each connection carries one request, served by its own thread so that the launcher's event loop never blocks:

1. Both sides prove that they know the job token, by HMAC over both sides' nonces; the token itself is never sent.
2. The client sends ``put`` with a label, or ``get``, as one frame: four bytes of length, then JSON.
3. The server answers ``go`` (or the label), ``have``, or ``no`` with a reason; ``wait`` means that it is still
   preparing. Memory is allocated before the first byte is sent.
4. The bytes follow, by ``sendfile`` on one side and directly into the memory file on the other. After a ``put`` a last
   frame says whether they arrived intact.

Data is accepted only if its CRC-32 matches the label. Every socket operation has a deadline, and so has the transfer as
a whole. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from edl.errors import CheckpointError, PortInUse, ProtocolError
from edl.ports import Arrival, Clock, Label, Lent, SnapshotPool
from edl.types import NodeId
from edl.wire import proof
from edl.wire.address import address
from edl.wire.messages import Holding, Version

T = TypeVar("T")
log = logging.getLogger(__name__)

_MAGIC = b"edlcopy1"
_LENGTH = struct.Struct(">I")
_LONGEST_FRAME = 4096
_LONGEST_REASON = 1000
_CHUNK_BYTES = 4 * 1024 * 1024
_LARGEST_BYTES = 1 << 50
_BACKGROUND_NICENESS = 15
PIECES_A_SECOND = 20
"""A rate-limited copy is sent in this many pieces per second, to spread the load."""


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Timeouts (seconds) and the maximum number of connections."""

    connect_s: float = 5.0
    handshake_s: float = 10.0
    """From the connection to the request."""
    silence_s: float = 10.0
    """Maximum time without receiving or sending a byte."""
    slowest_bytes_per_s: float = 1024 * 1024
    """Average rate below which a transfer is aborted."""
    connections: int = 64
    """Connections served at once. Others wait in the kernel's queue, for at most ``handshake_s``."""


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
    ) -> None:
        """``rate_bytes_per_s`` limits the copies that this node sends (``put``), 0: no limit. Replies to ``get`` are
        never limited, because the other node needs them at once."""
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
        with self._call(host, port) as line:
            line.send_frame({"op": "put", **_from_label(label), **({"urgent": True} if urgent else {})})
            answer = line.receive_answer()
            if "have" in answer:
                return
            if "go" not in answer:
                raise ProtocolError(f"unexpected answer to put: {_short(answer)}")
            line.send_file(lent.descriptor, label.size, self._rate, self._ended.wait)
            answer = line.receive_answer()
            if "whole" not in answer:
                raise ProtocolError(f"unexpected answer at the end of a copy: {_short(answer)}")

    def get(
        self, host: str, port: int, version: Version, shard: int, arriving: Callable[[Label], Arrival | None]
    ) -> None:
        """Fetch a part of a commit from another node. Raises ``CheckpointError``."""
        with self._call(host, port) as line:
            line.send_frame({"op": "get", "era": version.era, "commit": version.commit, "shard": shard})
            label = _to_label(line.receive_answer())
            if (label.holding.version, label.holding.shard) != (version, shard):
                raise ProtocolError(f"the peer sent {label.holding} instead of shard {shard} of {version}")
            arrival = arriving(label)
            if arrival is not None:
                line.send_frame({"go": True})
                _receive(line, label, arrival)

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

    @contextlib.contextmanager
    def _call(self, host: str, port: int) -> Iterator[_CopyConnection]:
        """A connection to a node that has proved to belong to this job. Failures in the block become
        ``CheckpointError``."""
        try:
            with socket.create_connection((host, port), self._limits.connect_s) as connection, self._live(connection):
                line = _CopyConnection(connection, self._clock, self._limits)
                _introduce(line, self._token())
                yield line
        except (OSError, ProtocolError) as error:
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise CheckpointError(f"{address(host, port)}: {reason}") from error

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
        while True:
            self._places.acquire()
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._stopped or listener.fileno() < 0:
                    return
                log.warning("Snapshot copies: cannot accept a connection: %s", error)
                self._places.release()
                threading.Event().wait(self._limits.silence_s)  # probably out of file descriptors: retry later
                continue
            self._launch(self._serve, connection, snapshot_pool)

    def _serve(self, connection: socket.socket, snapshot_pool: SnapshotPool) -> None:
        try:
            with connection, self._live(connection):
                line = _CopyConnection(connection, self._clock, self._limits)
                _admit(line, self._token())
                request = line.receive_frame()
                match request.get("op"):
                    case "put":
                        self._take(line, snapshot_pool, request)
                    case "get":
                        self._give(line, snapshot_pool, request)
                    case other:
                        raise ProtocolError(f"unknown request {other!r}")
        except (OSError, ProtocolError, CheckpointError) as error:
            log.debug("Snapshot copies: a connection ended: %s", error)
        except Exception:
            log.exception("Snapshot copies: a request failed")
        finally:
            with contextlib.suppress(ValueError):
                self._places.release()

    def _take(self, line: _CopyConnection, snapshot_pool: SnapshotPool, request: dict[str, Any]) -> None:
        label = _to_label(request)
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
            _receive(line, label, arrival)
        except CheckpointError as error:
            line.refuse(str(error))
            return
        finally:
            arrival.discard()
        line.send_frame({"whole": True})

    def _give(self, line: _CopyConnection, snapshot_pool: SnapshotPool, request: dict[str, Any]) -> None:
        version, shard = Version(_count(request, "era"), _count(request, "commit")), _count(request, "shard")
        lent = line.wait_for(lambda: snapshot_pool.lend(version, shard), _release)
        if lent is None:
            line.refuse(f"node {self._node} does not hold shard {shard} of {version} any more")
            return
        try:
            line.send_frame(_from_label(lent.label))
            if "go" in line.receive_answer():
                line.send_file(lent.descriptor, lent.label.size)
        finally:
            lent.release()


class _CopyConnection:
    """A connection on which every operation has a deadline. Methods raise ``OSError`` and ``ProtocolError``."""

    def __init__(self, connection: socket.socket, clock: Clock, limits: CopyLimits) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._clock = clock
        self._limits = limits
        self._until_s = clock.now_s() + limits.handshake_s

    def within(self, seconds: float) -> None:
        """Set the deadline of the following operations, in seconds from now."""
        self._until_s = self._clock.now_s() + seconds

    def read(self, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        data = bytearray(size)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> int:
        """Fill ``view``; returns the CRC-32 of the data."""
        crc = done = 0
        while done < len(view):
            self._socket.settimeout(self._timeout_s())
            count = self._socket.recv_into(view[done : done + _CHUNK_BYTES])
            if not count:
                raise ProtocolError(f"the peer closed the connection after {done} of {len(view)} bytes")
            crc = zlib.crc32(view[done : done + count], crc)
            done += count
        return crc

    def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        self._socket.settimeout(self._timeout_s())
        self._socket.sendall(data)

    def receive_frame(self) -> dict[str, Any]:
        """Receive one JSON frame. Raises ``ProtocolError`` for a frame that is too long or malformed."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > _LONGEST_FRAME:
            raise ProtocolError(f"a frame of {length} bytes is too long")
        try:
            frame = json.loads(self.read(length))
        except ValueError as error:
            raise ProtocolError(f"not a frame: {error}") from error
        if not isinstance(frame, dict):
            raise ProtocolError(f"not a frame: {_short(frame)}")
        return frame

    def receive_answer(self) -> dict[str, Any]:
        """The next frame other than ``wait``. Raises ``CheckpointError`` with the peer's reason for a ``no``."""
        while True:
            self.within(self._limits.silence_s)
            frame = self.receive_frame()
            if "no" in frame:
                raise CheckpointError(str(frame["no"])[:_LONGEST_REASON])
            if "wait" not in frame:
                return frame

    def send_frame(self, frame: dict[str, Any]) -> None:
        """Send one JSON frame within the time limit for a silent peer."""
        self.within(self._limits.silence_s)
        data = json.dumps(frame).encode()
        self.write(_LENGTH.pack(len(data)) + data)

    def refuse(self, why: str) -> None:
        """Answer ``no`` with a reason of at most 1000 characters."""
        self.send_frame({"no": why[:_LONGEST_REASON]})

    def wait_for(self, work: Callable[[], T], undo: Callable[[T], None]) -> T:
        """Run ``work`` in a thread, and send ``wait`` to the peer until it is done. If the peer disconnects meanwhile,
        ``undo`` gets the result and the error is raised."""
        outcome: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again below
                failure.append(error)

        helper = threading.Thread(target=run, name="edl-copies-work", daemon=True)
        helper.start()
        broken: OSError | None = None
        while helper.is_alive():
            helper.join(self._limits.silence_s / 3)
            if helper.is_alive() and broken is None:
                try:
                    self.send_frame({"wait": True})
                except OSError as error:
                    broken = error  # what the work has allocated must be released, so wait for its end
        if failure:
            raise failure[0]
        if broken is not None:
            undo(outcome[0])
            raise broken
        return outcome[0]

    def send_file(
        self, descriptor: int, size: int, rate: int = 0, pause: Callable[[float], object] = lambda seconds: None
    ) -> None:
        """Send the first ``size`` bytes of a file, at most ``rate`` bytes per second; 0: no limit."""
        self.within(self.time_for(size) + (size / rate if rate else 0))
        begun_s, most = self._clock.now_s(), max(1, rate // PIECES_A_SECOND) if rate else size
        self._socket.settimeout(0.0)
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        done = 0
        while done < size:
            try:
                count = os.sendfile(self._socket.fileno(), descriptor, done, min(size - done, most))
            except BlockingIOError:
                if not writable.poll(self._timeout_s() * 1000):
                    raise TimeoutError(f"the peer accepted no data for {self._limits.silence_s:g} s") from None
                continue
            if not count:
                raise ProtocolError(f"the snapshot's file ends after {done} of {size} bytes")
            done += count
            early_s = begun_s + done / rate - self._clock.now_s() if rate else 0.0
            if early_s > 0 and done < size:
                pause(early_s)

    def time_for(self, size: int) -> float:
        """The time limit in seconds for transferring ``size`` bytes."""
        return self._limits.silence_s + size / self._limits.slowest_bytes_per_s

    def _timeout_s(self) -> float:
        left_s = self._until_s - self._clock.now_s()
        if left_s <= 0:
            raise TimeoutError("the transfer exceeded its time limit")
        return min(left_s, self._limits.silence_s)


def _receive(line: _CopyConnection, label: Label, arrival: Arrival) -> None:
    """Receive a snapshot into its memory and accept it if its checksum is right."""
    try:
        line.within(line.time_for(label.size))
        crc32 = line.read_into(arrival.view)
        if crc32 != label.crc32:
            raise CheckpointError(
                f"shard {label.holding.shard} of {label.holding.version} was damaged in transit: checksum "
                f"{crc32:08x} instead of {label.crc32:08x}"
            )
        arrival.accept()
    finally:
        arrival.discard()


def _introduce(line: _CopyConnection, token: str) -> None:
    """The client's side of the handshake."""
    mine = proof.draw()
    line.write(_MAGIC + mine)
    theirs = line.read(proof.NONCE_BYTES)
    if not proof.holds(line.read(proof.PROOF_BYTES), token, proof.CALLED, mine, theirs):
        raise ProtocolError("does not know this job's token")
    line.write(proof.prove(token, proof.CALLER, mine, theirs))


def _admit(line: _CopyConnection, token: str) -> None:
    """The server's side of the handshake."""
    if line.read(len(_MAGIC)) != _MAGIC:
        raise ProtocolError("speaks another protocol")
    theirs = line.read(proof.NONCE_BYTES)
    mine = proof.draw()
    line.write(mine + proof.prove(token, proof.CALLED, theirs, mine))
    if not proof.holds(line.read(proof.PROOF_BYTES), token, proof.CALLER, theirs, mine):
        raise ProtocolError("does not know this job's token")


def _from_label(label: Label) -> dict[str, Any]:
    holding = label.holding
    return {
        "owner": label.owner,
        "era": holding.version.era,
        "commit": holding.version.commit,
        "shard": holding.shard,
        "shards": holding.shards,
        "size": label.size,
        "crc32": label.crc32,
        "owed_era": label.owed.era,
        "owed_commit": label.owed.commit,
    }


def _to_label(frame: dict[str, Any]) -> Label:
    owner = frame.get("owner")
    version = Version(_count(frame, "era"), _count(frame, "commit"))
    holding = Holding(version, _count(frame, "shard"), _count(frame, "shards"))
    owed = Version(_count(frame, "owed_era"), _count(frame, "owed_commit"))
    label = Label(NodeId(str(owner)), holding, _count(frame, "size"), _count(frame, "crc32"), owed)
    if not isinstance(owner, str) or not owner or holding.shard >= holding.shards or not label.size:
        raise ProtocolError(f"not a label: {_short(frame)}")
    return label


def _count(frame: dict[str, Any], name: str) -> int:
    value = frame.get(name)
    if type(value) is not int or not 0 <= value <= _LARGEST_BYTES:
        raise ProtocolError(f"{name} is {_short(value)}")
    return value


def _discard(arrival: Arrival | None) -> None:
    if arrival is not None:
        arrival.discard()


def _release(lent: Lent | None) -> None:
    if lent is not None:
        lent.release()


def _short(value: object) -> str:
    return repr(value)[:200]


def _lower_priority() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
