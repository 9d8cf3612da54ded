"""An endpoint of a parameter server that says back what it hears, and those who call it, for good and ill."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edl.errors import PsError
from ps.errors import Unreachable
from ps.net.caller import EndpointPeer, FrameCaller, FrameEndpoint, FrameReply
from ps.net.connection import FrameConnection, PlainSocket, now_s
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.protocol.handshake import OPENING_BYTES, TRAINER, Called, CallerHello, Calling
from ps.protocol.messages import PserverAddress

SECRET = "of this pserver"
HOST = "127.0.0.1"
LONG_S = 20.0
"""Far more than anything here takes: nothing waits for it when all is well."""
HELLO = CallerHello(TRAINER, 3, "n1/0")


class Echo:
    """An endpoint that answers with what it gets, and does as the head says."""

    def __init__(self, **options: Any) -> None:
        self.seen: list[tuple[EndpointPeer, FrameOp, bytes]] = []
        self.left: list[EndpointPeer] = []
        self.lost: list[EndpointPeer] = []
        self.go_on = threading.Event()
        self.waiting = threading.Event()
        self.changed = threading.Condition()
        self.endpoint = FrameEndpoint(
            self._handle, secret=SECRET, left=self._add(self.left), lost=self._add(self.lost), **options
        )
        self.endpoint.start(HOST)

    @property
    def tcp(self) -> PserverAddress:
        return PserverAddress(1, "n1-1", HOST, self.endpoint.port)

    @property
    def local(self) -> PserverAddress:
        return PserverAddress(1, "n1-1", HOST, self.endpoint.port, self.endpoint.path, self.endpoint.machine)

    def until(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, LONG_S)

    def _add(self, some: list[EndpointPeer]) -> Callable[[EndpointPeer], None]:
        def add(peer: EndpointPeer) -> None:
            with self.changed:
                some.append(peer)
                self.changed.notify_all()

        return add

    def _handle(self, peer: EndpointPeer, frame: Frame) -> FrameReply:
        with self.changed:
            self.seen.append((peer, frame.op, frame.head))
            self.changed.notify_all()
        match frame.head:
            case b"wait":
                self.waiting.set()
                assert self.go_on.wait(LONG_S)
            case b"moved":
                return FrameReply.no(FrameOp.MOVED, placement_version=9)
            case b"ps error":
                raise PsError("table user: row 5 is too large")
            case b"defect":
                raise ValueError("a defect")
            case b"push":
                assert peer.push(FrameOp.CONTROL, b"unasked", [b"word"])
            case b"how long":
                return FrameReply(FrameOp.OK, pack_head({"wait_s": frame.wait_s}))
            case b"room":
                room = peer.room(len(frame.body))
                room[:] = bytes(frame.body)[::-1]
                return FrameReply(FrameOp.OK, b"", [room])
        if frame.op is FrameOp.STREAM:
            return FrameReply()
        return FrameReply(FrameOp.OK, frame.head, [bytes(frame.body)])


@contextlib.contextmanager
def echo(**options: Any) -> Iterator[Echo]:
    made = Echo(**options)
    try:
        yield made
    finally:
        made.go_on.set()
        made.endpoint.stop(wait_s=LONG_S)


def call(
    place: PserverAddress, hello: CallerHello = HELLO, secret: str = SECRET, deadline_s: float = LONG_S
) -> FrameCaller:
    return FrameCaller.connect(place, hello, secret=secret, deadline_s=deadline_s)


def place(made: Echo, kind: str) -> PserverAddress:
    return made.tcp if kind == "tcp" else made.local


def introduced(server: PserverAddress) -> tuple[socket.socket, FrameConnection]:
    """A connection behind its handshake, to send on what one likes. The connection must not be used after the socket is
    closed."""
    raw = socket.create_connection((server.host, server.port), LONG_S)
    connection = FrameConnection(PlainSocket(raw), check=True)
    calling = Calling(SECRET)
    connection.write_bytes(calling.opening, now_s() + LONG_S)
    connection.write_bytes(calling.answer(connection.read(64, now_s() + LONG_S)), now_s() + LONG_S)
    connection.write(FrameOp.HELLO, 1, HELLO.pack(), (), now_s() + LONG_S)
    assert connection.read_frame(now_s() + LONG_S).op is FrameOp.OK
    raw.settimeout(LONG_S)
    return raw, connection


def dial(made: Echo) -> socket.socket:
    """A TCP connection without a handshake."""
    return socket.create_connection((HOST, made.endpoint.port), LONG_S)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().removeprefix("Parameter server: ") for record in caplog.records]


@contextlib.contextmanager
def impostor(answer: bytes, secret: str = SECRET) -> Iterator[PserverAddress]:
    """A server that gives one answer."""

    def serve() -> None:
        with listener, listener.accept()[0] as raw:
            connection = FrameConnection(PlainSocket(raw), check=True)
            until_s = now_s() + LONG_S
            called = Called(secret, connection.read(OPENING_BYTES, until_s))
            connection.write_bytes(called.answer, until_s)
            with contextlib.suppress(Unreachable):
                connection.read(32, until_s)
                connection.read_frame(until_s)
                connection.write(FrameOp.OK, 1, b"", (), until_s)
                connection.read_frame(until_s)
                connection.write_bytes(answer, until_s)
                connection.idle(until_s)

    listener = socket.create_server((HOST, 0))
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield PserverAddress(1, "n1-1", HOST, listener.getsockname()[1])
    finally:
        thread.join(LONG_S)
