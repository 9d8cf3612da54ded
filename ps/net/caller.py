"""The calling side of a connection to a parameter server; the other side is ``ps/net/endpoint.py``.

Uses blocking sockets and threads, so that a pull is one write and one read. A ``FrameCaller`` is one connection with
one request at a time; use several for concurrent requests. A server on the same machine (``machine_id``) is reached
over a unix socket in the abstract namespace, others over TCP, with TLS if the job has a certificate.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import EdlError, ProtocolError
from edl.threads import Threads
from edl.wire.address import address
from ps.errors import DamagedFrame, Denied, TimedOut, Unreachable
from ps.net.connection import SYSTEM_SOCKETS, FrameConnection, Into, Sockets, Wire, machine_id
from ps.net.endpoint import EndpointLimits, EndpointPeer, FrameEndpoint, FrameReply
from ps.net.tls import calling_over
from ps.protocol.frames import UNASKED, Frame, FrameOp, views
from ps.protocol.handshake import ANSWER_BYTES, HELLO_NUMBER, CallerHello, Calling

__all__ = [
    "EndpointLimits",
    "EndpointPeer",
    "FrameCaller",
    "FrameEndpoint",
    "FrameReply",
    "ServerAddress",
    "machine_id",
]

FRAME_S = 10.0
"""A caller that polls for answers gives an answer that has begun to arrive at least this many seconds."""
_BYE_S = 0.2


class ServerAddress(Protocol):
    """Address of a server, such as ``ps.protocol.messages.PserverAddress``."""

    @property
    def name(self) -> str:
        """The server's name, for messages."""
        ...

    @property
    def host(self) -> str:
        """Host name or address for TCP."""
        ...

    @property
    def port(self) -> int:
        """Port number for TCP."""
        ...

    @property
    def path(self) -> str:
        """Unix socket (abstract name); empty if there is none."""
        ...

    @property
    def machine(self) -> str:
        """``machine_id`` of the server's machine."""
        ...


class FrameCaller:
    """One connection to a server, one request at a time. Thread-safe."""

    def __init__(
        self, connection: FrameConnection, where: str, greeting: dict[str, Any], threads: Threads = SYSTEM_THREADS
    ) -> None:
        """Called by ``connect``, after the handshake on ``connection``."""
        self.where = where
        """Name and address of the server, for messages."""
        self.greeting = greeting
        """The server's description of itself, from the handshake."""
        self.heard: Callable[[Frame], None] = lambda frame: None
        """Called with unsolicited frames while ``request`` or ``receive`` waits. Must not use this caller."""
        self._connection = connection
        self._now_s = threads.now_s
        self._numbers = UNASKED
        self._broken = ""
        self._asking = threads.lock()
        self._counting = threads.lock()
        self._users = 0

    @classmethod
    def connect(
        cls, server: ServerAddress, hello: CallerHello, *, secret: str, deadline_s: float,
        tls: ssl.SSLContext | None = None, threads: Threads = SYSTEM_THREADS, sockets: Sockets = SYSTEM_SOCKETS,
    ) -> FrameCaller:  # fmt: skip
        """Connect and authenticate. Raises ``Unreachable``, ``TimedOut``, ``DamagedFrame``, and ``Denied`` if the
        server refuses."""
        until_s = threads.now_s() + deadline_s
        if server.path and server.machine and server.machine == machine_id():
            with contextlib.suppress(Unreachable):  # fall back to TCP
                where = f"{server.name} (unix socket {server.path})"
                local = sockets.connect_local(server.path, until_s)
                return cls._greet(local, None, where, hello, secret, until_s, threads)
        where = f"{server.name} ({address(server.host, server.port)})"
        try:
            plain = sockets.connect(server.host, server.port, until_s)
        except Unreachable as error:
            raise type(error)(f"parameter server {where}: {error}") from None
        return cls._greet(plain, tls, where, hello, secret, until_s, threads)

    @classmethod
    def _greet(
        cls, plain: Wire, tls: ssl.SSLContext | None, where: str, hello: CallerHello, secret: str, until_s: float,
        threads: Threads,
    ) -> FrameCaller:  # fmt: skip
        try:
            connection = FrameConnection(calling_over(plain, tls, until_s), check=hello.check, threads=threads)
            calling = Calling(secret)
            connection.write_bytes(calling.opening, until_s)
            try:
                proof = calling.answer(connection.read(ANSWER_BYTES, until_s))
            except ProtocolError as error:
                text = (
                    f"parameter server {where}: {error}. It belongs to another job, or this process has another secret"
                )
                raise Denied("token", text) from None
            connection.write_bytes(proof, until_s)
            connection.write(FrameOp.HELLO, HELLO_NUMBER, hello.pack(), (), until_s)
            answer = connection.read_frame(until_s)
            content = answer.json()
            if answer.op is not FrameOp.OK:
                raise Denied(str(content.get("kind", "")), f"parameter server {where}: {content.get('text', '')}")
        except BaseException as error:
            plain.shut()
            plain.close()
            if isinstance(error, Unreachable | ProtocolError):
                kind = type(error) if isinstance(error, Unreachable) else DamagedFrame
                raise kind(f"parameter server {where}: {error}") from None
            raise
        connection.borrow()
        return cls(connection, where, content, threads)

    @property
    def broken(self) -> bool:
        """True if the connection has failed or was closed."""
        return bool(self._broken)

    def request(
        self,
        op: FrameOp,
        head: bytes = b"",
        parts: Sequence[Any] = (),
        *,
        deadline_s: float,
        wait_s: float | None = None,
        into: Into | None = None,
    ) -> Frame:
        """Send a request and wait for the answer.

        ``parts``: buffers that make up the body, never copied. ``wait_s``: the server answers WAIT after this time
        if it must wait for others; None: ``deadline_s``. The body of the answer lies in this connection's memory (or
        the server's, read-only) until the next request, or, for an OK, where ``into`` says. Raises ``TimedOut``,
        ``DamagedFrame``, ``Unreachable``; the connection is then broken.
        """
        until_s = self._now_s() + deadline_s
        with self._asking:
            waits_s = deadline_s if wait_s is None else wait_s
            number = self._send(op, head, parts, until_s, waits_s, borrows=self._connection.borrowed is not None)
            while True:
                frame = self._next(until_s, into)
                if frame.request == number:
                    return frame
                if frame.request > number:
                    self._give_up("it answered a request that was never sent")
                    raise DamagedFrame(f"parameter server {self.where} answered a request that was never sent")

    def send(
        self,
        op: FrameOp,
        head: bytes = b"",
        parts: Sequence[Any] = (),
        *,
        deadline_s: float,
        wait_s: float | None = None,
    ) -> int:
        """Send a request without waiting; return its number. For STREAM, an answer with this number or a higher one
        acknowledges everything up to it. Another thread must call ``receive`` meanwhile. Raises as ``request`` does."""
        return self._send(
            op, head, parts, self._now_s() + deadline_s, deadline_s if wait_s is None else wait_s, borrows=False
        )

    def _send(
        self, op: FrameOp, head: bytes, parts: Sequence[Any], until_s: float, wait_s: float, *, borrows: bool
    ) -> int:
        body = views(parts)
        with self._connection.sending:
            self._enter()
            try:
                self._numbers = number = self._numbers + 1
                self._connection.write(op, number, head, body, until_s, wait_s, borrows=borrows)
                return number
            except ProtocolError:
                raise  # nothing has been sent
            except BaseException as error:  # noqa: BLE001 - raised on
                raise self._failed(error) from None
            finally:
                self._leave()

    def receive(self, *, deadline_s: float) -> Frame:
        """Wait for the next answer. Raises as ``request`` does; but if nothing at all arrived in time, ``TimedOut``
        leaves the connection usable."""
        until_s = self._now_s() + deadline_s
        while True:
            frame = self._next(until_s, None, idle_first=True)
            if frame.request != UNASKED:
                return frame

    def close(self) -> None:
        """Send a farewell if that does not block, and close the connection."""
        if not self._broken and self._connection.sending.acquire(timeout=_BYE_S):
            try:
                with contextlib.suppress(EdlError):
                    self._connection.write(FrameOp.BYE, UNASKED, b"", (), self._now_s() + _BYE_S)
            finally:
                self._connection.sending.release()
        self._give_up("it was closed")

    def abort(self) -> None:
        """Close the connection without a farewell; pending calls raise ``Unreachable``. Thread-safe."""
        self._give_up("it was aborted")

    def _next(self, until_s: float, into: Into | None, *, idle_first: bool = False) -> Frame:
        """Read the next frame; unsolicited frames are also passed to ``heard``."""
        with self._connection.receiving:
            self._enter()
            begun = not idle_first
            try:
                if idle_first:
                    self._connection.idle(until_s)
                    begun = True
                    until_s = max(until_s, self._now_s() + FRAME_S)
                frame = self._connection.read_frame(until_s, into)
            except BaseException as error:  # noqa: BLE001 - raised on
                if isinstance(error, TimedOut) and not begun:
                    raise TimedOut(f"parameter server {self.where}: {error}") from None
                raise self._failed(error) from None
            finally:
                self._leave()
        if frame.request == UNASKED:
            self.heard(frame)
        return frame

    def _enter(self) -> None:
        with self._counting:
            if self._broken:
                raise Unreachable(f"parameter server {self.where}: the connection is closed ({self._broken})")
            self._users += 1

    def _leave(self) -> None:
        with self._counting:
            self._users -= 1
            if self._broken and not self._users:
                self._connection.close()

    def _failed(self, error: BaseException) -> BaseException:
        """Close a connection that has failed in mid-frame; return the error to raise."""
        why = self._broken or str(error)
        self._give_up(why)
        return type(error)(f"parameter server {self.where}: {why}") if isinstance(error, Unreachable) else error

    def _give_up(self, why: str) -> None:
        with self._counting:
            self._broken = self._broken or why or "interrupted"
            self._connection.wire.shut()
            if not self._users:
                self._connection.close()
