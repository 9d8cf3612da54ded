"""gRPC between agents, Masters and the command line.

Every launcher serves from its start, so its port answers as long as the launcher lives: a refused connection proves its
death. Launchers that are not the Master answer "unavailable" to calls for the Master. Every call carries the job token
(``admission``).
"""

from __future__ import annotations

import asyncio
import functools
import socket
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from edl.adapters.admission import LIMITS, TokenInterceptor, small
from edl.adapters.identity import Identity
from edl.adapters.knocking import knock
from edl.errors import PortInUse, ProtocolError, StoreError
from edl.wire import codec
from edl.wire.address import address
from edl.wire.messages import NOT_THE_MASTER, AgentMessage, Asked, MasterMessage
from edl.wire.node_requests import OptionsRequest, OptionValues, OutputLines, OutputRequest, StacksRequest
from edl.wire.purpose import Purpose
from edl.wire.scale_requests import Granted, ScaleRequest
from edl.wire.status import Answer, EventsRequest, HistoryEntry, JobStatus, Question

SERVICE = "edl.v1.Master"
_ACCEPTED = ("edl-master", "1")
"""Sent by a Master as soon as it accepts a stream, so that an agent knows it is attached, not just connected."""
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Otherwise a message that arrives is answered with a ping, by which gRPC estimates how much may be under way.
    ("grpc.http2.bdp_probe", 0),
    # By default the server drops clients that ping this often.
    ("grpc.http2.min_ping_interval_without_data_ms", 50),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel: streams are limited per connection
]
DEFAULT_LEASE_TTL_S = 3.0
RECEIVED_AT_ONCE = 1024 * 1024
"""Bytes that a client accepts before it has read them: more than the start of a world of some thousand nodes, so that
the Master can send it without waiting."""
STACKS_TIMEOUT_S = 15.0
"""Seconds that a launcher may take to answer with the stacks of all its workers."""
LEAST_CONNECT_S = 1.0
"""A newly elected Master is contacted by all nodes at once, and may need that many seconds to answer each."""


AGENT_PINGS_AFTER = 0.36
MASTER_PINGS_AFTER = 0.43
"""Fractions of a lease without traffic after which the agent and the Master send a ping. A live agent is always first,
so each connection costs the Master one ping, not two."""
SILENT_AFTER = 0.5
"""Fraction of a lease after which both ends consider a silent peer gone."""


def _options(lease_ttl_s: float, pings_after: float) -> list[tuple[str, int]]:
    """gRPC options by which both ends notice within half a lease that the peer is silent (a pulled cable, a frozen
    process).

    The time limits for an isolated node start there: see docs/decisions/0007-when-isolated.md.
    """
    lease_ms = max(400.0, 1000 * lease_ttl_s)
    return [
        *_OPTIONS,
        ("grpc.keepalive_time_ms", int(pings_after * lease_ms)),
        ("grpc.keepalive_timeout_ms", int((SILENT_AFTER - pings_after) * lease_ms)),
        # gRPC's time limit for one connection attempt: an abandoned attempt has still cost the Master work.
        ("grpc.min_reconnect_backoff_ms", max(int(LEAST_CONNECT_S * 1000), int(SILENT_AFTER * lease_ms))),
    ]


def _channel(host: str, port: int, lease_ttl_s: float, identity: Identity | None) -> grpc.aio.Channel:
    """A channel. ``identity`` is set in jobs with a secret: both ends then prove that they hold it in the TLS
    handshake."""
    window = ("grpc.http2.lookahead_bytes", RECEIVED_AT_ONCE)
    options: list[tuple[str, Any]] = [*_options(lease_ttl_s, AGENT_PINGS_AFTER), window]
    if identity is None:
        return grpc.aio.insecure_channel(address(host, port), options=options)
    options += identity.channel_options
    return grpc.aio.secure_channel(address(host, port), identity.of_client(), options=options)


class MasterService(Protocol):
    """The interface that an elected Master offers to the server."""

    @property
    def serving(self) -> bool:
        """Whether it has taken over and can answer."""
        ...

    def join(self, said: AsyncIterator[AgentMessage]) -> AsyncIterator[MasterMessage]:
        """Serve one agent's stream until either side ends it."""
        ...

    def status(self) -> JobStatus:
        """The current status of the job."""
        ...

    def events(self, request: EventsRequest) -> AsyncIterator[HistoryEntry]:
        """The history, and with ``follow`` also new entries."""
        ...

    async def ask(self, asked: Asked) -> Answer:
        """Accept a request, or answer why not; it is in the store when this returns."""
        ...

    async def order(self, asked: Asked) -> Answer:
        """Pass a request on to a service, or answer why not."""
        ...

    async def submit(self, request: ScaleRequest) -> Granted:
        """Accept a request for another size or other members, or answer why not; it is in the store when this
        returns."""
        ...


class NodeService(Protocol):
    """What each launcher answers for its own node."""

    def output(self, request: OutputRequest) -> OutputLines:
        """Recent output of the node's workers."""
        ...

    async def stacks(self, request: StacksRequest) -> OutputLines:
        """The stacks of the node's living workers, which continue to run."""
        ...

    def options(self) -> OptionValues:
        """The launcher's options."""
        ...


class MasterServer:
    """The launcher's gRPC server, whether or not it is the Master. ``connections``: maximum number of connections."""

    def __init__(
        self,
        token: Callable[[], str],
        lease_ttl_s: float = DEFAULT_LEASE_TTL_S,
        identity: Identity | None = None,
        connections: int = 4096,
    ) -> None:
        self._connections = connections
        self._identity = identity
        self._lease_ttl_s = lease_ttl_s
        self._service: MasterService | None = None
        self._node: NodeService | None = None
        self._token = token
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on exactly this address; returns the port. Raises ``PortInUse``."""
        _check_can_listen(host, port)  # gRPC's own error says less, and is also printed
        most = ("grpc.max_allowed_incoming_connections", self._connections)
        options = [*_options(self._lease_ttl_s, MASTER_PINGS_AFTER), *LIMITS, most]
        self._server = grpc.aio.server(interceptors=(TokenInterceptor(self._token),), options=options)
        handlers: dict[str, Any] = {
            "Join": grpc.stream_stream_rpc_method_handler(self._join, codec.decode_agent, codec.encode_master),
            "Status": grpc.unary_unary_rpc_method_handler(self._status, small(_decode_question), codec.encode),
            "Events": grpc.unary_stream_rpc_method_handler(self._events, small(_decode_request), codec.encode),
            "Ask": grpc.unary_unary_rpc_method_handler(self._ask, small(_decode_asked), codec.encode),
            "Output": grpc.unary_unary_rpc_method_handler(self._output, small(_decode_output), codec.encode),
            "Stacks": grpc.unary_unary_rpc_method_handler(self._stacks, small(_decode_stacks), codec.encode),
            "Options": grpc.unary_unary_rpc_method_handler(self._options, small(_decode_options), codec.encode),
            **{kind.__name__: self._scale_handler(kind) for kind in typing.get_args(ScaleRequest)},
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            bound = self._listen(self._server, address(host, port))
        except RuntimeError as error:
            raise PortInUse(
                f"cannot listen on {address(host, port)}: {error}. Name an address of this host with --local-addr"
            ) from error
        await self._server.start()
        return int(bound)

    def _listen(self, server: grpc.aio.Server, where: str) -> int:
        if self._identity is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, self._identity.of_server())

    def serve(self, service: MasterService | None) -> None:
        """Answer with this Master from now on, or with none."""
        self._service = service

    def serve_node(self, node: NodeService) -> None:
        """Answer for this node from now on."""
        self._node = node

    async def stop(self) -> None:
        """Stop listening; open streams end."""
        if self._server is not None:
            await self._server.stop(0.2)

    async def _serving_master(self, context: Any) -> MasterService:
        service = self._service
        if service is None or not service.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, NOT_THE_MASTER)
        assert service is not None  # noqa: S101 - abort raises
        return service

    async def _own_node(self, context: Any) -> NodeService:
        if self._node is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this launcher is still starting")
        assert self._node is not None  # noqa: S101 - abort raises
        return self._node

    async def _output(self, request: OutputRequest, context: Any) -> OutputLines:
        return (await self._own_node(context)).output(request)

    async def _stacks(self, request: StacksRequest, context: Any) -> OutputLines:
        return await (await self._own_node(context)).stacks(request)

    async def _options(self, request: OptionsRequest, context: Any) -> OptionValues:
        return (await self._own_node(context)).options()

    async def _join(self, requests: AsyncIterator[AgentMessage], context: Any) -> AsyncIterator[MasterMessage]:
        service = await self._serving_master(context)
        await context.send_initial_metadata((_ACCEPTED,))
        async for message in service.join(requests):
            yield message

    async def _status(self, request: Question, context: Any) -> JobStatus:
        return (await self._serving_master(context)).status()

    async def _events(self, request: EventsRequest, context: Any) -> AsyncIterator[HistoryEntry]:
        service = await self._serving_master(context)
        async for entry in service.events(request):
            yield entry

    async def _ask(self, request: Asked, context: Any) -> Answer:
        service = await self._serving_master(context)
        answering = service.order if request.purpose in (Purpose.DATA, Purpose.NOTIFY) else service.ask
        try:
            return await answering(request)
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise AssertionError("unreachable") from None

    def _scale_handler(self, kind: type[ScaleRequest]) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            self._submit, small(functools.partial(codec.decode, kind)), codec.encode
        )

    async def _submit(self, request: ScaleRequest, context: Any) -> Granted:
        service = await self._serving_master(context)
        try:
            return await service.submit(request)
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise AssertionError("unreachable") from None


class Connection:
    """An agent's stream to the Master."""

    decode: Callable[[bytes], MasterMessage] = staticmethod(codec.decode_master)

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        lease_ttl_s: float = DEFAULT_LEASE_TTL_S,
        identity: Identity | None = None,
    ) -> None:
        self._channel = _channel(host, port, lease_ttl_s, identity)
        self._metadata = _metadata(token)
        self._outgoing: asyncio.Queue[AgentMessage | None] = asyncio.Queue()

    def send(self, message: AgentMessage) -> None:
        """Queue a message. It is lost if the stream breaks; everything that matters is sent again when the agent
        attaches."""
        self._outgoing.put_nowait(message)

    async def run(self, opened: Callable[[], None], heard: Callable[[MasterMessage], Awaitable[None]]) -> str:
        """Open the stream, call ``opened`` once a Master has accepted it, then ``heard`` for each message.

        Returns why the stream ended.
        """
        method = self._channel.stream_stream(f"/{SERVICE}/Join", codec.encode_agent, self.decode)
        try:
            call: Any = method(self._requests(), metadata=self._metadata)
            if _ACCEPTED in tuple(await call.initial_metadata() or ()):
                opened()
            async for message in call:
                if message is None:  # gRPC's result for a message that could not be decoded
                    raise ProtocolError("the Master sent a message that this version of edl cannot read")
                await heard(message)
            return "the Master closed the stream"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name.lower()}: {error.details()}"
        except ProtocolError as error:
            return str(error)
        finally:
            self._outgoing.put_nowait(None)
            await self._channel.close()

    async def _requests(self) -> AsyncIterator[AgentMessage]:
        while (message := await self._outgoing.get()) is not None:
            yield message


class MasterClient:
    """The command line's client of the Master."""

    def __init__(
        self, host: str, port: int, token: str, timeout_s: float = 5.0, identity: Identity | None = None
    ) -> None:
        self._channel = _channel(host, port, DEFAULT_LEASE_TTL_S, identity)
        self._metadata = _metadata(token)
        self._timeout_s = timeout_s

    async def status(self) -> JobStatus:
        """The current status of the job. Raises ``grpc.aio.AioRpcError``."""
        method = self._channel.unary_unary(f"/{SERVICE}/Status", codec.encode, _decode_status)
        reply: Any = method(Question(), metadata=self._metadata, timeout=self._timeout_s)
        status: JobStatus = await reply
        return status

    async def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        """The history after a line number, and with ``follow`` also new entries. Raises ``grpc.aio.AioRpcError``."""
        method = self._channel.unary_stream(f"/{SERVICE}/Events", codec.encode, _decode_entry)
        call: Any = method(EventsRequest(after, follow), metadata=self._metadata)
        async for entry in call:
            yield entry

    async def ask(self, asked: Asked, timeout_s: float | None = None) -> Answer:
        """Use a switch. ``timeout_s``: None: as for other calls. Raises ``grpc.aio.AioRpcError``."""
        method = self._channel.unary_unary(f"/{SERVICE}/Ask", codec.encode, _decode_answer)
        reply: Any = method(asked, metadata=self._metadata, timeout=timeout_s or self._timeout_s)
        answer: Answer = await reply
        return answer

    async def submit(self, request: ScaleRequest) -> Granted:
        """Request another size or other members. Raises ``grpc.aio.AioRpcError``."""
        data = codec.encode(request)  # gRPC would send an empty message in place of one that cannot be encoded
        method: Any = self._channel.unary_unary(f"/{SERVICE}/{type(request).__name__}", None, _decode_granted)
        reply: Any = method(data, metadata=self._metadata, timeout=self._timeout_s)
        granted: Granted = await reply
        return granted

    async def close(self) -> None:
        """Close the gRPC channel; running calls end."""
        await self._channel.close()


class NodeClient:
    """The command line's client of one launcher."""

    def __init__(
        self, host: str, port: int, token: str, timeout_s: float = 5.0, identity: Identity | None = None
    ) -> None:
        self._channel = _channel(host, port, DEFAULT_LEASE_TTL_S, identity)
        self._metadata = _metadata(token)
        self._timeout_s = timeout_s

    async def output(self, request: OutputRequest) -> OutputLines:
        """Recent output of the node's workers. Raises ``grpc.aio.AioRpcError``."""
        return await self._call("Output", request, self._timeout_s)

    async def stacks(self, request: StacksRequest) -> OutputLines:
        """The stacks of the node's workers. Raises ``grpc.aio.AioRpcError``."""
        return await self._call("Stacks", request, STACKS_TIMEOUT_S)

    async def options(self) -> OptionValues:
        """The launcher's options. Raises ``grpc.aio.AioRpcError``."""
        method: Any = self._channel.unary_unary(f"/{SERVICE}/Options", codec.encode, _decode_values)
        reply: Any = method(OptionsRequest(), metadata=self._metadata, timeout=self._timeout_s)
        values: OptionValues = await reply
        return values

    async def _call(self, name: str, request: OutputRequest | StacksRequest, timeout_s: float) -> OutputLines:
        method = self._channel.unary_unary(f"/{SERVICE}/{name}", codec.encode, _decode_lines)
        reply: Any = method(request, metadata=self._metadata, timeout=timeout_s)
        lines: OutputLines = await reply
        return lines

    async def close(self) -> None:
        """Close the gRPC channel; running calls end."""
        await self._channel.close()


async def refuses(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether the host refuses connections on the port. Silence and success both count as no."""
    try:
        await knock(host, port, timeout_s)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    return False


def _check_can_listen(host: str, port: int) -> None:
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise PortInUse(
            f"cannot listen on {address(host, port)}: {error.strerror}. Name an address of this host with --local-addr"
        ) from error


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def _decode_question(data: bytes) -> Question:
    return codec.decode(Question, data)


def _decode_request(data: bytes) -> EventsRequest:
    return codec.decode(EventsRequest, data)


def _decode_asked(data: bytes) -> Asked:
    return codec.decode(Asked, data)


def _decode_output(data: bytes) -> OutputRequest:
    return codec.decode(OutputRequest, data)


def _decode_stacks(data: bytes) -> StacksRequest:
    return codec.decode(StacksRequest, data)


def _decode_options(data: bytes) -> OptionsRequest:
    return codec.decode(OptionsRequest, data)


def _decode_values(data: bytes) -> OptionValues:
    return codec.decode(OptionValues, data)


def _decode_lines(data: bytes) -> OutputLines:
    return codec.decode(OutputLines, data)


def _decode_answer(data: bytes) -> Answer:
    return codec.decode(Answer, data)


def _decode_granted(data: bytes) -> Granted:
    return codec.decode(Granted, data)


def _decode_status(data: bytes) -> JobStatus:
    return codec.decode(JobStatus, data)


def _decode_entry(data: bytes) -> HistoryEntry:
    return codec.decode(HistoryEntry, data)
