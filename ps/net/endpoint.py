"""The side of a parameter server that is called: it listens, and serves each peer in a thread of its own.

So a peer that is slow, silent or malicious holds up nobody but itself. Strangers get so far as to prove that they know
the secret, in a few seconds, with a few hundred bytes; whoever sends what is no frame is hung up on, with one line in
the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edl.errors import EdlError, PortInUse, ProtocolError
from edl.wire.address import address
from edl.wire.proof import PROOF_BYTES, draw
from ps.errors import HungUp, Unreachable
from ps.net.buffers import KEPT_BYTES, LENT_BYTES, Arena, Lent
from ps.net.connection import Connection, Plain, machine_id, now_s
from ps.net.tls import called_over
from ps.protocol.frames import MOST_BODY, UNASKED, Frame, Op, pack_head, views
from ps.protocol.handshake import HELLO_NUMBER, MOST_HELLO, OPENING_BYTES, Called, Hello

log = logging.getLogger(__name__)

_LARGE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. The parts may be memory that is used again once it is sent (``Peer.room``)."""

    op: Op = Op.OK
    head: bytes = b""
    parts: Sequence[Any] = ()

    @staticmethod
    def no(op: Op, **content: Any) -> Reply:
        """Other than OK, with a head of these."""
        return Reply(op, pack_head(content))


@dataclass(frozen=True, slots=True)
class Limits:
    """What an endpoint allows."""

    greeting_s: float = 5.0
    """From the connection to an accepted HELLO."""
    strangers: int = 64
    """Connections that have not come so far. One more, and the oldest of them is closed."""
    peers: int = 4096
    frame_s: float = 30.0
    """A frame that has begun, or an answer, takes this long at most, and more if it is large:"""
    slowest_bytes_per_s: float = 1024 * 1024
    body_bytes: int = MOST_BODY
    push_s: float = 5.0
    """For words that are said unasked."""
    unanswered: int = 32
    """Frames of a stream that are answered together, at most."""


class Peer:
    """Somebody who is connected to an ``Endpoint``."""

    def __init__(self, connection: Connection, hello: Hello, limits: Limits) -> None:
        self.hello = hello
        self.role = hello.role
        self.number = hello.number
        self.name = hello.name
        self.data: Any = None
        """Whatever the owner of the endpoint wants to keep here."""
        self.farewell = False
        """It has said BYE."""
        self.heard_s = now_s()
        """When it last said anything."""
        self._connection = connection
        self._limits = limits
        self._out = Arena()
        self._lent: Lent | None = None
        self._lending = False

    def __str__(self) -> str:
        return str(self.hello)

    def room(self, size: int) -> memoryview:
        """Memory for the body of the next answer, used again after that. For the handler of this peer only."""
        if not self._lending or not LENT_BYTES <= size <= KEPT_BYTES:
            return self._out.room(size)
        if self._lent is None:
            self._lent = Lent()
        return self._lent.room(size)

    @property
    def gone(self) -> bool:
        """Whether it is known to have hung up: somebody who waits on its behalf need not. Any thread."""
        return self._connection.wire.hung_up()

    def push(self, op: Op, head: bytes = b"", parts: Sequence[Any] = ()) -> bool:
        """Say something unasked. Any thread; False when it cannot be said, and the connection ends then."""
        return self._write(op, UNASKED, head, parts, self._limits.push_s)

    def hang_up(self) -> None:
        """End the connection. Any thread."""
        self._connection.wire.shut()

    def asks(self, frame: Frame) -> None:
        """For the endpoint: what comes next is the answer to this."""
        self._lending = frame.borrows and self._connection.lends

    def answer(self, reply: Reply, request: int) -> bool:
        """For the endpoint."""
        return self._write(reply.op, request, reply.head, reply.parts, self._limits.frame_s, self._lending)

    def let_go(self) -> None:
        """For the endpoint: the connection is over."""
        if self._lent is not None:
            self._lent.close()

    def _write(
        self, op: Op, request: int, head: bytes, parts: Sequence[Any], patience_s: float, lending: bool = False
    ) -> bool:
        connection = self._connection
        body = views(parts)
        lent = self._lent if lending and self._lent is not None and self._lent.holds(body) else None
        patience_s += sum(part.nbytes for part in body) / self._limits.slowest_bytes_per_s
        if not connection.sending.acquire(timeout=patience_s):
            connection.wire.shut()
            return False
        try:
            connection.write(op, request, head, body, now_s() + patience_s, lent=lent)
            return True
        except Unreachable as error:
            log.debug("Parameter server: %s cannot be answered: %s", self, error)
            connection.wire.shut()
            return False
        finally:
            connection.sending.release()


Handler = Callable[[Peer, Frame], Reply]


class Endpoint:
    """Listens, and calls ``handler`` with each request, in a thread for each peer.

    The body of a request lies in memory that is used again as soon as the handler returns. A handler that raises
    ``EdlError`` has the peer told REFUSED with kind ``error`` and the text; anything else is logged, and told as
    ``internal``. ``met`` may refuse a peer: it returns ``(kind, text)``. ``greeted``: it has been told that it is not
    refused, and may be told more. ``lost``: the connection of a peer that was
    met ended without a farewell; ``left``: it ended at all (called first). They come from the peer's own thread.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        secret: str,
        met: Callable[[Peer], tuple[str, str] | None] = lambda peer: None,
        greeted: Callable[[Peer], None] = lambda peer: None,
        left: Callable[[Peer], None] = lambda peer: None,
        lost: Callable[[Peer], None] = lambda peer: None,
        greeting: dict[str, Any] | None = None,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._handler, self._secret, self._tls = handler, secret, tls
        self._met, self._greeted, self._left, self._lost = met, greeted, left, lost
        self._greeting = pack_head(greeting or {})
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._strangers: dict[int, Plain] = {}
        self._peers: set[Peer] = set()
        self._threads: set[threading.Thread] = set()
        self._numbers = 0
        self._stopped = False
        self._listeners: list[socket.socket] = []
        self.host, self.port, self.path, self.machine = "", 0, "", ""

    def start(self, host: str, port: int = 0) -> None:
        """Listen on TCP, and on a unix socket where there are abstract ones. Raises ``PortInUse``."""
        try:
            family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {address(host, port)} for parameter servers' peers: {error.strerror}. Name an "
                "address of this host with --local-addr"
            ) from error
        self._listeners.append(listener)
        self.host, self.port = host, int(listener.getsockname()[1])
        self.machine = machine_id()
        if self.machine:
            self.path = f"edl-ps-{os.getpid()}-{draw()[:8].hex()}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind(f"\0{self.path}")
            local.listen(256)
            self._listeners.append(local)
        for one in self._listeners:
            self._launch(self._accept, one)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Those that are connected."""
        with self._lock:
            return tuple(self._peers)

    def stop(self, *, wait_s: float = 1.0) -> None:
        """Listen no more and end every connection; handlers under way are waited for, for a moment. ``lost`` is not
        called for connections that end this way."""
        with self._lock:
            self._stopped = True
            wires = [*self._strangers.values(), *(peer._connection.wire for peer in self._peers)]
            threads = list(self._threads)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for wire in wires:
            wire.shut()
        until_s = now_s() + wait_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - now_s()))

    # --- connections -------------------------------------------------------------------------------------------------

    def _launch(self, target: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                target(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="edl-ps-endpoint", daemon=True)
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._stopped or listener.fileno() < 0:
                    return
                log.warning("Parameter server: cannot take a connection: %s", error)
                threading.Event().wait(1.0)  # no descriptors left: not at once again
                continue
            try:
                wire = Plain(connection)
            except OSError:
                connection.close()  # it has hung up already
                continue
            with self._lock:
                self._numbers += 1
                number = self._numbers
                if self._stopped or len(self._peers) >= self._limits.peers:
                    connection.close()
                    if not self._stopped:
                        log.warning("Parameter server: %d peers are connected: no more", len(self._peers))
                    continue
                if len(self._strangers) >= self._limits.strangers:
                    oldest = min(self._strangers)
                    self._strangers.pop(oldest).shut()
                self._strangers[number] = wire
            try:
                self._launch(self._serve, number, wire)
            except RuntimeError as error:  # no more threads
                log.warning("Parameter server: cannot take a connection: %s", error)
                with self._lock:
                    self._strangers.pop(number, None)
                wire.close()

    def _serve(self, number: int, plain: Plain) -> None:
        peer: Peer | None = None
        connection: Connection | None = None
        try:
            connection = Connection(plain, check=True)
            connection, peer = self._greet(plain, now_s() + self._limits.greeting_s)
            with self._lock:
                self._strangers.pop(number, None)
                self._peers.add(peer)
            if peer.answer(Reply(Op.OK, self._greeting), HELLO_NUMBER):
                self._greeted(peer)
                self._listen(connection, peer)
        except (Unreachable, ProtocolError) as error:
            if not (self._stopped or isinstance(error, HungUp)):
                log.warning("Parameter server: closing the connection of %s: %s", peer or "somebody unknown", error)
        except Exception:
            log.exception("Parameter server: the connection of %s failed", peer or "somebody unknown")
        finally:
            plain.shut()
            with self._lock:
                self._strangers.pop(number, None)
            if peer is not None:
                self._part(peer)
                peer.let_go()
            if connection is not None:
                with connection.sending:  # whoever pushes just now has to be out of the socket before it is closed
                    connection.close()

    def _greet(self, plain: Plain, until_s: float) -> tuple[Connection, Peer]:
        """Raises ``ProtocolError`` or ``Unreachable`` when nothing comes of it; the other side has been told why."""
        connection = Connection(called_over(plain, self._tls, until_s), check=False)
        called = Called(self._secret, connection.read(OPENING_BYTES, until_s))
        connection.write_bytes(called.answer, until_s)
        if not called.accepts(connection.read(PROOF_BYTES, until_s)):
            _refuse(connection, "token", "wrong secret", until_s)
        frame = connection.read_frame(until_s, most_head=MOST_HELLO)
        if frame.op is not Op.HELLO:
            raise ProtocolError(f"{frame.op.name} instead of HELLO")
        hello = Hello.unpack(frame.head)
        connection.check = hello.check and connection.wire.checked
        peer = Peer(connection, hello, self._limits)
        refusal = self._met(peer)
        if refusal is not None:
            _refuse(connection, *refusal, until_s)
        return connection, peer

    def _part(self, peer: Peer) -> None:
        with self._lock:
            self._peers.discard(peer)
            orderly = peer.farewell or self._stopped
        for tell in (self._left, self._lost)[: 1 if orderly else 2]:
            try:
                tell(peer)
            except Exception:
                log.exception("Parameter server: the end of the connection of %s", peer)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _listen(self, connection: Connection, peer: Peer) -> None:
        """Until the peer says BYE or hangs up, or cannot be answered."""
        limits, owed, held = self._limits, 0, 0
        while True:
            connection.idle()
            frame = connection.read_frame(
                now_s() + limits.frame_s, bytes_per_s=limits.slowest_bytes_per_s, most_body=limits.body_bytes
            )
            peer.heard_s = now_s()
            if owed and (frame.op is not Op.STREAM or len(frame.body) > _LARGE_BYTES):
                if not peer.answer(_DONE, owed):  # what comes now may take long
                    return
                owed = held = 0
            if frame.op is Op.BYE:
                peer.farewell = True
                return
            if frame.op is Op.HELLO or frame.op >= Op.OK:
                raise ProtocolError(f"{frame.op.name} is no request")
            peer.asks(frame)
            reply = _DONE if frame.op is Op.PING else self._handle(peer, frame)
            plain = frame.op is Op.STREAM and reply.op is Op.OK and not (reply.head or reply.parts)
            if plain and held < limits.unanswered and connection.buffered:
                owed, held = frame.request, held + 1
                continue
            if owed and not plain and not peer.answer(_DONE, owed):
                return
            owed = held = 0
            if frame.request != UNASKED and not peer.answer(reply, frame.request):
                return

    def _handle(self, peer: Peer, frame: Frame) -> Reply:
        try:
            return self._handler(peer, frame)
        except EdlError as error:
            return Reply.no(Op.REFUSED, kind="error", text=str(error))
        except Exception as error:
            log.exception("Parameter server: %s of %s failed", frame.op.name, peer)
            return Reply.no(Op.REFUSED, kind="internal", text=f"{type(error).__name__}: {error}")


_DONE = Reply()


def _refuse(connection: Connection, kind: str, text: str, until_s: float) -> None:
    """Tell the caller why, and raise ``ProtocolError``."""
    connection.write(Op.REFUSED, HELLO_NUMBER, pack_head({"kind": kind, "text": text}), (), until_s)
    raise ProtocolError(f"refused ({kind}): {text}")
