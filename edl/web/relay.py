"""Passes requests of the dashboard on to the Master's launcher, and its answers back.

A browser cannot follow a redirect to another origin with its token, and may not reach the other launcher at all: behind
a port-forward there is only this one. Other clients are redirected as before. The token travels on, so the Master's
launcher checks it as if the client had come by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable

import aiohttp
from aiohttp import web

from edl.web.refusal import Refusal
from edl.web.settings import HttpLimits, HttpSettings

ASKED = "Edl-Relay"
"""Header with which a client asks to be relayed. It is not passed on, so that no request goes in circles."""
_REQUEST = ("Accept", "Authorization", "Content-Type", "Last-Event-ID")
_RESPONSE = ("Cache-Control", "Content-Type", "Date", "Retry-After", "WWW-Authenticate")
_AGAIN = {"Retry-After": "1"}
LAST_S = 2.0
"""Seconds that an ending launcher leaves the Master's to end the streams that it passes on: at the end of a job they
bring the final status."""


class Relay:
    """The connections of this launcher to the Master's."""

    def __init__(self, settings: HttpSettings, limits: HttpLimits, loads: Callable[[], int] = lambda: 0) -> None:
        """``loads``: how often this launcher's certificates have been read."""
        self._settings = settings
        self._limits = limits
        self._loads = loads
        self._loaded = 0
        """The same when the session was opened."""
        self._session: aiohttp.ClientSession | None = None
        self._passing = 0
        """Number of requests that are being passed on."""
        self._passed = asyncio.Event()
        """Set when there is none any more."""

    async def close(self) -> None:
        """Close all connections, once nothing is passed on any more, at most ``LAST_S`` later."""
        if self._passing:
            self._passed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._passed.wait(), LAST_S)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def pass_on(self, request: web.Request, url: str, body: bytes) -> web.StreamResponse:
        """Repeat a request at this URL, and return the response, which is sent as it arrives. Raises ``Refusal``: 401
        without a token, 503 if there is no answer or the Master has changed."""
        if "Authorization" not in request.headers:
            raise Refusal(401, "a relayed request needs a token", {"WWW-Authenticate": "Bearer"})
        headers = {name: request.headers[name] for name in _REQUEST if name in request.headers}
        self._passing += 1
        try:
            session = await self._open()
            async with session.request(
                request.method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                if answer.status == 307:
                    raise Refusal(503, "the Master has just changed; ask again", _AGAIN)
                return await self._copy(request, answer)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            raise Refusal(503, f"the Master's launcher does not answer: {why}. Open {url} itself", _AGAIN) from None
        finally:
            self._passing -= 1
            if not self._passing:
                self._passed.set()

    async def _open(self) -> aiohttp.ClientSession:
        if self._session is not None and self._loaded != self._loads():
            before, self._session = self._session, None
            await before.close()  # clients of its streams connect again
        if self._session is None:
            self._loaded = self._loads()
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=3 * self._limits.heartbeat_s)
            connector = aiohttp.TCPConnector(ssl=self._context() or True)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._session

    def _context(self) -> ssl.SSLContext | None:
        """Trusts what the host trusts, and this launcher's own certificate, which others of the job may use too. Where
        clients need one, it presents that certificate."""
        if not self._settings.cert:
            return None
        context = ssl.create_default_context()
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        with contextlib.suppress(OSError):
            context.load_verify_locations(self._settings.cert)
            if self._settings.client_ca:
                context.load_cert_chain(self._settings.cert, self._settings.key)
        return context

    async def _copy(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Send a response as it arrives. A client that does not read within ``send_s`` is disconnected; a response that
        breaks off ends the client's connection."""
        response = web.StreamResponse(status=answer.status)
        for name in _RESPONSE:
            if name in answer.headers:
                response.headers[name] = answer.headers[name]
        if answer.content_length is not None:
            response.content_length = answer.content_length
        await response.prepare(request)
        try:
            async for part in _parts(answer):
                await asyncio.wait_for(response.write(part), self._limits.send_s)
            await asyncio.wait_for(response.write_eof(), self._limits.send_s)
        except (aiohttp.ClientError, asyncio.TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        return response


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for part in answer.content.iter_any():
        yield part
