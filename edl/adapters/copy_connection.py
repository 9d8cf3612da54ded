"""A TCP connection between two launchers of a job, for copies of snapshots: every operation has a deadline.

A frame is four bytes of length, then JSON. Before anything else both sides prove that they know the job token, by HMAC
over both sides' nonces; the token itself is never sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from edl.errors import CheckpointError, ProtocolError
from edl.ports import Clock
from edl.wire import proof
from edl.wire.address import address

T = TypeVar("T")
_MOST = 1 << 50
"""Of what a frame may announce."""

_MAGIC = b"edlcopy1"
_LENGTH = struct.Struct(">I")
_LONGEST_FRAME = 64 * 1024
"""A frame may hold a path of 4,096 bytes, each of which takes up to six in JSON, and a reason with another one."""
_LONGEST_REASON = 1000
_CHUNK_BYTES = 4 * 1024 * 1024
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


class CopyConnection:
    """A connection on which every operation has a deadline. Methods raise ``OSError`` and ``ProtocolError``."""

    def __init__(self, connection: socket.socket, clock: Clock, limits: CopyLimits) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._clock = clock
        self.limits = limits
        self._until_s = clock.now_s() + limits.handshake_s

    def within(self, seconds: float) -> None:
        """Set the deadline of the following operations, in seconds from now."""
        self._until_s = self._clock.now_s() + seconds

    def read(self, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        data = bytearray(size)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview, crc: int = 0) -> int:
        """Fill ``view``; returns the CRC-32 of the data, which continues that of earlier data."""
        done = 0
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
            raise ProtocolError(f"not a frame: {short(frame)}")
        return frame

    def receive_answer(self) -> dict[str, Any]:
        """The next frame other than ``wait``. Raises ``CheckpointError`` with the peer's reason for a ``no``."""
        while True:
            self.within(self.limits.silence_s)
            frame = self.receive_frame()
            if "no" in frame:
                raise CheckpointError(str(frame["no"])[:_LONGEST_REASON])
            if "wait" not in frame:
                return frame

    def send_frame(self, frame: dict[str, Any]) -> None:
        """Send one JSON frame within the time limit for a silent peer."""
        self.within(self.limits.silence_s)
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
            helper.join(self.limits.silence_s / 3)
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
        self,
        descriptor: int,
        size: int,
        rate: int = 0,
        pause: Callable[[float], object] = lambda seconds: None,
        *,
        start: int = 0,
    ) -> None:
        """Send ``size`` bytes of a file, at most ``rate`` bytes per second; 0: no limit."""
        self.within(self.time_for(size) + (size / rate if rate else 0))
        begun_s, most = self._clock.now_s(), max(1, rate // PIECES_A_SECOND) if rate else size
        self._socket.settimeout(0.0)
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        done = 0
        while done < size:
            try:
                count = os.sendfile(self._socket.fileno(), descriptor, start + done, min(size - done, most))
            except BlockingIOError:
                if not writable.poll(self._timeout_s() * 1000):
                    raise TimeoutError(f"the peer accepted no data for {self.limits.silence_s:g} s") from None
                continue
            if not count:
                raise ProtocolError(f"the snapshot's file ends after {done} of {size} bytes")
            done += count
            early_s = begun_s + done / rate - self._clock.now_s() if rate else 0.0
            if early_s > 0 and done < size:
                pause(early_s)

    def send_checked(self, descriptor: int, view: memoryview, start: int, size: int, crc: int = 0) -> int:
        """Send ``size`` bytes of a file from ``start`` on, which ``view`` shows; returns their CRC-32, which continues
        that of earlier data. The kernel delivers one piece while the next one is summed."""
        for at in range(start, start + size, _CHUNK_BYTES):
            piece = view[at : min(at + _CHUNK_BYTES, start + size)]
            self.send_file(descriptor, len(piece), start=at)
            crc = zlib.crc32(piece, crc)
        return crc

    def hang_up(self) -> None:
        """End the connection from any thread: what waits on it fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def time_for(self, size: int) -> float:
        """The time limit in seconds for transferring ``size`` bytes."""
        return self.limits.silence_s + size / self.limits.slowest_bytes_per_s

    def _timeout_s(self) -> float:
        left_s = self._until_s - self._clock.now_s()
        if left_s <= 0:
            raise TimeoutError("the transfer exceeded its time limit")
        return min(left_s, self.limits.silence_s)


@contextlib.contextmanager
def call(
    host: str,
    port: int,
    token: str,
    clock: Clock,
    limits: CopyLimits,
    live: Callable[[socket.socket], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Iterator[CopyConnection]:
    """A connection to a node that has proved to belong to this job; ``live`` is entered while it is open. Failures in
    the block become ``CheckpointError``."""
    try:
        with socket.create_connection((host, port), limits.connect_s) as connection, live(connection):
            line = CopyConnection(connection, clock, limits)
            introduce(line, token)
            yield line
    except (OSError, ProtocolError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise CheckpointError(f"{address(host, port)}: {reason}") from error


def introduce(line: CopyConnection, token: str) -> None:
    """The client's side of the handshake."""
    mine = proof.draw()
    line.write(_MAGIC + mine)
    theirs = line.read(proof.NONCE_BYTES)
    if not proof.holds(line.read(proof.PROOF_BYTES), token, proof.CALLED, mine, theirs):
        raise ProtocolError("does not know this job's token")
    line.write(proof.prove(token, proof.CALLER, mine, theirs))


def admit(line: CopyConnection, token: str) -> None:
    """The server's side of the handshake."""
    if line.read(len(_MAGIC)) != _MAGIC:
        raise ProtocolError("speaks another protocol")
    theirs = line.read(proof.NONCE_BYTES)
    mine = proof.draw()
    line.write(mine + proof.prove(token, proof.CALLED, theirs, mine))
    if not proof.holds(line.read(proof.PROOF_BYTES), token, proof.CALLER, theirs, mine):
        raise ProtocolError("does not know this job's token")


def check_sum(what: str, actual: int, expected: int, where: str = "") -> None:
    """Raise ``CheckpointError`` if received bytes have another checksum than the sender's."""
    if actual != expected:
        raise CheckpointError(f"{what} was damaged in transit: checksum {actual:08x} instead of {expected:08x}{where}")


def count_in(frame: Mapping[str, Any], name: str) -> int:
    """A number of bytes, or of something else, in a frame. Raises ``ProtocolError``."""
    value = frame.get(name)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ProtocolError(f"{name} is {short(value)}")
    return value


def short(value: object) -> str:
    """A received value for a message, at most 200 characters."""
    return repr(value)[:200]
