"""In-memory streams between agents and Masters: messages arrive in order, are delayed or blocked, or are lost when the
connection breaks.

Replaces ``edl.adapters.transport`` in a launcher. Messages are passed as objects; their codec has its own tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from edl.testing.sim.network import End, Stream
from edl.testing.sim.process import SimDeps, SimProcess
from edl.wire.messages import NOT_THE_MASTER, AgentMessage, MasterMessage

UNREACHABLE_S = 0.3, 1.2
"""Shortest and longest time in seconds until a call without an answer fails."""
KNOCK_S = 1.0


class Joinable(Protocol):
    """A Master's shell, as the simulated server uses it."""

    @property
    def serving(self) -> bool:
        """Whether it accepts streams."""
        ...

    def join(self, said: AsyncIterator[AgentMessage]) -> AsyncIterator[MasterMessage]:
        """Serve an agent's stream until either side ends it."""
        ...


class SimServer:
    """The server of a launcher."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._ends: list[tuple[Stream, End]] = []
        self._service: Joinable | None = None
        self.sent: Callable[[MasterMessage], None] = lambda message: None
        """Called with each message that the Master sends."""

    def serve(self, service: Joinable | None) -> None:
        """Pass new streams to this Master from now on, or to none."""
        self._service = service

    async def stop(self) -> None:
        """Stop listening and close all streams."""
        process = self._process
        if process.deps.listening.get((process.host, process.port)) is process:
            del process.deps.listening[process.host, process.port]
        self.hang_up()

    def hang_up(self) -> None:
        """Close the streams of all clients."""
        for stream, end in self._ends:
            stream.close(end)

    def clients(self) -> set[SimProcess]:
        """The processes whose streams are open."""
        owners = (stream.ends[0].owner for stream, end in self._ends if end.open)
        return {owner for owner in owners if isinstance(owner, SimProcess)}

    @property
    def service(self) -> Joinable | None:
        """The Master that accepts streams, if any."""
        return self._service if self._service is not None and self._service.serving else None

    def accept(self, agent: End) -> Stream:
        """Accept an agent's stream."""
        service = self.service
        assert service is not None  # noqa: S101 - the caller has looked
        incoming: asyncio.Queue[AgentMessage | None] = asyncio.Queue()
        end = End(self._process, incoming.put_nowait, lambda: incoming.put_nowait(None))
        stream = Stream(self._process.deps.network, agent, end)
        self._ends = [(one, its) for one, its in self._ends if its.open]
        self._ends.append((stream, end))
        self._process.loop.create_task(self._serve(service, incoming, stream, end))
        return stream

    async def _serve(
        self, service: Joinable, incoming: asyncio.Queue[AgentMessage | None], stream: Stream, end: End
    ) -> None:
        async def said() -> AsyncIterator[AgentMessage]:
            while (message := await incoming.get()) is not None:
                yield message

        try:
            async for message in service.join(said()):
                self.sent(message)
                stream.send(end, message)
        finally:
            stream.close(end)


class SimConnection:
    """An agent's stream to a Master. Implements ``edl.agent.deps.MasterStream``."""

    def __init__(self, process: SimProcess, host: str, port: int, server_of: Callable[[SimProcess], SimServer]) -> None:
        self._process = process
        self._host = host
        self._port = port
        self._server_of = server_of
        self._stream: Stream | None = None
        self._end: End | None = None

    @property
    def other(self) -> SimProcess | None:
        """The process at the other end, while the stream is open."""
        if self._stream is None or self._end is None or not self._end.open:
            return None
        owner = self._stream.ends[1].owner
        return owner if isinstance(owner, SimProcess) else None

    def hang_up(self) -> None:
        """Close the stream: the process has ended."""
        if self._stream is not None and self._end is not None:
            self._stream.close(self._end)

    def send(self, message: AgentMessage) -> None:
        """Send a message; it is lost if the stream is broken."""
        if self._stream is not None and self._end is not None:
            self._stream.send(self._end, message)

    async def run(self, opened: Callable[[], None], heard: Callable[[MasterMessage], Awaitable[None]]) -> str:
        """Connect and handle messages until the stream ends; returns why it ended."""
        self._process.asks()
        deps = self._process.deps
        network = deps.network
        if not network.both(self._process.host, self._host):
            await asyncio.sleep(deps.rng.uniform(*UNREACHABLE_S))
            return "no answer"
        await asyncio.sleep(network.delay_s())
        other = deps.listening.get((self._host, self._port))
        if other is None:
            return "connection refused"
        if other.paused or not network.both(self._process.host, self._host):
            await asyncio.sleep(deps.rng.uniform(*UNREACHABLE_S))
            return "no answer"
        server = self._server_of(other)
        if server.service is None:
            await asyncio.sleep(network.delay_s())
            return f"unavailable: {NOT_THE_MASTER}"
        coming: asyncio.Queue[MasterMessage | None] = asyncio.Queue()
        self._end = end = End(self._process, coming.put_nowait, lambda: coming.put_nowait(None))
        self._stream = stream = server.accept(end)
        try:
            await asyncio.sleep(network.delay_s())
            if end.open:
                opened()
            while (message := await coming.get()) is not None:
                await heard(message)
            return "the Master closed the stream"
        finally:
            stream.close(end)


async def refuses(deps: SimDeps, source: str, host: str, port: int, timeout_s: float = KNOCK_S) -> bool:
    """Whether the host refuses the connection because no process listens on the port."""
    if not deps.network.both(source, host):
        await asyncio.sleep(timeout_s)
        return False
    await asyncio.sleep(2 * deps.network.delay_s())
    return (host, port) not in deps.listening and deps.network.both(source, host)


async def answers(deps: SimDeps, source: str, host: str, port: int, timeout_s: float = KNOCK_S) -> bool:
    """Whether a launcher listens there and answers."""
    other = deps.listening.get((host, port))
    if other is None or other.paused or not deps.network.both(source, host):
        await asyncio.sleep(timeout_s)
        return False
    await asyncio.sleep(2 * deps.network.delay_s())
    return True
