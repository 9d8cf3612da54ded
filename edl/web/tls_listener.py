"""Accepts connections with TLS for the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from edl.tasks import BackgroundTasks
from edl.web.access import peer_of
from edl.web.connections import HttpConnection, HttpConnections

ACCEPT_AGAIN_S = 1.0
"""Pause after a connection that could not be accepted, probably for lack of descriptors."""


class TlsListener:
    """Accepts connections, and has each make its TLS handshake.

    ``asyncio.Server`` reports a connection only after its handshake, so that any number of silent ones could be open.
    Here a connection counts from the moment at which it is accepted.
    """

    def __init__(
        self, listening: socket.socket, context: ssl.SSLContext, connections: HttpConnections, handshake_s: float
    ) -> None:
        """Begin to accept connections. ``listening``: does not block. ``handshake_s``: time limit of a handshake."""
        self._listening = listening
        self._context = context
        self._connections = connections
        self._handshake_s = handshake_s
        self._tasks = BackgroundTasks()
        self._tasks.begin(self._accept())

    def close(self) -> None:
        """Accept no more connections, and break off all handshakes."""
        asyncio.get_running_loop().remove_reader(self._listening)  # before another file gets its number
        self._tasks.drop()
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listening)
            except ConnectionAbortedError:  # the client has left already
                continue
            except OSError:
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            connection = self._connections.accepted(peer_of(str(address[0])))
            if connection is None:
                accepted.close()
            else:
                self._tasks.begin(self._handshake(accepted, connection))
            await asyncio.sleep(0)  # a flood must not keep the event loop from everything else

    async def _handshake(self, accepted: socket.socket, connection: HttpConnection) -> None:
        done = False
        try:
            with contextlib.suppress(OSError):  # no TLS, no valid certificate, too late, or gone
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=self._handshake_s
                )
                done = True
        finally:
            if not done:
                self._connections.forget(connection)
