"""Who is at an address: a launcher that lives, one that is frozen, or nobody."""

from __future__ import annotations

import asyncio
import socket

from edl.adapters.knocking import answers
from edl.adapters.transport import MasterServer, refuses

HOST = "127.0.0.1"
SHORT_S = 0.2


def test_a_launcher_answers() -> None:
    async def main() -> None:
        server = MasterServer(lambda: "token")
        port = await server.start(HOST)
        try:
            assert await answers(HOST, port, 30.0)
            assert not await refuses(HOST, port)
        finally:
            await server.stop()

    asyncio.run(main())


def test_a_process_that_is_frozen_is_silent() -> None:
    """The kernel takes connections for it."""
    with socket.create_server((HOST, 0)) as frozen:
        port = frozen.getsockname()[1]
        assert not asyncio.run(answers(HOST, port, SHORT_S))
        assert not asyncio.run(refuses(HOST, port))


def test_whoever_hangs_up_lives() -> None:
    async def main() -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_server(hang_up, HOST, 0) as server:
            assert await answers(HOST, server.sockets[0].getsockname()[1], 30.0)

    asyncio.run(main())


def test_nobody_does_not_answer() -> None:
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    assert not asyncio.run(answers(HOST, port, 30.0))
    assert asyncio.run(refuses(HOST, port))
