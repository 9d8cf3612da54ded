"""The HTTP interface of one launcher: binds the socket at once, and imports the server later in a thread.

The start of a launcher must not wait for the import of an HTTP library. Only the socket is bound before the launcher
campaigns, because the other launchers need its address. Clients that connect meanwhile wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from edl.errors import PortInUse, SettingError
from edl.file_backed import FileBacked
from edl.metrics.facts import HistoryTotals, NodeFacts
from edl.tasks import end
from edl.watched_master import WatchedMaster
from edl.web.access import Tokens
from edl.web.settings import HttpLimits, HttpSettings
from edl.wire.address import address
from edl.wire.messages import Asked
from edl.wire.node_requests import OutputLines, OutputRequest
from edl.wire.scale_requests import Granted, ScaleRequest
from edl.wire.status import Answer, EventsRequest, HistoryEntry, JobStatus

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - to recognise them
BACKLOG = 128
"""Limit on connections that wait in the kernel's queue."""
DAY_S = 86_400.0


class Authority(Protocol):
    """The part of the elected Master that the HTTP interface uses."""

    @property
    def serving(self) -> bool:
        """Whether the Master has taken over and can answer."""
        ...

    def status(self) -> JobStatus:
        """The current status of the job."""
        ...

    @property
    def totals(self) -> HistoryTotals:
        """What this Master has counted since it took over."""
        ...

    def events(self, request: EventsRequest) -> AsyncIterator[HistoryEntry]:
        """The entries of the history; with ``follow`` also those that are added later."""
        ...

    async def ask(self, asked: Asked) -> Answer:
        """Request a checkpoint or the end of the job; returns once an accepted request is in the store. The outcome
        appears in the history."""
        ...

    async def order(self, asked: Asked) -> Answer:
        """Pass a request to a service; returns once its result is in the store."""
        ...

    async def submit(self, request: ScaleRequest) -> Granted:
        """Accept a request, or refuse it with a reason; returns once an accepted request is in the store."""
        ...


class WorkerOutput(Protocol):
    """What the launchers of nodes know of their workers. All methods raise ``UsageError`` for an unknown node, and
    another ``EdlError`` if its launcher does not answer."""

    async def output(self, node: str, request: OutputRequest) -> OutputLines:
        """Recent lines of the node's workers."""
        ...

    async def stacks(self, node: str) -> OutputLines:
        """The stacks of the node's living workers, which continue to run."""
        ...


class Serving(Protocol):
    """The HTTP server (``edl.web.server``), which wraps the HTTP library."""

    async def start(self, listening: socket.socket) -> None:
        """Serve requests on this socket."""
        ...

    async def conclude(self) -> None:
        """End the streams of the status after sending the current one."""
        ...

    async def close(self) -> None:
        """Accept no more connections. Open requests get a fraction of a second to finish."""
        ...


@dataclass(slots=True)
class WebDeps:
    """What the HTTP interface gets from the launcher."""

    job: str
    settings: HttpSettings
    token: Callable[[], str]
    """The job's own token; empty until it is known."""
    log: Callable[[str], None]
    now_s: Callable[[], float]
    limits: HttpLimits = field(default_factory=HttpLimits)
    master_url: Callable[[], str | None] = lambda: None
    """URL of the Master's HTTP interface; empty: it has none; None: no Master is known."""
    node_facts: Callable[[], Awaitable[NodeFacts]] | None = None
    """Looks at this node, for its metrics; None until the launcher runs."""
    worker_output: WorkerOutput | None = None
    """Asks the launchers of nodes; None until the launcher runs."""


class Web:
    """The HTTP interface of this launcher, whether or not it is the Master."""

    def __init__(self, deps: WebDeps) -> None:
        self.deps = deps
        self.tokens = Tokens(deps.token, deps.settings.token_file, deps.settings.read_token_file, deps.log)
        self.tls = Tls(deps.settings, deps.log) if deps.settings.cert else None
        self.authority: Authority | None = None
        self.url = ""
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._server: Serving | None = None

    def listen(self, host: str) -> str:
        """Bind the port; returns the URL for other hosts. ``host``: the node's address. Raises ``PortInUse``."""
        settings = self.deps.settings
        wanted = settings.host or host
        try:
            family = socket.getaddrinfo(wanted, settings.port, type=socket.SOCK_STREAM)[0][0]
            both = wanted in WILDCARDS and family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self._socket = socket.create_server(
                (wanted, settings.port), family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
        except OSError as error:
            raise PortInUse(
                f"cannot serve HTTP on {address(wanted, settings.port)}: {error.strerror or error}. Choose another "
                "--http-port (0 for any free one) or --http-host"
            ) from error
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1]
        scheme = "https" if self.tls is not None else "http"
        self.url = f"{scheme}://{address(host if wanted in WILDCARDS else wanted, port)}"
        return self.url

    def begin(
        self,
        master_url: Callable[[], str | None],
        node_facts: Callable[[], Awaitable[NodeFacts]],
        worker_output: WorkerOutput,
    ) -> None:
        """Start serving in the background, once the library is imported. The arguments: see ``WebDeps``."""
        self.deps.worker_output = worker_output
        self.deps.master_url = master_url
        self.deps.node_facts = node_facts
        self._serving = asyncio.get_running_loop().create_task(self._begin())

    async def _begin(self) -> None:
        try:
            self.deps.log(f"HTTP: {self.url}{self._warning()}")
            await self._client_or_timeout()
            await asyncio.to_thread(self.refresh)
            module: Any = await asyncio.to_thread(importlib.import_module, "edl.web.server")
            assert self._socket is not None  # noqa: S101 - set by listen
            server: Serving = module.HttpServer(self)
            self._server = server
            await server.start(self._socket)
        except Exception as error:  # noqa: BLE001 - top of a task: training does not depend on it
            self.deps.log(f"HTTP is not served: {type(error).__name__}: {error}")
            if self._socket is not None:
                self._socket.close()  # clients are refused instead of waiting forever

    async def _client_or_timeout(self) -> None:
        """Wait until a client connects, at most ``rest_s``: a starting launcher needs the CPU for other things."""
        assert self._socket is not None  # noqa: S101 - set by listen
        loop, connected = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, connected.set)
        try:
            await asyncio.wait_for(connected.wait(), self.deps.limits.rest_s)
        except asyncio.TimeoutError:
            pass
        finally:
            loop.remove_reader(self._socket)

    def _warning(self) -> str:
        host = self.url.partition("://")[2].rpartition(":")[0].strip("[]")
        if self.tls is not None or host.startswith("127.") or host in ("::1", "localhost"):
            return ""
        return " (without TLS: tokens can be read on the network; use --http-cert and --http-key)"

    def refresh(self) -> None:
        """Reread the files with tokens and certificates that have changed. Blocks on the file system."""
        self.tokens.refresh()
        if self.tls is not None:
            self.tls.files.refresh()

    def use_master(self, authority: Authority | None) -> None:
        """Use this Master from now on; None: this launcher is not the Master."""
        self.authority = authority

    async def see_off(self, master: WatchedMaster) -> None:
        """Beside the Master: when the job has ended, send the final status to everybody who follows it. The launcher
        exits right afterwards, long before the next regular event."""
        while not await master.ended_within(DAY_S):
            pass
        if self._server is not None:
            await self._server.conclude()

    def drain(self) -> None:
        """Do nothing: HTTP is served until the launcher ends (see ``edl.launch.launcher.Sidecar``)."""

    def hurry(self) -> None:
        """Do nothing: see ``drain``."""

    async def leave(self) -> None:
        """Stop listening and end open requests. A second call does nothing."""
        serving, self._serving = self._serving, None
        if serving is not None:
            await end(serving)
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        if self._socket is not None:
            self._socket.close()


class Tls:
    """Certificate, key and client CAs for new connections. ``context`` is for the listener, which never gets another
    one; each connection continues with the newest."""

    def __init__(self, settings: HttpSettings, log: Callable[[str], None]) -> None:
        self._settings = settings
        self.mutual = bool(settings.client_ca)
        files = [one for one in (settings.cert, settings.key, settings.client_ca) if one]
        self.files = FileBacked("the certificates", files, self._load, lambda text: log(f"HTTP: {text}"))
        self.context = self.files.newest
        self.context.sni_callback = self._continue_with_newest

    def _load(self) -> ssl.SSLContext:
        """A context with what the files contain now: a certificate authority cannot be removed from an old one. Raises
        ``SettingError``."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load(context, self._settings)
        if self.mutual:
            context.num_tickets = 0  # a client would not have to present its certificate again
        return context

    def _continue_with_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at the beginning of each handshake, whether or not the client has named a host."""
        connection.context = self.files.newest


def load(context: ssl.SSLContext, settings: HttpSettings) -> None:
    """Load certificate, key and client CAs into a context. Raises ``SettingError`` that names the file."""
    try:
        context.load_cert_chain(settings.cert, settings.key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise SettingError(
            "--http-cert",
            settings.cert,
            f"cannot be used with --http-key={settings.key} ({error})",
            "Give a certificate and its key as PEM files, the key without a password",
        ) from error
    if settings.client_ca:
        try:
            context.load_verify_locations(settings.client_ca)
        except (OSError, ValueError) as error:
            raise SettingError(
                "--http-client-ca", settings.client_ca, f"cannot be used ({error})", "Name a PEM file"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED


def _no_password() -> str:
    raise ValueError("the key has a password")
