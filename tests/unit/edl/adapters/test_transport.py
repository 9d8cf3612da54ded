"""Messages between an agent and the Master over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from edl.adapters.transport import RECEIVED_AT_ONCE, Connection, MasterServer, MasterService
from edl.wire.messages import AgentMessage, Leaving, MasterMessage, StopRound

PATIENCE_S = 60.0


class Echo:
    """A Master that answers each message with one of the same length."""

    serving = True

    async def join(self, said: AsyncIterator[AgentMessage]) -> AsyncIterator[MasterMessage]:
        async for message in said:
            assert isinstance(message, Leaving)
            yield StopRound(cast(Any, len(message.reason)), message.reason)


def test_messages_of_any_size_pass_in_both_directions() -> None:
    """Also those that the receiver does not accept at once."""
    sizes = [0, 1, 100_000, 3 * RECEIVED_AT_ONCE, 1]
    heard: list[int] = []

    async def body() -> None:
        server = MasterServer(lambda: "token")
        server.serve(cast(MasterService, Echo()))
        connection = Connection("127.0.0.1", await server.start("127.0.0.1"), "token")
        all_heard = asyncio.Event()

        def opened() -> None:
            for size in sizes:
                connection.send(Leaving("x" * size))

        async def hear(message: MasterMessage) -> None:
            assert isinstance(message, StopRound)
            heard.append(len(message.reason))
            if len(heard) == len(sizes):
                all_heard.set()

        running = asyncio.ensure_future(connection.run(opened, hear))
        try:
            await asyncio.wait_for(all_heard.wait(), PATIENCE_S)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await server.stop()

    asyncio.run(body())
    assert heard == sizes
