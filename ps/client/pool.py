"""Connections to pservers: one per pserver and purpose, each with a thread that connects on demand.

Requests to different pservers run in parallel; those to one pserver for one purpose run one at a time. If a connection
that was already in use turns out to be broken, its thread reconnects and repeats the request once, without a pause; the
pserver recognises a repeated push by its sequence number. Any other retry is the caller's decision.
"""

from __future__ import annotations

import contextlib
import itertools
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import EdlError, PsError
from edl.threads import ThreadLock, ThreadQueue, Threads
from ps.errors import TimedOut, Unreachable
from ps.net.caller import FrameCaller
from ps.net.connection import SYSTEM_SOCKETS, Into, Sockets
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.protocol.handshake import CallerHello
from ps.protocol.messages import PserverAddress

CONNECT_S = 5.0


@dataclass(slots=True)
class PserverCall:
    """One request to a pserver."""

    op: FrameOp
    head: Mapping[str, Any]
    parts: Sequence[Any] = ()
    into: Into | None = None
    deadline_s: float = 60.0
    wait_s: float = 2.0
    """Seconds after which the pserver answers WAIT if it cannot answer yet."""
    given_up: bool = False
    """The caller has given up; the request is not sent if it has not been yet."""


@dataclass(slots=True)
class PserverAnswer:
    """The answer to a call: a frame or an error. The frame's body is invalid once ``landed`` has returned."""

    frame: Frame | None = None
    error: Exception | None = None
    head: Mapping[str, Any] = field(default_factory=dict)


Landed = Callable[[PserverAnswer], None]


class PooledConnection:
    """A connection to one pserver for one purpose, with its own thread."""

    def __init__(
        self,
        server: PserverAddress,
        hello: CallerHello,
        secret: str,
        tls: ssl.SSLContext | None,
        threads: Threads = SYSTEM_THREADS,
        sockets: Sockets = SYSTEM_SOCKETS,
    ) -> None:
        self.server = server
        self._threads, self._sockets = threads, sockets
        self._hello, self._secret, self._tls = hello, secret, tls
        self._calls: ThreadQueue[tuple[PserverCall, Landed] | None] = threads.queue()
        self._lock = threads.lock()
        self._caller: FrameCaller | None = None
        self._gone = ""
        self._thread = threads.start(self._run, name=f"ps-{server.name}")

    def ask(self, call: PserverCall, landed: Landed) -> None:
        """Queue a call. ``landed`` is called with the answer on the connection's thread."""
        self._calls.put((call, landed))

    def close(self, gone: str = "") -> None:
        """Close the connection. With ``gone``, abort the pending call with this reason; without it, let the call finish
        and send the farewell."""
        if gone:
            with self._lock:
                self._gone = gone
                caller = self._caller
            if caller is not None:
                caller.abort()
        self._calls.put(None)

    def interrupt(self) -> None:
        """Abort the pending call."""
        with self._lock:
            caller = self._caller
        if caller is not None:
            caller.abort()

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the connection's thread to end."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            (call, landed), frame = item, None
            try:
                frame = self._request(call)
                answer = PserverAnswer(frame, head=frame.json())
            except Exception as error:  # noqa: BLE001 - passed on to the caller
                answer = PserverAnswer(error=error)
            landed(answer)
            del item, call, landed, answer, frame  # they hold large arrays
        with self._lock:
            caller, self._caller = self._caller, None
        if caller is not None:
            with contextlib.suppress(EdlError):
                caller.close()

    def _request(self, call: PserverCall) -> Frame:
        head = pack_head(call.head)
        caller, fresh = self._connected(call.deadline_s)
        while True:
            if call.given_up:  # checked only after interrupt() can see the connection
                raise Unreachable("the caller has given up the request")
            try:
                return caller.request(
                    call.op, head, call.parts, deadline_s=call.deadline_s, wait_s=call.wait_s, into=call.into
                )
            except Unreachable as error:
                if fresh or isinstance(error, TimedOut) or self._gone:
                    raise
            caller, fresh = self._connected(call.deadline_s)

    def _connected(self, deadline_s: float) -> tuple[FrameCaller, bool]:
        """An open connection, and whether it is a new one. Raises ``Unreachable``."""
        with self._lock:
            caller, gone = self._caller, self._gone
        if gone:
            raise Unreachable(gone)
        if caller is not None and not caller.broken:
            return caller, False
        wait_s = min(CONNECT_S, deadline_s)
        caller = FrameCaller.connect(
            self.server, self._hello, secret=self._secret, deadline_s=wait_s, tls=self._tls, threads=self._threads,
            sockets=self._sockets,
        )  # fmt: skip
        with self._lock:
            self._caller = caller
            gone = self._gone
        if gone:
            caller.abort()
            raise Unreachable(gone)
        return caller, True


@dataclass(slots=True)
class ConnectionPool:
    """All connections of one client to pservers."""

    hello: CallerHello
    secret: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    threads: Threads = SYSTEM_THREADS
    sockets: Sockets = SYSTEM_SOCKETS
    _connections: dict[tuple[str, int], PooledConnection] = field(default_factory=dict)
    _lock: ThreadLock = field(init=False)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._lock = self.threads.lock()

    def ask(self, purpose: str, server: PserverAddress, call: PserverCall, landed: Landed) -> None:
        """Queue a call on the connection for this server and purpose. Raises ``PsError`` if the pool is closed."""
        with self._lock:
            if self._closed:
                raise PsError("this parameter-server client is closed")
            # under the lock: a call queued after close() would never be answered
            self._connection(purpose, server).ask(call, landed)

    def prepare(self, purposes: Iterable[str], servers: Iterable[PserverAddress]) -> None:
        """Start the threads of connections that may first be needed while the interpreter exits: Python 3.12.0 to
        3.12.2 starts none then."""
        with self._lock:
            if not self._closed:
                for purpose, server in itertools.product(purposes, servers):
                    self._connection(purpose, server)

    def _connection(self, purpose: str, server: PserverAddress) -> PooledConnection:
        connection = self._connections.get((purpose, server.number))
        if connection is None:
            connection = self._connections[purpose, server.number] = PooledConnection(
                server, self.hello, self.secret, self.tls, self.threads, self.sockets
            )
        return connection

    def follow(self, servers: Iterable[int]) -> None:
        """Close the connections to all pservers but those in ``servers``."""
        alive = set(servers)
        with self._lock:
            gone = [key for key in self._connections if key[1] not in alive]
            connections = [self._connections.pop(key) for key in gone]
        for connection in connections:
            connection.close(f"parameter server {connection.server.name} is gone, according to the Master")

    def interrupt(self, purpose: str, servers: Iterable[int]) -> None:
        """Abort the pending calls for this purpose to these pservers."""
        with self._lock:
            connections = [self._connections[purpose, one] for one in servers if (purpose, one) in self._connections]
        for connection in connections:
            connection.interrupt()

    def close(self, *, farewell: bool) -> None:
        """Close all connections. Without ``farewell`` the pservers consider this process dead."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close("" if farewell else "this client is closed")
        for connection in connections:
            connection.join(1.0)
