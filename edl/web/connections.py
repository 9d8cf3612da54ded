"""Limits on the HTTP server's connections: their number, and the time until a request arrives."""

from __future__ import annotations

import asyncio

from aiohttp import web

from edl.web.access import peer_of
from edl.web.settings import HttpLimits


class HttpConnections:
    """The factory of the connections' protocols, which enforces the limits.

    Connections above the limit, in total or per peer, are closed at once. A connection is also closed if no request
    head arrives within ``idle_s``: older versions of aiohttp apply their timeout only to later requests.
    """

    def __init__(self, server: web.Server, limits: HttpLimits) -> None:
        self._server = server
        self._limits = limits
        self._open: dict[asyncio.BaseProtocol, HttpConnection] = {}

    def __call__(self) -> HttpConnection:
        """The protocol of a new connection, whose peer is not known yet."""
        return HttpConnection(self, self._server())

    def accepted(self, peer: str) -> HttpConnection | None:
        """The protocol of a connection whose TLS handshake begins, counted from now on; None if it exceeds a limit."""
        if not self._has_room(peer):
            return None
        connection = self()
        connection.peer = peer
        self._open[connection.inner] = connection
        return connection

    def admit(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        """Called once a connection can be used: count the connection, or close it if it exceeds a limit."""
        if connection.inner not in self._open and not self._has_room(connection.peer):
            transport.abort()
            return
        self._open[connection.inner] = connection
        connection.silent = asyncio.get_running_loop().call_later(self._limits.idle_s, transport.abort)

    def _has_room(self, peer: str) -> bool:
        same = sum(one.peer == peer for one in self._open.values())
        return len(self._open) < self._limits.connections and same < self._limits.connections_each

    def heard(self, inner: asyncio.BaseProtocol) -> None:
        """Called when a request has arrived: cancel the connection's timeout."""
        connection = self._open.get(inner)
        if connection is not None and connection.silent is not None:
            connection.silent.cancel()

    def forget(self, connection: HttpConnection) -> None:
        """Called when a connection has ended: stop counting it."""
        self.heard(connection.inner)
        self._open.pop(connection.inner, None)


class HttpConnection(asyncio.Protocol):
    """The protocol of one connection: counts it, and forwards everything to aiohttp's protocol."""

    def __init__(self, connections: HttpConnections, inner: web.RequestHandler) -> None:
        self._connections = connections
        self.inner = inner
        self.peer = ""
        self.silent: asyncio.TimerHandle | None = None
        """The timeout that closes the connection unless a request arrives first."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection under its peer."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - create_server makes no others
        self.inner.connection_made(transport)
        peername = transport.get_extra_info("peername") if not self.peer else None
        if peername:
            self.peer = peer_of(str(peername[0]))
        self._connections.admit(self, transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting the connection, and forward to aiohttp's protocol."""
        self._connections.forget(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Forward to aiohttp's protocol."""
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Forward to aiohttp's protocol. Returning None lets the transport close itself."""
        self.inner.eof_received()
        return None

    def pause_writing(self) -> None:
        """Forward to aiohttp's protocol."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Forward to aiohttp's protocol."""
        self.inner.resume_writing()
