"""Whether somebody listens at an address, and whether it lives: connections that are closed again at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client begins (RFC 9113, 3.4), with settings that are all the usual ones. The server answers with its own."""


async def knock(host: str, port: int, timeout_s: float) -> None:
    """Connect to the first of the host's addresses that takes it. Raises ``OSError`` for the last one that did not, and
    ``asyncio.TimeoutError``. Whatever becomes of it, a cancellation too, no socket is left open."""
    await asyncio.wait_for(_connect(host, port), timeout_s)


async def answers(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether a server lives there that speaks HTTP/2, such as a launcher. The kernel takes connections for a process
    that is frozen, too; this one has to say something. With TLS it ends the connection, which only the living do."""
    try:
        return await asyncio.wait_for(_greet(host, port), timeout_s)
    except (OSError, asyncio.TimeoutError):
        return False


async def _greet(host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_PREFACE)
        await reader.read(1)
        return True
    except ConnectionResetError:
        return True
    finally:
        writer.close()


async def knock_socket(path: str, timeout_s: float) -> None:
    """The same for a unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        one.setblocking(False)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(one, path), timeout_s)


async def _connect(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    refusal: OSError | None = None
    for family, kind, protocol, _, address in await _addresses(host, port):
        try:
            with socket.socket(family, kind, protocol) as one:
                one.setblocking(False)
                await loop.sock_connect(one, address)
                return
        except OSError as error:
            refusal = error
    raise refusal or OSError(f"{host} has no address")


async def _addresses(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    """Those of a host. A number needs no thread that asks the resolver: a new Master knocks at all nodes."""
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
