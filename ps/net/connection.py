"""Frames over a blocking socket. Every call has a deadline, and bodies are received in place.

The kernel keeps the time (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): a call that need not wait is one system call; one that
waits wakes up from time to time to check its deadline.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import PortInUse, ProtocolError
from edl.threads import Threads
from edl.wire.address import address
from edl.wire.proof import draw
from ps.errors import DamagedFrame, HungUp, TimedOut, Unreachable
from ps.net.buffers import CAN_LEND, BodyBuffer, Borrowed, LentBuffer, copy
from ps.protocol.frames import HEADER_BYTES, MOST_BODY, Check, Frame, FrameOp, Header, hash_of, pack, unpack

now_s = SYSTEM_THREADS.now_s

Into = Callable[[int, bytes], memoryview | None]
"""Chooses the memory for a body of the given size, given the head; None: use the arena."""

_PEEK_BYTES = 4096
"""Read together with a header: includes most heads and small bodies."""
_CHUNK_BYTES = 1 << 20
"""Bodies are received and checked in chunks of this size, so that the checksum finds them in the cache."""
_MOST_PARTS = 512
"""Most buffers per system call; the system's limit is 1024."""
_WAITS_S = (10.0, 1.0)
"""Timeouts of one system call, in seconds. Only when less than the last is left, the exact deadline is used."""
_SHORTEST_WAIT_S = 0.001
_UNIX_BUFFER_BYTES = 4 << 20
_TIMEVAL = struct.Struct("@ll")
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_FILE_ROOM = socket.CMSG_SPACE(2 * array("i").itemsize)


class Wire(Protocol):
    """A byte stream: a socket, or TLS over one. One thread may read while another writes."""

    checked: bool
    """True if frames need checksums, because the transport could damage data unnoticed."""

    def read_into(self, view: memoryview, least: int, until_s: float) -> int:
        """Read at least ``least`` bytes, at most as many as fit. Raises ``TimedOut``, ``Unreachable`` (also at the
        end)."""
        ...

    def write(self, parts: Sequence[memoryview], until_s: float, file: int = -1) -> None:
        """Write all parts in order, passing an open file descriptor along if given. Raises ``TimedOut``,
        ``Unreachable``."""
        ...

    def pending(self) -> bool:
        """True if data can be read without waiting."""
        ...

    def hung_up(self) -> bool:
        """True if the peer is known to have closed; unread data may remain."""
        ...

    def shut(self) -> None:
        """Shut down both directions, which wakes up blocked calls. Thread-safe, at any time."""
        ...

    def close(self) -> None:
        """Close the socket, once no thread uses it."""
        ...


class Listener(Protocol):
    """An open listening socket, or its counterpart in the simulator."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` has been called."""
        ...

    def accept(self) -> Wire:
        """Wait for the next connection. Raises ``OSError``, also when closed meanwhile."""
        ...

    def close(self) -> None:
        """Stop listening and end a waiting ``accept``. Thread-safe."""
        ...


@dataclass(frozen=True, slots=True)
class Listening:
    """Listeners of a server, and their addresses."""

    listeners: Sequence[Listener]
    port: int
    """TCP port."""
    path: str = ""
    """Unix socket (abstract name); empty if there is none."""
    machine: str = ""
    """``machine_id`` if there is a unix socket."""


class Sockets(Protocol):
    """Opens and accepts connections: sockets of this machine, or simulated ones."""

    def connect(self, host: str, port: int, until_s: float) -> Wire:
        """Connect over TCP. Raises ``Unreachable``, ``TimedOut``."""
        ...

    def connect_local(self, path: str, until_s: float) -> Wire:
        """Connect to an abstract unix socket. Raises ``Unreachable``, ``TimedOut``."""
        ...

    def listen(self, host: str, port: int) -> Listening:
        """Listen on TCP (0: any free port), and on an abstract unix socket if supported. Raises ``PortInUse``."""
        ...


class PlainSocket:
    """A TCP or unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._waits = {socket.SO_RCVTIMEO: -1, socket.SO_SNDTIMEO: -1}
        connection.setblocking(True)
        self.checked = connection.family != socket.AF_UNIX
        self.files: list[int] | None = None
        """File descriptors received; None: not wanted."""
        if not self.checked:  # unix: data stays in the sender's buffer; TCP: the kernel tunes its size
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def read_into(self, view: memoryview, least: int, until_s: float) -> int:
        """Read at least ``least`` bytes, at most as many as fit."""
        done, flags = 0, socket.MSG_WAITALL if least == len(view) else 0
        while True:
            self._wait(socket.SO_RCVTIMEO, until_s)
            try:
                if self.files is None or flags:
                    count = self._socket.recv_into(view[done:], 0, flags)
                else:
                    count = self._receive_with_files(view[done:], self.files)
            except BlockingIOError:
                _look(until_s, f"nothing was received, {least - done} bytes missing")
                continue
            except OSError as error:
                raise Unreachable(f"the connection broke: {_reason(error)}") from None
            if not count:
                raise HungUp("the peer closed the connection")
            done += count
            if done >= least:
                return done
            _look(until_s, f"the peer is too slow, {least - done} bytes missing")

    def _receive_with_files(self, view: memoryview, files: list[int]) -> int:
        count, extra, _, _ = self._socket.recvmsg_into([view], _FILE_ROOM, _CLOSE_ON_EXEC)
        for level, kind, data in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                files.extend(found)
        return count

    def write(self, parts: Sequence[memoryview], until_s: float, file: int = -1) -> None:
        """Write all parts in order, passing an open file descriptor along if given."""
        rest = list(parts)
        along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [file]))] if file >= 0 else []
        while rest:
            self._wait(socket.SO_SNDTIMEO, until_s)
            try:
                count = self._socket.sendmsg(rest[:_MOST_PARTS], along, _NO_SIGNAL)
            except BlockingIOError:
                _look(until_s, "the peer does not read")
                continue
            except OSError as error:
                raise Unreachable(f"the connection broke: {_reason(error)}") from None
            gone, along = 0, []
            while gone < len(rest) and count >= len(rest[gone]):
                count -= len(rest[gone])
                gone += 1
            rest = rest[gone:]
            if count:
                rest[0] = rest[0][count:]
            if rest:
                _look(until_s, "the peer is too slow")

    def pending(self) -> bool:
        """True if data can be read without waiting."""
        return bool(self._poll(select.POLLIN))

    def hung_up(self) -> bool:
        """True if the peer is known to have closed; unread data may remain."""
        lost = getattr(select, "POLLRDHUP", 0)
        return bool(self._poll(lost) & (lost | select.POLLHUP | select.POLLERR | select.POLLNVAL))

    def shut(self) -> None:
        """Shut down both directions, which wakes up blocked calls."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, once no thread uses it."""
        self._socket.close()
        while self.files:
            os.close(self.files.pop())

    def _poll(self, events: int) -> int:
        if self._socket.fileno() < 0:
            return select.POLLNVAL
        poll = select.poll()
        poll.register(self._socket, events)
        found = poll.poll(0)
        return found[0][1] if found else 0

    def _wait(self, direction: int, until_s: float) -> None:
        """Set the kernel's timeout for the next call, if it differs from the last."""
        left_s = until_s - now_s()
        for wait_s in _WAITS_S:
            if left_s >= wait_s:
                break
        else:
            wait_s = max(left_s, _SHORTEST_WAIT_S)
        wait_ms = int(wait_s * 1000)
        if self._waits[direction] != wait_ms:
            try:
                self._socket.setsockopt(
                    socket.SOL_SOCKET, direction, _TIMEVAL.pack(wait_ms // 1000, wait_ms % 1000 * 1000)
                )
            except OSError as error:
                raise Unreachable(f"the connection broke: {_reason(error)}") from None
            self._waits[direction] = wait_ms


class FrameConnection:
    """Frames over a wire. One thread may read while another writes; callers hold ``receiving`` or ``sending``."""

    def __init__(self, wire: Wire, *, check: bool, threads: Threads = SYSTEM_THREADS) -> None:
        self.wire = wire
        self.check = check and wire.checked
        self.arena = BodyBuffer()
        self.lends = CAN_LEND and isinstance(wire, PlainSocket) and not wire.checked
        """True if bodies can be placed in shared memory."""
        self.borrowed: Borrowed | None = None
        self._peeked = memoryview(bytearray(_PEEK_BYTES))
        self._begin = self._end = 0
        self.receiving = threads.lock()
        self.sending = threads.lock()

    # --- raw bytes, for the handshake ------------------------------------------------------------------------------

    def read(self, size: int, until_s: float) -> bytes:
        """Read exactly ``size`` bytes."""
        data = bytearray(size)
        self._fill(memoryview(data), until_s)
        return bytes(data)

    def write_bytes(self, data: bytes, until_s: float) -> None:
        """Write all of ``data``."""
        self.wire.write([memoryview(data)], until_s)

    # --- frames ----------------------------------------------------------------------------------------------------

    def borrow(self) -> None:
        """From now on accept bodies in memory lent by the peer."""
        if self.lends and isinstance(self.wire, PlainSocket):
            self.borrowed, self.wire.files = Borrowed(), []

    def close(self) -> None:
        """Release all resources, once no thread uses them. A body that is still referenced stays valid."""
        self.wire.close()
        self.borrowed = None

    def write(
        self,
        op: FrameOp,
        request: int,
        head: bytes,
        body: Sequence[memoryview],
        until_s: float,
        wait_s: float = 0,
        *,
        borrows: bool = False,
        lent: LentBuffer | None = None,
    ) -> None:
        """Write a whole frame. ``lent``: the memory that holds the body. After an error the connection is unusable."""
        first = pack(op, request, head, body, wait_s=wait_s, check=self.check, lent=lent is not None, borrows=borrows)
        if lent is not None:
            self.wire.write([memoryview(first)], until_s, lent.file_to_send())
        else:
            self.wire.write([memoryview(first), *body], until_s)

    def idle(self, until_s: float = float("inf")) -> None:
        """Wait until data arrives, or the end of the stream."""
        if self._begin == self._end:
            self._more(1, until_s)

    def read_frame(
        self,
        until_s: float,
        into: Into | None = None,
        *,
        most_head: int | None = None,
        most_body: int = MOST_BODY,
        bytes_per_s: float = float("inf"),
    ) -> Frame:
        """Read the next frame. ``into`` is only used for the body of an OK. ``bytes_per_s`` extends the deadline for
        large bodies.

        Raises ``DamagedFrame``, ``TimedOut``, ``Unreachable``; the connection is then unusable.
        """
        try:
            header = unpack(self._take(HEADER_BYTES, until_s))
            if most_head is not None and (header.head_bytes > most_head or header.body_bytes):
                raise ProtocolError(f"a frame of {header.head_bytes} + {header.body_bytes} bytes instead of a HELLO")
            if header.body_bytes > most_body:
                raise ProtocolError(
                    f"a body of {header.body_bytes} bytes ({header.op.name}) exceeds the limit of {most_body}"
                )
            until_s += header.body_bytes / bytes_per_s
            head = self._take_head(header, until_s)
            header.accept_head(head)
            place = None
            if into is not None and header.op is FrameOp.OK and header.body_bytes:
                place = into(header.body_bytes, head)
                if place is not None and place.nbytes != header.body_bytes:
                    raise ProtocolError(f"a body of {header.body_bytes} bytes where {place.nbytes} were expected")
            if header.lent:
                place = self._lent(header.body_bytes, place)
            else:
                if place is None:
                    place = self.arena.room(header.body_bytes)
                header.accept_body(self._body(header, place, until_s))
        except ProtocolError as error:
            raise DamagedFrame(str(error)) from None
        return Frame(header.op, header.request, head, place, header.wait_s, header.borrows)

    @property
    def buffered(self) -> bool:
        """True if the next frame has begun to arrive, or the stream has ended."""
        return self._begin < self._end or self.wire.pending()

    def _take(self, size: int, until_s: float) -> bytes:
        """Read a small piece through the buffer."""
        if self._end - self._begin < size:
            self._more(size - (self._end - self._begin), until_s)
        data = bytes(self._peeked[self._begin : self._begin + size])
        self._begin += size
        return data

    def _take_head(self, header: Header, until_s: float) -> bytes:
        if header.head_bytes <= _PEEK_BYTES // 2:
            return self._take(header.head_bytes, until_s)
        return self.read(header.head_bytes, until_s)

    def _more(self, least: int, until_s: float) -> None:
        """Refill the buffer, keeping an incomplete piece at its start."""
        kept = self._end - self._begin
        if self._begin:
            self._peeked[:kept] = bytes(self._peeked[self._begin : self._end])
            self._begin, self._end = 0, kept
        self._end += self.wire.read_into(self._peeked[kept:], least, until_s)

    def _fill(self, view: memoryview, until_s: float) -> None:
        """Read a large piece: first what is buffered, the rest directly from the wire."""
        have = min(self._end - self._begin, len(view))
        view[:have] = self._peeked[self._begin : self._begin + have]
        self._begin += have
        if have < len(view):
            self.wire.read_into(view[have:], len(view) - have, until_s)

    def _lent(self, size: int, place: memoryview | None) -> memoryview:
        """Get a body from memory lent by the peer. Raises ``ProtocolError``."""
        files = self.wire.files if isinstance(self.wire, PlainSocket) else None
        if self.borrowed is None or files is None:
            raise ProtocolError("a body in lent memory, which was not requested")
        while files:
            self.borrowed.take(files.pop(0))
        body = self.borrowed.body(size)
        if place is None:
            return body
        copy(body, place)
        return place

    def _body(self, header: Header, place: memoryview, until_s: float) -> int:
        """Receive a body; return its checksum, or 0 if it is unchecked."""
        if header.body_check is None:
            self._fill(place, until_s)
            return 0
        if header.body_bytes <= _CHUNK_BYTES:
            self._fill(place, until_s)
            return hash_of(place)
        check = Check()
        for begin in range(0, header.body_bytes, _CHUNK_BYTES):
            piece = place[begin : begin + _CHUNK_BYTES]
            self._fill(piece, until_s)
            check.update(piece)
        return check.intdigest()


def _look(until_s: float, what: str) -> None:
    if now_s() >= until_s:
        raise TimedOut(f"no answer in time: {what}")


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def connect_tcp(host: str, port: int, until_s: float) -> socket.socket:
    """Open a TCP connection. Raises ``Unreachable``, ``TimedOut``."""
    try:
        return socket.create_connection((host, port), max(_SHORTEST_WAIT_S, until_s - now_s()))
    except TimeoutError:
        raise TimedOut("no answer") from None
    except OSError as error:
        raise Unreachable(_reason(error)) from None


def connect_unix(path: str, until_s: float) -> socket.socket:
    """Connect to an abstract unix socket. Raises ``Unreachable``, ``TimedOut``."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(_SHORTEST_WAIT_S, until_s - now_s()))
        connection.connect(f"\0{path}")
    except TimeoutError:
        connection.close()
        raise TimedOut("no answer") from None
    except OSError as error:
        connection.close()
        raise Unreachable(_reason(error)) from None
    return connection


def machine_id() -> str:
    """An id shared by processes that can reach each other's abstract unix sockets: same kernel and network namespace.
    Empty if abstract sockets are not available."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


class _SocketListener:
    """``Listener`` of a listening TCP or unix socket."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening

    @property
    def closed(self) -> bool:
        """True after ``close``, as ``Listener`` requires."""
        return self._socket.fileno() < 0

    def accept(self) -> PlainSocket:
        """Wait for the next connection."""
        while True:
            connection, _ = self._socket.accept()
            try:
                return PlainSocket(connection)
            except OSError:
                connection.close()  # it has hung up already

    def close(self) -> None:
        """Stop listening, as ``Listener`` requires."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class SystemSockets:
    """Sockets of the operating system."""

    def connect(self, host: str, port: int, until_s: float) -> PlainSocket:
        """Connect over TCP, as ``Sockets`` requires."""
        return PlainSocket(connect_tcp(host, port, until_s))

    def connect_local(self, path: str, until_s: float) -> PlainSocket:
        """Connect to an abstract unix socket."""
        return PlainSocket(connect_unix(path, until_s))

    def listen(self, host: str, port: int) -> Listening:
        """Listen on TCP (0: any free port), and on an abstract unix socket if supported."""
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {address(host, port)} for parameter-server connections: {error.strerror}. Set an "
                "address of this host with --local-addr"
            ) from error
        listeners, path, machine = [_SocketListener(listener)], "", machine_id()
        if machine:
            path = f"edl-ps-{os.getpid()}-{draw()[:8].hex()}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind(f"\0{path}")
            local.listen(256)
            listeners.append(_SocketListener(local))
        return Listening(listeners, int(listener.getsockname()[1]), path, machine)


SYSTEM_SOCKETS: Sockets = SystemSockets()
