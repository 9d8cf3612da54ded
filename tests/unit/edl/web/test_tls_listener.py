"""Connections with TLS count from the start, whether or not they make their handshake."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from asyncio.selector_events import BaseSelectorEventLoop
from pathlib import Path
from typing import Any

import pytest

from edl.web import tls_listener
from edl.web.settings import HttpLimits
from tests.support.web_fixture import Setup, play
from tests.unit.edl.web.test_access import made, of, openssl, settings
from tests.unit.edl.web.test_limits import crowd, until

__all__ = ["made"]

pytestmark = openssl


def limits(**changes: Any) -> HttpLimits:
    """Limits that end no connection by its age."""
    return HttpLimits(rate=1e6, burst=1e6, idle_s=1e6, handshake_s=1e6, **changes)


def open_ones(on: Setup) -> int:
    """Connections that the server counts."""
    server: Any = on.web._server
    return len(server._connections._open) if server is not None and server._connections is not None else 0


@pytest.mark.parametrize("limit", ["connections", "connections_each"])
def test_silent_connections_above_the_limit_are_closed_at_once(made: Path, limit: str) -> None:
    async def scenario(on: Setup) -> None:
        kept = await crowd(on)
        assert not any(reader.at_eof() for reader, _ in kept)
        assert open_ones(on) == 4
        assert (await on.ask("GET", "JOB/scale")).code == 200
        for _, writer in kept:
            writer.close()
        await until(lambda: open_ones(on) == 1)
        _, writer = await on.raw()
        await until(lambda: open_ones(on) == 2)  # it is silent when the server ends
        writer.close()

    play(scenario, settings(made), limits(**{limit: 4}), tls=of(made))


def test_a_failed_handshake_makes_room(made: Path) -> None:
    async def scenario(on: Setup) -> None:
        for _ in range(10):
            reader, writer = await on.raw(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            await until(lambda: open_ones(on) == 0)
        assert (await on.ask("GET", "/healthz")).code == 200

    play(scenario, settings(made), limits(connections_each=2), tls=of(made))


def test_a_handshake_that_takes_too_long_makes_room(made: Path) -> None:
    async def scenario(on: Setup) -> None:
        reader, writer = await on.raw()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: open_ones(on) == 0)

    play(scenario, settings(made), HttpLimits(handshake_s=0.01), tls=of(made))


def test_connections_that_cannot_be_accepted_do_not_end_the_server(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = BaseSelectorEventLoop.sock_accept
    failures = [ConnectionAbortedError(), OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    async def flaky(loop: BaseSelectorEventLoop, listening: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(loop, listening)

    async def scenario(on: Setup) -> None:
        assert (await on.ask("GET", "/healthz")).code == 200

    monkeypatch.setattr(BaseSelectorEventLoop, "sock_accept", flaky)
    monkeypatch.setattr(tls_listener, "ACCEPT_AGAIN_S", 0.0)
    play(scenario, settings(made), limits(), tls=of(made))
    assert failures == []
