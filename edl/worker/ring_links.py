"""The two connections of a rank in a ring, and the simultaneous transfer over both.

A rank sends to its successor and receives from its predecessor. No call blocks beyond the reach of ``abort``, and there
are no extra threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

LONGEST_CONNECT_S = 300.0
"""Seconds; normally the agent reports missing peers earlier, so this limit is for workers without an agent."""
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_BACKLOG = 64
_HELLO = struct.Struct("!8sQIII32s")
_ANSWER = struct.Struct("!8s32s")
_MAGIC = b"edlring1"
_MOST_AT_ONCE = 1024 * 1024
"""Bytes per system call: neither direction delays the other for long."""
_HUNG_UP = getattr(select, "POLLRDHUP", 0)
_LATER = (errno.EINPROGRESS, errno.EAGAIN, errno.EWOULDBLOCK)


class PeerLost(RuntimeError):
    """A collective failed: a peer is gone, or this rank's group was aborted. The contents of its tensors are
    undefined."""


class OutOfStep(RuntimeError):
    """The ranks of a group called different collectives, or the same one with different tensors."""


class Incoming(Protocol):
    """Destination of the bytes of one piece. It always has room until the piece is complete."""

    size: int

    def room(self) -> memoryview:
        """Memory for the next bytes."""
        ...

    def came(self, count: int) -> int:
        """``count`` bytes have arrived. Returns how many bytes of the piece may be passed on by now."""
        ...


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


class Links:
    """Connections to the successor and from the predecessor."""

    def __init__(self, rank: int, endpoints: Sequence[str], token: str, round: int) -> None:
        self._rank, self._size, self._round = rank, len(endpoints), round
        self._endpoints = tuple(endpoints)
        self._successor, self._predecessor = (rank + 1) % self._size, (rank - 1) % self._size
        self._token = token.encode()
        self._lock = threading.RLock()  # a signal handler may abort while this thread holds it
        self._sockets: set[socket.socket] = set()
        self._aborted = ""
        self._closed = False
        self._next: socket.socket | None = None
        self._previous: socket.socket | None = None
        self._woken, self._wake = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    # --- abort and close ---------------------------------------------------------------------------------------------

    def abort(self, why: str) -> None:
        """Make all users of the links fail at once, here and at the peers. From any thread; the first reason is
        kept."""
        with self._lock:
            if self._aborted or self._closed:
                return
            self._aborted = why
            os.write(self._wake, b"!")
            for connection in self._sockets:
                # Not close: another thread may be using the descriptor.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free all descriptors. The links must not be in use."""
        with self._lock:
            if self._closed:
                return
            self._aborted = self._aborted or "it is closed"
            self._closed = True
            for connection in self._sockets:
                connection.close()
            self._sockets.clear()
            os.close(self._woken)
            os.close(self._wake)

    @property
    def aborted(self) -> str:
        """Why they were aborted; empty if they were not."""
        return self._aborted

    def check(self) -> None:
        """Raise ``PeerLost`` once aborted."""
        if self._aborted:
            raise PeerLost(f"round {self._round}, rank {self._rank}: {self._aborted}")

    def lost(self, rank: int, error: object) -> PeerLost:
        """The error for a lost peer; also aborts, so that the other peers do not wait for this rank."""
        text = f"rank {rank} at {self._endpoints[rank]} is gone ({error})"
        with self._lock:
            first = self._aborted or text
            self.abort(text)
        return PeerLost(f"round {self._round}, rank {self._rank}: {first}")

    def _adopt(self, connection: socket.socket) -> socket.socket:
        """Register a connection for ``abort`` and ``close``."""
        with self._lock:
            if self._aborted:
                connection.close()
                self.check()
            self._sockets.add(connection)
        connection.setblocking(False)
        return connection

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(connection)
        connection.close()

    # --- connect -----------------------------------------------------------------------------------------------------

    def connect(self, longest_s: float = LONGEST_CONNECT_S) -> None:
        """Listen on the own endpoint and connect to the successor's, until both peers have proved their identity.
        Raises ``PeerLost`` after ``longest_s`` seconds."""
        self.check()
        deadline_s = time.monotonic() + longest_s
        connector = _Connector(self)
        acceptor = _Acceptor(self)
        try:
            while self._next is None or self._previous is None:
                self.check()
                now_s = time.monotonic()
                if now_s > deadline_s:
                    missing = self._successor if self._next is None else self._predecessor
                    raise self.lost(missing, f"no connection in {longest_s:.0f} s")
                poll = select.poll()
                poll.register(self._woken, select.POLLIN)
                pause_s = min(1.0, deadline_s - now_s)
                if self._next is None:
                    pause_s = min(pause_s, connector.prepare(poll, now_s))
                if self._previous is None:
                    acceptor.prepare(poll)
                ready = {descriptor for descriptor, _ in poll.poll(max(1.0, pause_s * 1000))}
                self.check()
                if self._next is None:
                    self._next = connector.advance(ready)
                if self._previous is None:
                    self._previous = acceptor.advance(ready)
        finally:
            connector.end()
            acceptor.end()
        for connection in (self._next, self._previous):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def _proof(self, role: str, sender: int, receiver: int) -> bytes:
        text = f"{role} {self._round} {sender} {receiver} {self._size}"
        return hmac.digest(self._token, text.encode(), hashlib.sha256)

    # --- transfer ----------------------------------------------------------------------------------------------------

    def pump(
        self,
        outgoing: Sequence[memoryview],
        ready: int,
        incoming: Sequence[Incoming],
        relayed_from: int,
        checked: int,
        check: Callable[[memoryview, int], None],
        header_size: int,
    ) -> None:
        """Send and receive all pieces simultaneously.

        The first ``ready`` outgoing pieces can be sent at once. The following ones are the incoming pieces from number
        ``relayed_from`` on, sent as far as those have arrived. The first ``checked`` incoming pieces begin with a
        header, which ``check`` sees before anything else is read.
        """
        flow = _Flow(self, outgoing, ready, incoming, relayed_from, checked, check, header_size)
        while True:
            self.check()
            moved = flow.receive()
            moved = flow.send() or moved
            if flow.done():
                return
            if not moved:
                self._wait(flow)

    def _wait(self, flow: _Flow) -> None:
        poll = self._poll
        registered = []
        if flow.receives():
            registered.append(flow.previous)
            poll.register(flow.previous, select.POLLIN)
        if flow.sends():
            # Even while nothing can be sent: a successor that disconnects before it has everything is lost.
            registered.append(flow.next)
            poll.register(flow.next, select.POLLOUT | _HUNG_UP if flow.can_send() else _HUNG_UP)
        try:
            events = poll.poll()
        finally:
            for connection in registered:
                poll.unregister(connection)
        self.check()
        for descriptor, event in events:
            if descriptor == flow.next.fileno() and event & (_HUNG_UP | select.POLLHUP | select.POLLERR):
                raise self.lost(self._successor, "it disconnected")

    def neighbours(self) -> tuple[socket.socket, socket.socket, int, int]:
        """Successor's and predecessor's connection and rank."""
        self.check()
        if self._next is None or self._previous is None:
            raise PeerLost(f"round {self._round}, rank {self._rank}: the ring is not connected")
        return self._next, self._previous, self._successor, self._predecessor


class _Flow:
    """The progress of both directions of one collective."""

    def __init__(
        self,
        links: Links,
        outgoing: Sequence[memoryview],
        ready: int,
        incoming: Sequence[Incoming],
        relayed_from: int,
        checked: int,
        check: Callable[[memoryview, int], None],
        header_size: int,
    ) -> None:
        self.next, self.previous, self._successor, self._predecessor = links.neighbours()
        self._links = links
        self._out, self._ready = outgoing, ready
        self._in, self._shift = incoming, relayed_from - ready
        self._checked, self._check, self._header_size = checked, check, header_size
        self._out_piece = self._out_at = 0
        self._in_piece = self._in_at = self._passable = 0
        self._header = memoryview(b"")

    def receives(self) -> bool:
        return self._in_piece < len(self._in)

    def sends(self) -> bool:
        return self._out_piece < len(self._out)

    def done(self) -> bool:
        return not self.sends() and not self.receives()

    def can_send(self) -> bool:
        return self._limit() > self._out_at

    def _limit(self) -> int:
        """Number of bytes of the outgoing piece that may be sent."""
        piece = self._out_piece
        if piece < self._ready or piece + self._shift < self._in_piece:
            return len(self._out[piece])
        return self._passable if piece + self._shift == self._in_piece else 0

    def receive(self) -> bool:
        """Read once. Returns whether anything arrived, or an empty piece was skipped."""
        if not self.receives():
            return False
        piece = self._in[self._in_piece]
        if piece.size:
            room = piece.room()[:_MOST_AT_ONCE]
            if self._in_at == 0:
                self._header = room
            try:
                count = self.previous.recv_into(room)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise self._links.lost(self._predecessor, error) from None
            if count == 0:
                raise self._links.lost(self._predecessor, "it disconnected")
            before, self._in_at = self._in_at, self._in_at + count
            if self._in_piece < self._checked and before < self._header_size <= self._in_at:
                self._check(self._header[: self._header_size], self._in_piece)
            self._passable = piece.came(count)
        if self._in_at == piece.size:
            self._in_piece += 1
            self._in_at = self._passable = 0
        return True

    def send(self) -> bool:
        """Write once. Returns whether anything was sent, or an empty piece was skipped."""
        if not self.sends():
            return False
        piece = self._out[self._out_piece]
        limit = self._limit()
        if limit > self._out_at:
            try:
                self._out_at += self.next.send(piece[self._out_at : min(limit, self._out_at + _MOST_AT_ONCE)])
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise self._links.lost(self._successor, error) from None
        elif len(piece):
            return False
        if self._out_at == len(piece):
            self._out_piece += 1
            self._out_at = 0
        return True


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Connector:
    """Connects to the successor, retrying until it answers."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._host, self._port = split_endpoint(links._endpoints[links._successor])
        self._calls = 0
        self._connection: socket.socket | None = None
        self._again_at_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._said = False
        self._answer = b""

    def prepare(self, poll: select.poll, now_s: float) -> float:
        """Register for polling; returns the longest time to wait in seconds."""
        if self._connection is None and now_s >= self._again_at_s:
            self._call()
        if self._connection is None:
            return max(0.0, self._again_at_s - time.monotonic())
        poll.register(self._connection, select.POLLIN if self._said else select.POLLOUT)
        return 1.0

    def _call(self) -> None:
        self._said, self._answer = False, b""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            # A name may have addresses at which the successor does not listen.
            family, _, _, _, address = found[self._calls % len(found)]
            self._calls += 1
            self._connection = self._links._adopt(socket.socket(family, socket.SOCK_STREAM))
            problem = self._connection.connect_ex(address)
        except OSError as error:
            problem = error.errno or errno.EHOSTUNREACH
        if problem and problem not in _LATER:
            self._try_later()

    def _try_later(self) -> None:
        if self._connection is not None:
            self._links._drop(self._connection)
            self._connection = None
        self._again_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)

    def advance(self, ready: set[int]) -> socket.socket | None:
        """The connection once the successor has proved its identity; else None."""
        links, connection = self._links, self._connection
        if connection is None or connection.fileno() not in ready:
            return None
        try:
            if not self._said:
                problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if problem:
                    raise OSError(problem, os.strerror(problem))
                proof = links._proof("call", links._rank, links._successor)
                connection.send(_HELLO.pack(_MAGIC, links._round, links._rank, links._successor, links._size, proof))
                self._said = True
                return None
            came = connection.recv(_ANSWER.size - len(self._answer))
        except BlockingIOError:
            return None
        except OSError:
            self._try_later()
            return None
        self._answer += came
        if len(self._answer) == _ANSWER.size:
            expected = _ANSWER.pack(_MAGIC, links._proof("answer", links._successor, links._rank))
            if hmac.compare_digest(self._answer, expected):
                self._connection = None
                return connection
        if not came or len(self._answer) == _ANSWER.size:
            self._try_later()  # an old round's worker, or a stranger
        return None

    def end(self) -> None:
        if self._connection is not None:
            self._links._drop(self._connection)


class _Acceptor:
    """Listens for the predecessor and rejects all others."""

    def __init__(self, links: Links) -> None:
        self._links = links
        host, port = split_endpoint(links._endpoints[links._rank])
        numeric = _is_numeric(host)
        both = not numeric and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        self._listener = links._adopt(socket.socket(family, socket.SOCK_STREAM))
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if both:
                self._listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._bind(host if numeric else "", port)
            self._listener.listen(_BACKLOG)
        except OSError:
            links._drop(self._listener)
            links.check()
            raise
        self._pending: dict[socket.socket, bytes] = {}

    def _bind(self, host: str, port: int) -> None:
        """Listen on the address that peers use if this host has it. Behind NAT it does not; then listen on all
        addresses, as for a name, which may resolve differently here."""
        try:
            self._listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            self._listener.bind(("", port))

    def prepare(self, poll: select.poll) -> None:
        for connection in (self._listener, *self._pending):
            poll.register(connection, select.POLLIN)

    def advance(self, ready: set[int]) -> socket.socket | None:
        """The predecessor's connection once it has proved its identity; else None."""
        for connection in [connection for connection in self._pending if connection.fileno() in ready]:
            if self._hear(connection):
                return connection
        if self._listener.fileno() in ready:
            with contextlib.suppress(OSError):
                connection = self._listener.accept()[0]
                self._pending[self._links._adopt(connection)] = b""
            if len(self._pending) > _BACKLOG:
                self._reject(next(iter(self._pending)))
        return None

    def _hear(self, connection: socket.socket) -> bool:
        links = self._links
        try:
            came = connection.recv(_HELLO.size - len(self._pending[connection]))
        except BlockingIOError:
            return False
        except OSError:
            came = b""
        hello = self._pending[connection] = self._pending[connection] + came
        if came and len(hello) < _HELLO.size:
            return False
        proof = links._proof("call", links._predecessor, links._rank)
        expected = _HELLO.pack(_MAGIC, links._round, links._predecessor, links._rank, links._size, proof)
        if not hmac.compare_digest(hello, expected):
            self._reject(connection)
            return False
        try:
            connection.send(_ANSWER.pack(_MAGIC, links._proof("answer", links._rank, links._predecessor)))
        except OSError:
            self._reject(connection)
            return False
        del self._pending[connection]
        return True

    def _reject(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._links._drop(connection)

    def end(self) -> None:
        for connection in list(self._pending):
            self._reject(connection)
        self._links._drop(self._listener)
