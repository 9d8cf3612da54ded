"""Tests whether a server listens at an address, and whether it is alive, by short connections; and this host's own
address on the way there."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The start of an HTTP/2 client connection (RFC 9113, 3.4) with default settings. The server answers with its own
settings."""

_LOCAL_NAMES = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
"""Names that ``/etc/hosts`` of the usual distributions have for loopback addresses."""


async def knock(host: str, port: int, timeout_s: float) -> None:
    """Connect to the first of the host's addresses that accepts, and close the connection. Raises the ``OSError`` of
    the last attempt, or ``asyncio.TimeoutError``. No socket is left open, even after a cancellation."""
    await asyncio.wait_for(_connect(host, port), timeout_s)


async def answers(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether a live HTTP/2 server, such as a launcher, is there. The kernel also accepts connections for a frozen
    process, so an answer is required. A server with TLS closes the connection, which also proves that it lives."""
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


def own_address_towards(host: str, port: int) -> str | None:
    """This host's address on the route to another one; no packet is sent. None without a route. Raises ``OSError`` if
    the name does not resolve."""
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def default_route_address() -> str | None:
    """This host's address on the way to hosts of no network of its own; no packet is sent. None without a route there.
    A loopback address is none."""
    for nobody in ("192.0.2.1", "2001:db8::1"):  # addresses for documentation, RFC 5737 and RFC 3849
        found = own_address_towards(nobody, 9)
        if found is not None and not is_loopback(found):
            return found
    return None


def is_loopback(address: str) -> bool:
    """Whether this is a loopback address. Raises ``ValueError`` if it is no address; a zone (``%eth0``) is allowed."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def means_loopback(host: str) -> bool:
    """Whether the host of an endpoint is this one on purpose: ``localhost`` or a loopback address. The host's own name
    may have a loopback address as well, in ``/etc/hosts``."""
    name = host.lower().rstrip(".")
    if name.startswith("localhost.") or name.endswith(".localhost") or name in _LOCAL_NAMES:
        return True
    try:
        return is_loopback(host)
    except ValueError:
        return False


async def knock_socket(path: str, timeout_s: float) -> None:
    """Like ``knock``, for a unix socket."""
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
    """The host's addresses. A numeric address needs no resolver thread: a new Master connects to all nodes at once."""
    with contextlib.suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
