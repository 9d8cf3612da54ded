"""Probing an address: a live launcher, a frozen one, or none."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from edl.adapters import knocking
from edl.adapters.knocking import answers
from edl.adapters.transport import MasterClient, MasterServer, refuses
from tests.support.relay import start_relay

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


def test_a_master_that_is_slow_to_answer_is_not_given_up() -> None:
    """It hears from all nodes at once when it is new, and an attempt that is given up has cost it as much as any."""

    async def main() -> None:
        server = MasterServer(lambda: "token")
        port = await server.start(HOST)

        # gRPC's first limit would be a tenth of that.
        async with await start_relay(port, pause_s=0.6) as proxy:
            client = MasterClient(HOST, proxy.sockets[0].getsockname()[1], "token", timeout_s=30.0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.status()
            assert caught.value.details() == "this launcher is not the Master"
            await client.close()
            await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({"192.0.2.1": "10.0.0.5"}, "10.0.0.5"),
        ({"192.0.2.1": None, "2001:db8::1": "fd00::5"}, "fd00::5"),
        ({"192.0.2.1": "127.0.0.1", "2001:db8::1": None}, None),
    ],
)
def test_the_address_of_the_default_route(
    routes: dict[str, str | None], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knocking, "own_address_towards", lambda host, port: routes[host])
    assert knocking.default_route_address() == expected


def test_hosts_that_are_this_one_on_purpose() -> None:
    meant = ("localhost", "LocalHost.", "a.localhost", "localhost.localdomain", "ip6-localhost", "127.0.1.1", "::1")
    assert all(map(knocking.means_loopback, meant))
    assert not any(map(knocking.means_loopback, ("node0", "localhosts", "10.0.0.5", "fe80::1%eth0")))
