"""Whether somebody listens at an address: a connection that is closed again at once."""

from __future__ import annotations

import asyncio
import socket


async def knock(host: str, port: int, timeout_s: float) -> None:
    """Connect to the first of the host's addresses that takes it. Raises ``OSError`` for the last one that did not, and
    ``asyncio.TimeoutError``. Whatever becomes of it, a cancellation too, no socket is left open."""
    await asyncio.wait_for(_connect(host, port), timeout_s)


async def knock_socket(path: str, timeout_s: float) -> None:
    """The same for a unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        one.setblocking(False)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(one, path), timeout_s)


async def _connect(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    refusal: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as one:
                one.setblocking(False)
                await loop.sock_connect(one, address)
                return
        except OSError as error:
            refusal = error
    raise refusal or OSError(f"{host} has no address")
