"""The HTTP server: an aiohttp application with the routes of ``edl.web.routes``.

Middlewares check rate limit and token. Then the endpoint checks the names in the path, finds the Master, and parses the
body.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import re
import socket
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from edl.errors import FencedOut, StoreError
from edl.metrics.facts import JobFacts
from edl.tasks import end
from edl.web import bodies, cross_origin, documents, openapi, query, streams
from edl.web.access import RateLimit, Rights, peer_of, unmapped
from edl.web.bodies import NAME
from edl.web.connections import HttpConnections
from edl.web.front import Authority, Web
from edl.web.pages import Pages
from edl.web.refusal import Refusal
from edl.web.relay import ASKED, Relay
from edl.web.routes import ROUTES, Route
from edl.web.status_feed import StatusFeed
from edl.web.tls_listener import TlsListener
from edl.web.worker_output import OutputRoutes
from edl.wire import json_messages
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose
from edl.wire.scale_requests import Granted, ScaleRequest, Verdict
from edl.wire.status import EventsRequest, JobStatus

T = TypeVar("T")
B = TypeVar("B", bound=bodies.AskBody)

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "edl"}
_AGAIN = {"Retry-After": "1"}
_PROBES = tuple(route.path for route in ROUTES if route.public)


@dataclass(frozen=True, slots=True)
class Requester:
    """The sender of a request."""

    rights: Rights
    by: str
    """Description for the history."""


REQUESTER = web.RequestKey("requester", Requester)
"""Set on authorized requests; absent on probes."""


@dataclass(frozen=True, slots=True)
class AuthorizedCall:
    """An authorized and parsed request, and the Master that will handle it."""

    request: web.Request
    authority: Authority
    body: Any
    """The parsed body, of type ``Route.body``; None if the route has none."""
    by: str
    """``Requester.by``."""

    def named(self, part: str) -> str:
        """The value of a placeholder in the path."""
        return self.request.match_info[part]


Handler = Callable[[AuthorizedCall], Awaitable[web.StreamResponse]]
Next = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves HTTP for one launcher."""

    def __init__(self, front: Web) -> None:
        deps = front.deps
        self._front = front
        self._limits = deps.limits
        self._rate = RateLimit(self._limits.rate, self._limits.burst, self._limits.peers)
        self._streams = 0
        self._watching = 0
        """Open streams of the status."""
        self._pages = Pages()
        tls = front.tls
        self._relay = Relay(deps.settings, self._limits, lambda: tls.files.loads if tls is not None else 0)
        self._feed = StatusFeed(self._status_here, self._limits.status_s)
        self._asking: set[asyncio.Future[Any]] = set()
        self._refreshed_s = deps.now_s()
        self._refreshing: asyncio.Future[None] | None = None
        """The last time that the files were reread, in a thread."""
        self._keeping_fresh: asyncio.Task[None] | None = None
        self._handlers: dict[str, Handler] = {
            "job": self._job,
            "scale": self._scale,
            "put_scale": self._put_scale,
            "patch_scale": self._patch_scale,
            "bounds": lambda call: self._submit(call, bodies.bounds(call.body, call.by)),
            "drain": lambda call: self._submit(call, bodies.drain(call.body, call.by)),
            "checkpoint": lambda call: self._ask(call, Purpose.SAVE),
            "stop": lambda call: self._ask(call, Purpose.KILL),
            "suspend": lambda call: self._submit(call, bodies.suspend(call.body, call.by, suspended=True)),
            "resume": lambda call: self._submit(call, bodies.suspend(call.body, call.by, suspended=False)),
            "add_data": self._add_data,
            "cordon": lambda call: self._cordon(call, cordoned=True),
            "uncordon": lambda call: self._cordon(call, cordoned=False),
            "events": self._events,
            "status": self._status,
        }
        workers = OutputRoutes(deps)
        self._local_handlers: dict[str, Next] = {
            "document": self._document,
            "metrics": self._metrics,
            "jobs": self._jobs,
            "output": workers.output,
            "stacks": workers.stacks,
        }
        # In this order, so that unauthorized requests are cheap and reveal nothing.
        app = web.Application(middlewares=[self._finish, self._limit_rate, self._authorize])
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._endpoint(route), expect_handler=_expected_later)
        self._pages.add_routes(app.router)
        app.on_response_prepare.append(cross_origin.allow_reading)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that disconnects ends its stream
            keepalive_timeout=self._limits.idle_s,
            lingering_time=0,  # the rest of a refused request is not read
            auto_decompress=False,
            access_log=None,
            logger=_silent(),
            shutdown_timeout=0.2,
        )
        self._connections: HttpConnections | None = None
        self._sockets: asyncio.Server | TlsListener | None = None

    async def start(self, listening: socket.socket) -> None:
        """Serve requests on this socket."""
        tls = self._front.tls
        loop = asyncio.get_running_loop()
        await self._runner.setup()
        assert self._runner.server is not None  # noqa: S101 - setup has made it
        connections = HttpConnections(self._runner.server, self._limits)
        self._connections = connections
        if tls is None:
            self._sockets = await loop.create_server(connections, sock=listening)
        else:
            self._keeping_fresh = loop.create_task(self._keep_fresh())
            self._sockets = TlsListener(listening, tls.context, connections, self._limits.handshake_s)

    async def conclude(self) -> None:
        """Send everybody who follows the status the last one, and wait until they have it, at most ``send_s``."""
        await self._feed.conclude()

    async def close(self) -> None:
        """Stop serving. Open requests get a fraction of a second to finish."""
        if self._keeping_fresh is not None:
            await end(self._keeping_fresh)
        if self._sockets is not None:
            self._sockets.close()
        await self._relay.close()
        await self._runner.cleanup()

    # --- every request ---------------------------------------------------------------------------------------------

    @web.middleware
    async def _finish(self, request: web.Request, handler: Next) -> web.StreamResponse:
        """Turn errors into responses, and send the response. A client that does not read it within ``send_s`` is
        disconnected."""
        if self._connections is not None:
            self._connections.heard(request.protocol)
        try:
            response = await handler(request)
        except Refusal as refusal:
            response = _refused(request, refusal)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"this URL does not support {request.method}; it supports {allowed}"
            response = _refused(request, Refusal(405, text, {"Allow": allowed}))
        except web.HTTPNotFound:
            text = "no such URL; /openapi.json describes all of them"
            response = _refused(request, Refusal(404, text))
        except (ConnectionError, HttpProcessingError):
            raise
        except Exception as error:  # noqa: BLE001 - top of a request: the launcher continues, and the client learns no details
            self._front.deps.log(f"HTTP: a bug in edl: {''.join(traceback.format_exception(error))}")
            response = _refused(request, Refusal(500, "a bug in edl; the launcher's log has the details"))
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        transport = request.transport
        if transport is not None and not response.prepared:
            late = asyncio.get_running_loop().call_later(self._limits.send_s, transport.abort)
            try:
                await response.prepare(request)
                await response.write_eof()
            finally:
                late.cancel()
        return response

    @web.middleware
    async def _limit_rate(self, request: web.Request, handler: Next) -> web.StreamResponse:
        """Enforce the rate limit per peer. Raises ``Refusal`` (429)."""
        peer = peer_of(request.remote or "")
        # Probes are counted separately, so that a flood of other requests does not get a launcher restarted.
        if not self._rate.admits(f"probe {peer}" if _is_probe(request) else peer, self._front.deps.now_s()):
            raise Refusal(429, "too many requests from your address", _AGAIN)
        return await handler(request)

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Next) -> web.StreamResponse:
        """Identify the requester, except for probes and the dashboard's files. Raises ``Refusal``: 401, or 403 for a
        read-only token."""
        allowed = cross_origin.preflight(request)
        if allowed is not None:
            return allowed
        found = request.match_info.http_exception is None
        if not (found and (_is_probe(request) or self._pages.serves(request))):
            requester = await self._requester(request)
            if found and request.method != "GET" and requester.rights is not Rights.FULL:
                raise Refusal(403, "this token is read-only")
            request[REQUESTER] = requester
        return await handler(request)

    def _endpoint(self, route: Route) -> Next:
        """The function that aiohttp's router calls for a route."""

        async def carry_out(request: web.Request) -> web.StreamResponse:
            if route.public:
                return self._probe(route)
            self._check_names(request.match_info)
            if route.private and request[REQUESTER].rights is not Rights.FULL:
                raise Refusal(403, "this token is read-only")
            if route.local:
                return await self._local_handlers[route.name](request)
            try:
                authority = self._authority(request)
            except Refusal as refusal:
                if refusal.code != 307 or ASKED not in request.headers:
                    raise
                content = await self._read(request) if route.body is not None else b""
                return await self._relay.pass_on(request, refusal.headers["Location"], content)
            body = await self._body(request, route.body, route) if route.body is not None else None
            return await self._handlers[route.name](AuthorizedCall(request, authority, body, request[REQUESTER].by))

        return carry_out

    def _check_names(self, names: Mapping[str, str]) -> None:
        """Check the names in the path. Raises ``Refusal`` (404)."""
        job = self._front.deps.job
        if names.get("job", job) != job:
            raise Refusal(404, f"there is no such job here; this is job {job}")
        for part, what in (("node", "node"), ("dataset", "data set")):
            if part in names and not re.fullmatch(NAME, names[part]):
                raise Refusal(404, f"there is no such {what}")

    def _probe(self, route: Route) -> web.Response:
        ready = route.name == "health" or self._front.authority is not None or self._front.deps.master_url() is not None
        if ready:
            return web.Response(text="ok\n")
        return web.Response(text="no Master\n", status=503, headers=_AGAIN)

    async def _requester(self, request: web.Request) -> Requester:
        """The sender of a request, by token or certificate. Raises ``Refusal`` (401)."""
        await self._refresh()
        peer = unmapped(request.remote or "unknown")
        sent = request.headers.get("Authorization")
        tls = self._front.tls
        if sent is None and tls is not None and tls.mutual:
            if request.headers.get("Origin") is not None:
                raise Refusal(401, "requests from a browser page need a token", {"WWW-Authenticate": "Bearer"})
            return Requester(Rights.FULL, f"HTTP, {_subject(request)} at {peer}")
        rights = self._front.tokens.rights(sent or "")
        if rights is None:
            why = "a token is required: Authorization: Bearer TOKEN"
            if sent:
                why = "unknown token: the job has been restarted, or the token file has changed"
            raise Refusal(401, why, {"WWW-Authenticate": 'Bearer realm="edl"'})
        return Requester(rights, f"HTTP, {peer}")

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._limits.certificates_s)
            with contextlib.suppress(RuntimeError):  # there can be no further thread at present
                await self._refresh()

    async def _refresh(self) -> None:
        """Reread changed token files, at most every ``refresh_s``; in a thread, because a file system may hang."""
        now_s = self._front.deps.now_s()
        if now_s - self._refreshed_s < self._limits.refresh_s:
            return
        if self._refreshing is not None and not self._refreshing.done():
            return  # a file system hangs: another thread would hang, too, until the launcher has none left
        self._refreshed_s = now_s
        self._refreshing = asyncio.ensure_future(asyncio.to_thread(self._front.refresh))
        done, _ = await asyncio.wait({self._refreshing}, timeout=self._limits.refresh_s)
        for one in done:
            one.result()

    def _authority(self, request: web.BaseRequest) -> Authority:
        """The Master, if it runs in this launcher. Raises ``Refusal``: 307 with the URL of the launcher that runs it,
        or 503."""
        authority = self._front.authority
        if authority is not None and authority.serving:
            return authority
        url = self._front.deps.master_url()
        if url is None:
            raise Refusal(503, "the job has no Master at the moment; its launchers are electing one", _AGAIN)
        if url == self._front.url:  # it was here, or it serves on the loopback address of another host
            raise Refusal(
                503,
                "the Master is not here: another one is being elected, or its host serves HTTP on a loopback address "
                "only (--http-host)",
                _AGAIN,
            )
        if not url:
            raise Refusal(
                503, "the Master's launcher serves no HTTP. Give --http-port to all launchers of the job", _AGAIN
            )
        target = url + str(request.rel_url.relative() if request.rel_url.is_absolute() else request.rel_url)
        raise Refusal(307, "another launcher is the Master; repeat the request there", {"Location": target})

    # --- bodies ----------------------------------------------------------------------------------------------------

    async def _body(self, request: web.BaseRequest, kind: type[B], route: Route) -> B:
        """The parsed body. Raises ``Refusal``: 400, 408, 413 or 415."""
        most, length = self._limits.body_bytes, request.content_length
        if length is not None and length > most:
            raise Refusal(413, f"the body has {length} bytes; the limit is {most}")
        if not request.can_read_body or length == 0:
            if route.body_required:
                raise Refusal(400, "a body is required")
            return kind()
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refusal(415, "the body must not be compressed")
        if request.content_type not in route.types or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
            raise Refusal(415, f"the body must be {' or '.join(route.types)} in UTF-8")
        return bodies.parse(kind, await self._read(request))

    async def _read(self, request: web.BaseRequest) -> bytes:
        """Read the body. Raises ``Refusal``: 413 above ``body_bytes``, 408 after ``body_s``, 400 if it is broken."""
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # only now: a refused body need not be sent
        most = self._limits.body_bytes
        data = bytearray()

        async def read() -> None:
            async for piece in request.content.iter_any():
                data.extend(piece)
                if len(data) > most:
                    raise Refusal(413, f"the body is longer than {most} bytes")

        try:
            await asyncio.wait_for(read(), self._limits.body_s)
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self._limits.body_s:g} s") from None
        except (web.RequestPayloadError, HttpProcessingError):
            raise Refusal(400, "the body cannot be read") from None
        return bytes(data)

    # --- operations --------------------------------------------------------------------------------------------------

    async def _job(self, call: AuthorizedCall) -> web.Response:
        history = [entry async for entry in call.authority.events(EventsRequest())]
        return _json(documents.job_of(call.authority.status(), history))

    async def _scale(self, call: AuthorizedCall) -> web.Response:
        return _json(documents.scale_of(call.authority.status()))

    async def _put_scale(self, call: AuthorizedCall) -> web.Response:
        granted = await self._granted(call, bodies.put_scale(call.body, call.authority.status(), call.by))
        return _json(documents.scale_of(call.authority.status()), documents.CODES[granted.verdict])

    async def _patch_scale(self, call: AuthorizedCall) -> web.Response:
        change = bodies.patch_scale(call.body, call.authority.status(), call.by)
        code = 200 if change is None else documents.CODES[(await self._granted(call, change)).verdict]
        return _json(documents.scale_of(call.authority.status()), code)

    async def _cordon(self, call: AuthorizedCall, *, cordoned: bool) -> web.Response:
        return await self._submit(call, bodies.cordon(call.body, call.named("node"), call.by, cordoned=cordoned))

    async def _submit(self, call: AuthorizedCall, change: ScaleRequest) -> web.Response:
        granted = await self._granted(call, change)
        return _json(documents.granted(granted), documents.CODES[granted.verdict])

    async def _granted(self, call: AuthorizedCall, change: ScaleRequest) -> Granted:
        """The Master's answer to an accepted request. A client that disconnects does not withdraw it. Raises
        ``Refusal`` if it is refused."""
        granted = await self._answered(call.authority.submit(change))
        if granted.verdict not in (Verdict.ACCEPTED, Verdict.KNOWN):
            raise Refusal(documents.CODES[granted.verdict], granted.text)
        return granted

    async def _answered(self, question: Coroutine[Any, Any, T]) -> T:
        """Wait for the Master's answer, at most ``master_s``. Raises ``Refusal`` (503) if the store does not answer or
        the Master changes."""
        if len(self._asking) >= self._limits.asking:
            question.close()
            raise Refusal(503, "the store does not answer and too many requests wait for it: nothing was done", _AGAIN)
        asking = asyncio.ensure_future(question)
        self._asking.add(asking)
        asking.add_done_callback(self._forget)
        done, _ = await asyncio.wait({asking}, timeout=self._limits.master_s)
        if not done:
            raise Refusal(503, "the store does not answer: the request may still take effect. Check the size", _AGAIN)
        if asking.cancelled():
            raise Refusal(503, "the Master has just changed. Check the size, and retry", _AGAIN)
        try:
            return asking.result()
        except (StoreError, FencedOut) as error:
            raise Refusal(503, f"the Master has just changed ({error}). Check the size, and retry", _AGAIN) from None

    async def _add_data(self, call: AuthorizedCall) -> web.Response:
        answer = await self._answered(call.authority.order(bodies.add_data(call.body, call.named("dataset"), call.by)))
        if not answer.ok:
            raise Refusal(422, answer.text)
        return _json(documents.answered(answer), 202)

    def _forget(self, asking: asyncio.Future[Any]) -> None:
        """Called when a request has ended. Retrieves its exception, because asyncio would log an unretrieved
        one."""
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()

    async def _ask(self, call: AuthorizedCall, purpose: Purpose) -> web.Response:
        asked: Asked = bodies.switch(call.body, purpose, call.by)
        answer = await self._answered(call.authority.ask(asked))
        if not answer.ok:
            raise Refusal(422, answer.text)
        return _json(documents.answered(answer), 202)

    # --- what every launcher serves ----------------------------------------------------------------------------------

    async def _jobs(self, request: web.Request) -> web.Response:
        front = self._front
        master = front.url if front.authority is not None else front.deps.master_url() or ""
        return _json(documents.JobsDocument([front.deps.job], request[REQUESTER].rights.value, master))

    async def _document(self, _: web.Request) -> web.Response:
        return _json(openapi.document(self._front.deps.job))

    async def _metrics(self, request: web.Request) -> web.Response:
        """The metrics, collected now. Raises ``Refusal``: 501 without ``prometheus_client``, 503 during the start."""
        deps, authority = self._front.deps, self._front.authority
        if deps.node_facts is None:
            raise Refusal(503, "the launcher is starting", _AGAIN)
        try:
            module = await asyncio.to_thread(importlib.import_module, "edl.metrics.exposition")
        except ModuleNotFoundError as error:
            text = f"metrics need a package that is not installed here ({error.name}): pip install 'edl[metrics]'"
            raise Refusal(501, text) from None
        node = await deps.node_facts()
        job = JobFacts(authority.status(), authority.totals) if authority is not None and authority.serving else None
        body, media_type = module.expose(deps.job, node, job, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": media_type})

    # --- streams ---------------------------------------------------------------------------------------------------

    async def _events(self, call: AuthorizedCall) -> web.StreamResponse:
        request = call.request
        after, follow = query.number(request, "after"), query.flag(request, "follow")
        before, last = query.number(request, "before"), query.number(request, "last")
        if follow and (before or last):
            raise Refusal(422, "follow continues without an end: leave out before and last")
        sse = "text/event-stream" in request.headers.get("Accept", "")
        if sse and re.fullmatch(r"[0-9]{1,15}", request.headers.get("Last-Event-ID", "")):
            after = max(after, int(request.headers["Last-Event-ID"]))
        if self._streams >= self._limits.streams:
            raise Refusal(429, f"{self._streams} event streams are open already", {"Retry-After": "10"})
        response = _stream_of("text/event-stream" if sse else "application/x-ndjson")
        self._streams += 1
        entries = call.authority.events(EventsRequest(after, follow))
        if before or last:
            entries = streams.page_of(entries, before, last)
        try:
            await response.prepare(request)
            text_of, heartbeat = (streams.event, ":\n\n") if sse else (streams.line, "\n")
            await streams.stream(request, response, entries, text_of, heartbeat, self._limits)
        finally:
            self._streams -= 1
            await streams.close(entries)
        return response

    async def _status(self, call: AuthorizedCall) -> web.StreamResponse:
        request = call.request
        if "text/event-stream" not in request.headers.get("Accept", ""):
            return _json(call.authority.status())
        if self._watching >= self._limits.status_streams:
            raise Refusal(429, f"{self._watching} streams of the status are open already", {"Retry-After": "10"})
        response = _stream_of("text/event-stream")
        self._watching += 1
        events = self._feed.follow()
        try:
            await response.prepare(request)
            await streams.stream(request, response, events, str, ":\n\n", self._limits)
        finally:
            self._watching -= 1
            await streams.close(events)
        return response

    def _status_here(self) -> JobStatus | None:
        """The status, if the Master runs in this launcher."""
        authority = self._front.authority
        return authority.status() if authority is not None and authority.serving else None


def _stream_of(media_type: str) -> web.StreamResponse:
    """A response that is sent in parts."""
    response = web.StreamResponse(headers=_HEADERS)
    response.content_type = media_type
    response.charset = "utf-8"
    return response


def _json(value: Any, code: int = 200) -> web.Response:
    return web.Response(body=json_messages.encode(value), status=code, content_type="application/json", charset="utf-8")


def _is_probe(request: web.BaseRequest) -> bool:
    return request.rel_url.raw_path in _PROBES


async def _expected_later(_: web.Request) -> None:
    """Do not answer ``Expect: 100-continue`` yet: ``_read`` does, so that the body of a refused request is not sent."""


def _refused(request: web.BaseRequest, refusal: Refusal) -> web.StreamResponse:
    if _is_probe(request):
        response = web.Response(text=f"{refusal.message}\n", status=refusal.code)
    else:
        response = _json(documents.refused(refusal), refusal.code)
    response.headers.update(refusal.headers)
    if not request.content.is_eof():
        response.force_close()
    return response


def _subject(request: web.BaseRequest) -> str:
    """The common name in the client's certificate, for the history."""
    transport = request.transport
    certificate = transport.get_extra_info("peercert") if transport is not None else None
    for part in (certificate or {}).get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return bodies.words(str(value))
    return "a certificate"


def _silent() -> logging.Logger:
    """A logger that discards aiohttp's messages about invalid HTTP requests, which need no action."""
    logger = logging.Logger("edl.web.protocol", logging.CRITICAL)
    logger.addHandler(logging.NullHandler())
    return logger
