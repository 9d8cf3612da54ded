"""Connections of the HTTP server: limits on their number, and on the time until a request arrives."""

from __future__ import annotations

import asyncio

from aiohttp import web

from edl.web.access import peer_of
from edl.web.settings import HttpLimits


class HttpConnections:
    """Makes the protocol of each connection, and closes those above the limits.

    Connections above the limit, in total or of one peer, are closed at once. A connection is also closed if no request
    head arrives in time: older versions of aiohttp apply their time-out only to later requests.
    """

    def __init__(self, server: web.Server, limits: HttpLimits) -> None:
        self._server = server
        self._limits = limits
        self._open: dict[asyncio.BaseProtocol, HttpConnection] = {}

    def __call__(self) -> HttpConnection:
        """The protocol of a new connection, whose peer is not known yet."""
        return HttpConnection(self, self._server())

    def admit(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        """Count a connection whose peer is now known, or close it if it is above a limit."""
        same = sum(one.peer == connection.peer for one in self._open.values())
        if len(self._open) >= self._limits.connections or same >= self._limits.connections_each:
            transport.abort()
            return
        self._open[connection.inner] = connection
        connection.silent = asyncio.get_running_loop().call_later(self._limits.idle_s, transport.abort)

    def heard(self, inner: asyncio.BaseProtocol) -> None:
        """Called when a request has arrived: the connection is no longer silent."""
        connection = self._open.get(inner)
        if connection is not None and connection.silent is not None:
            connection.silent.cancel()

    def forget(self, connection: HttpConnection) -> None:
        """Called when a connection has ended: count it no longer."""
        self.heard(connection.inner)
        self._open.pop(connection.inner, None)


class HttpConnection(asyncio.Protocol):
    """Counts a connection and passes everything on to aiohttp's protocol."""

    def __init__(self, connections: HttpConnections, inner: web.RequestHandler) -> None:
        self._connections = connections
        self.inner = inner
        self.peer = ""
        self.silent: asyncio.TimerHandle | None = None
        """Closes the connection unless a request arrives first."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection under its peer."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - create_server makes no others
        self.inner.connection_made(transport)
        peername = transport.get_extra_info("peername")
        self.peer = peer_of(str(peername[0])) if peername else ""
        self._connections.admit(self, transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Unregister the connection."""
        self._connections.forget(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass the data to aiohttp's protocol."""
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the end of the stream to aiohttp's protocol."""
        self.inner.eof_received()
        return None

    def pause_writing(self) -> None:
        """Pass the request to pause to aiohttp's protocol."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass the request to resume to aiohttp's protocol."""
        self.inner.resume_writing()
