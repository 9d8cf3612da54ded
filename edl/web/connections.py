"""HttpConnections of the HTTP server: how many there may be, and how long one may be silent."""

from __future__ import annotations

import asyncio

from aiohttp import web

from edl.web.access import peer_of
from edl.web.settings import Limits


class HttpConnections:
    """Makes the protocol of each connection. Those above the limit, of all or of one peer, are closed as they come, and
    so is one on which no head of a request arrives in time (older versions of aiohttp look after later heads only)."""

    def __init__(self, server: web.Server, limits: Limits) -> None:
        self._server = server
        self._limits = limits
        self._open: dict[asyncio.BaseProtocol, HttpConnection] = {}

    def __call__(self) -> HttpConnection:
        """For one more, whose peer is not known yet."""
        return HttpConnection(self, self._server())

    def admit(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        """Count it, or close it."""
        same = sum(one.peer == connection.peer for one in self._open.values())
        if len(self._open) >= self._limits.connections or same >= self._limits.connections_each:
            transport.abort()
            return
        self._open[connection.inner] = connection
        connection.silent = asyncio.get_running_loop().call_later(self._limits.idle_s, transport.abort)

    def heard(self, inner: asyncio.BaseProtocol) -> None:
        """A request has come."""
        connection = self._open.get(inner)
        if connection is not None and connection.silent is not None:
            connection.silent.cancel()

    def forget(self, connection: HttpConnection) -> None:
        """It is over."""
        self.heard(connection.inner)
        self._open.pop(connection.inner, None)


class HttpConnection(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol."""

    def __init__(self, connections: HttpConnections, inner: web.RequestHandler) -> None:
        self._connections = connections
        self.inner = inner
        self.peer = ""
        self.silent: asyncio.TimerHandle | None = None
        """Closes the connection unless a request comes before."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The peer is known: count it."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - create_server makes no others
        self.inner.connection_made(transport)
        peername = transport.get_extra_info("peername")
        self.peer = peer_of(str(peername[0])) if peername else ""
        self._connections.admit(self, transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Count it no more."""
        self._connections.forget(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on."""
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on."""
        self.inner.eof_received()
        return None

    def pause_writing(self) -> None:
        """Pass on."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self.inner.resume_writing()
