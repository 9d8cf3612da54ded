"""The serving side of connections to a parameter server: it listens, and serves each peer in a thread of its own.

So a slow, silent or malicious peer only delays itself. An unauthenticated connection gets a few seconds and a few
hundred bytes to prove that it knows the secret; a peer that sends invalid frames is disconnected with one log line.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import EdlError, ProtocolError
from edl.threads import ThreadHandle, Threads
from edl.wire.proof import PROOF_BYTES
from ps.errors import HungUp, Unreachable
from ps.net.buffers import KEPT_BYTES, LENT_BYTES, BodyBuffer, LentBuffer
from ps.net.connection import SYSTEM_SOCKETS, FrameConnection, Listener, Sockets, Wire
from ps.net.tls import called_over
from ps.protocol.frames import MOST_BODY, UNASKED, Frame, FrameOp, pack_head, views
from ps.protocol.handshake import HELLO_NUMBER, MOST_HELLO, OPENING_BYTES, Called, CallerHello

log = logging.getLogger(__name__)

_LARGE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class FrameReply:
    """An answer. The parts may be memory that is reused once it is sent (``EndpointPeer.room``)."""

    op: FrameOp = FrameOp.OK
    head: bytes = b""
    parts: Sequence[Any] = ()

    @staticmethod
    def no(op: FrameOp, **content: Any) -> FrameReply:
        """An answer other than OK, with the given head."""
        return FrameReply(op, pack_head(content))


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """Timeouts in seconds and the greatest numbers of connections that an endpoint accepts."""

    greeting_s: float = 5.0
    """Seconds from the connection to an accepted HELLO."""
    strangers: int = 64
    """Most unauthenticated connections; one more closes the oldest."""
    peers: int = 4096
    frame_s: float = 30.0
    """Most seconds for receiving a frame that has begun or for sending an answer, plus the time for its size at
    ``slowest_bytes_per_s``."""
    slowest_bytes_per_s: float = 1024 * 1024
    body_bytes: int = MOST_BODY
    push_s: float = 5.0
    """Seconds for sending an unsolicited message."""
    unanswered: int = 32
    """Most frames of a stream that are acknowledged together."""


class EndpointPeer:
    """A client connected to a ``FrameEndpoint``."""

    def __init__(
        self, connection: FrameConnection, hello: CallerHello, limits: EndpointLimits, threads: Threads = SYSTEM_THREADS
    ) -> None:
        self.hello = hello
        self.role = hello.role
        self.number = hello.number
        self.name = hello.name
        self.data: Any = None
        """For use by the owner of the endpoint."""
        self.farewell = False
        """True once it has sent BYE."""
        self._now_s = threads.now_s
        self.heard_s = threads.now_s()
        """Time of the last frame received."""
        self._connection = connection
        self._limits = limits
        self._out = BodyBuffer()
        self._lent: LentBuffer | None = None
        self._lending = False

    def __str__(self) -> str:
        return str(self.hello)

    def room(self, size: int) -> memoryview:
        """Memory for the body of the next answer, reused afterwards. Only for this peer's handler."""
        if not self._lending or not LENT_BYTES <= size <= KEPT_BYTES:
            return self._out.room(size)
        if self._lent is None:
            self._lent = LentBuffer()
        try:
            return self._lent.room(size)
        except OSError as error:  # out of descriptors: the answer goes through the socket
            log.debug("Parameter server: cannot lend memory to %s: %s", self, error)
            return self._out.room(size)

    @property
    def gone(self) -> bool:
        """True if the peer is known to have disconnected, so waiting on its behalf is pointless. Thread-safe."""
        return self._connection.wire.hung_up()

    def push(self, op: FrameOp, head: bytes = b"", parts: Sequence[Any] = ()) -> bool:
        """Send an unsolicited message. Returns False, and closes the connection, if it cannot be sent. Thread-safe."""
        return self._write(op, UNASKED, head, parts, self._limits.push_s)

    def hang_up(self) -> None:
        """Close the connection. Thread-safe."""
        self._connection.wire.shut()

    def asks(self, frame: Frame) -> None:
        """Used by the endpoint: set whether the next answer may be in lent memory."""
        self._lending = frame.borrows and self._connection.lends

    def answer(self, reply: FrameReply, request: int) -> bool:
        """Used by the endpoint: send the answer to a request."""
        return self._write(reply.op, request, reply.head, reply.parts, self._limits.frame_s, self._lending)

    def let_go(self) -> None:
        """Used by the endpoint: release memory after the connection has ended."""
        if self._lent is not None:
            self._lent.close()

    def _write(
        self, op: FrameOp, request: int, head: bytes, parts: Sequence[Any], wait_s: float, lending: bool = False
    ) -> bool:
        connection = self._connection
        body = views(parts)
        lent = self._lent if lending and self._lent is not None and self._lent.holds(body) else None
        wait_s += sum(part.nbytes for part in body) / self._limits.slowest_bytes_per_s
        if not connection.sending.acquire(timeout=wait_s):
            connection.wire.shut()
            return False
        try:
            connection.write(op, request, head, body, self._now_s() + wait_s, lent=lent)
            return True
        except Unreachable as error:
            log.debug("Parameter server: cannot answer %s: %s", self, error)
            connection.wire.shut()
            return False
        finally:
            connection.sending.release()


Handler = Callable[[EndpointPeer, Frame], FrameReply]


class FrameEndpoint:
    """Listens, and calls ``handler`` with each request, in one thread per peer.

    The body of a request is only valid until the handler returns. If the handler raises ``EdlError``, the peer gets
    REFUSED with kind ``error`` and the text; any other exception is logged and answered with kind ``internal``.

    ``tls`` is called before each handshake for its context; None: no TLS. ``met`` may refuse a peer by
    returning ``(kind, text)``. ``greeted`` is called once an accepted peer has its answer and may be sent more.
    ``left`` is called when the connection of an accepted peer ends; ``lost`` after that, if it ended without a
    farewell. All are called on the peer's own thread.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        secret: str,
        met: Callable[[EndpointPeer], tuple[str, str] | None] = lambda peer: None,
        greeted: Callable[[EndpointPeer], None] = lambda peer: None,
        left: Callable[[EndpointPeer], None] = lambda peer: None,
        lost: Callable[[EndpointPeer], None] = lambda peer: None,
        greeting: dict[str, Any] | None = None,
        limits: EndpointLimits | None = None,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        threads: Threads = SYSTEM_THREADS,
        sockets: Sockets = SYSTEM_SOCKETS,
    ) -> None:
        self._threads, self._now_s, self._sockets = threads, threads.now_s, sockets
        self._handler, self._secret, self._tls = handler, secret, tls
        self._met, self._greeted, self._left, self._lost = met, greeted, left, lost
        self._greeting = pack_head(greeting or {})
        self._limits = limits or EndpointLimits()
        self._lock = threads.lock()
        self._strangers: dict[int, Wire] = {}
        self._peers: dict[EndpointPeer, None] = {}
        self._running: set[ThreadHandle] = set()
        self._numbers = 0
        self._stopped = False
        self._listeners: Sequence[Listener] = ()
        self.host, self.port, self.path, self.machine = "", 0, "", ""

    def start(self, host: str, port: int = 0) -> None:
        """Listen on TCP, and on an abstract unix socket if supported. Raises ``PortInUse``."""
        listening = self._sockets.listen(host, port)
        self.host, self.port, self.path, self.machine = host, listening.port, listening.path, listening.machine
        self._listeners = listening.listeners
        for one in self._listeners:
            self._launch(self._accept, one)

    @property
    def peers(self) -> tuple[EndpointPeer, ...]:
        """The peers whose HELLO was accepted and whose connections are open."""
        with self._lock:
            return tuple(self._peers)

    def stop(self, *, wait_s: float = 1.0) -> None:
        """Stop listening and close all connections; wait at most ``wait_s`` seconds for running handlers. ``lost`` is
        not called for these connections."""
        with self._lock:
            self._stopped = True
            wires = [*self._strangers.values(), *(peer._connection.wire for peer in self._peers)]
            threads = list(self._running)
        for listener in self._listeners:
            listener.close()
        for wire in wires:
            wire.shut()
        until_s = self._now_s() + wait_s
        for thread in threads:
            if thread is not self._threads.current():
                thread.join(max(0.0, until_s - self._now_s()))

    # --- connections -------------------------------------------------------------------------------------------------

    def _launch(self, target: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                target(*arguments)
            finally:
                with self._lock:
                    self._running.discard(thread)

        with self._lock:
            thread = self._threads.start(run, name="edl-ps-endpoint")
            self._running.add(thread)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                wire = listener.accept()
            except OSError as error:
                if self._stopped or listener.closed:
                    return
                log.warning("Parameter server: cannot accept a connection: %s", error)
                self._threads.sleep(1.0)  # out of descriptors: do not retry at once
                continue
            with self._lock:
                self._numbers += 1
                number = self._numbers
                if self._stopped or len(self._peers) >= self._limits.peers:
                    wire.close()
                    if not self._stopped:
                        log.warning(
                            "Parameter server: refusing a connection: %d peers are connected, the limit",
                            len(self._peers),
                        )
                    continue
                if len(self._strangers) >= self._limits.strangers:
                    oldest = min(self._strangers)
                    self._strangers.pop(oldest).shut()
                self._strangers[number] = wire
            try:
                self._launch(self._serve, number, wire)
            except RuntimeError as error:  # no more threads
                log.warning("Parameter server: cannot start a thread for a connection: %s", error)
                with self._lock:
                    self._strangers.pop(number, None)
                wire.close()

    def _serve(self, number: int, plain: Wire) -> None:
        peer: EndpointPeer | None = None
        connection: FrameConnection | None = None
        try:
            connection = FrameConnection(plain, check=True, threads=self._threads)
            connection, peer = self._greet(plain, self._now_s() + self._limits.greeting_s)
            with self._lock:
                self._strangers.pop(number, None)
                self._peers[peer] = None
            if peer.answer(FrameReply(FrameOp.OK, self._greeting), HELLO_NUMBER):
                self._greeted(peer)
                self._listen(connection, peer)
        except (Unreachable, ProtocolError) as error:
            if not (self._stopped or isinstance(error, HungUp)):
                log.warning(
                    "Parameter server: closing the connection of %s: %s", peer or "an unauthenticated peer", error
                )
        except Exception:
            log.exception("Parameter server: the connection of %s failed", peer or "an unauthenticated peer")
        finally:
            plain.shut()
            with self._lock:
                self._strangers.pop(number, None)
            if peer is not None:
                self._part(peer)
                peer.let_go()
            if connection is not None:
                with connection.sending:  # a concurrent push must have left the socket before it is closed
                    connection.close()

    def _greet(self, plain: Wire, until_s: float) -> tuple[FrameConnection, EndpointPeer]:
        """Authenticate a connection. Raises ``ProtocolError`` or ``Unreachable``; a refused peer has been sent the
        reason."""
        connection = FrameConnection(called_over(plain, self._tls(), until_s), check=False, threads=self._threads)
        called = Called(self._secret, connection.read(OPENING_BYTES, until_s))
        connection.write_bytes(called.answer, until_s)
        if not called.accepts(connection.read(PROOF_BYTES, until_s)):
            _refuse(connection, "token", "wrong secret", until_s)
        frame = connection.read_frame(until_s, most_head=MOST_HELLO)
        if frame.op is not FrameOp.HELLO:
            raise ProtocolError(f"{frame.op.name} instead of HELLO")
        hello = CallerHello.unpack(frame.head)
        connection.check = hello.check and connection.wire.checked
        peer = EndpointPeer(connection, hello, self._limits, self._threads)
        refusal = self._met(peer)
        if refusal is not None:
            _refuse(connection, *refusal, until_s)
        return connection, peer

    def _part(self, peer: EndpointPeer) -> None:
        with self._lock:
            self._peers.pop(peer, None)
            orderly = peer.farewell or self._stopped
        for callback in (self._left, self._lost)[: 1 if orderly else 2]:
            try:
                callback(peer)
            except Exception:
                log.exception("Parameter server: cannot clean up after the connection of %s", peer)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _listen(self, connection: FrameConnection, peer: EndpointPeer) -> None:
        """Serve requests until the peer sends BYE, disconnects, or cannot be answered."""
        limits, owed, held = self._limits, 0, 0
        while True:
            connection.idle()
            frame = connection.read_frame(
                self._now_s() + limits.frame_s, bytes_per_s=limits.slowest_bytes_per_s, most_body=limits.body_bytes
            )
            peer.heard_s = self._now_s()
            if owed and (frame.op is not FrameOp.STREAM or len(frame.body) > _LARGE_BYTES):
                if not peer.answer(_DONE, owed):  # what follows may take long
                    return
                owed = held = 0
            if frame.op is FrameOp.BYE:
                peer.farewell = True
                return
            if frame.op is FrameOp.HELLO or frame.op >= FrameOp.OK:
                raise ProtocolError(f"{frame.op.name} is not a request")
            peer.asks(frame)
            reply = _DONE if frame.op is FrameOp.PING else self._handle(peer, frame)
            plain = frame.op is FrameOp.STREAM and reply.op is FrameOp.OK and not (reply.head or reply.parts)
            if plain and held < limits.unanswered and connection.buffered:
                owed, held = frame.request, held + 1
                continue
            if owed and not plain and not peer.answer(_DONE, owed):
                return
            owed = held = 0
            if frame.request != UNASKED and not peer.answer(reply, frame.request):
                return

    def _handle(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        try:
            return self._handler(peer, frame)
        except EdlError as error:
            return FrameReply.no(FrameOp.REFUSED, kind="error", text=str(error))
        except Exception as error:
            log.exception("Parameter server: %s of %s failed", frame.op.name, peer)
            return FrameReply.no(FrameOp.REFUSED, kind="internal", text=f"{type(error).__name__}: {error}")


_DONE = FrameReply()


def _refuse(connection: FrameConnection, kind: str, text: str, until_s: float) -> None:
    """Send the reason to the caller, then raise ``ProtocolError``."""
    connection.write(FrameOp.REFUSED, HELLO_NUMBER, pack_head({"kind": kind, "text": text}), (), until_s)
    raise ProtocolError(f"refused ({kind}): {text}")
