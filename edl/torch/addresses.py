"""Identifies a group's connections by the addresses that its members have published.

Each rank of gloo publishes in the store where it listens, and the ranks connect to each other there. So a gloo
connection has such an address at one end, and a connection of torch's store has the store's address. No other
connection in the process does, no matter whether the script, a library or another thread opened it, or when.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

Endpoint = tuple[str, int]
"""Host, as a numeric address in its shortest form, and port."""

_LENGTH = struct.Struct("=Q")
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")
_LONGEST = 1024


def endpoint(host: str, port: int) -> Endpoint:
    """Normalize an address: IPv4-mapped IPv6 becomes IPv4, and scope ids are removed."""
    number = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
        number = number.ipv4_mapped
    return str(number), port


def published(data: bytes) -> Endpoint | None:
    """Parse the listening address that a gloo rank publishes in the store; None for other data.

    The format is that of ``gloo::rendezvous``: the host's name, the rank's ``sockaddr_storage``, and the numbers of its
    pairs; name and address are preceded by their lengths.
    """
    name = _sized(data, 0)
    address = None if name is None else _sized(data, _LENGTH.size + len(name))
    if address is None or len(address) < 28:
        return None
    (family,) = _FAMILY.unpack_from(address)
    (port,) = _PORT.unpack_from(address, 2)
    if family == socket.AF_INET:
        return endpoint(socket.inet_ntop(family, address[4:8]), port)
    if family == socket.AF_INET6:
        return endpoint(socket.inet_ntop(family, address[8:24]), port)
    return None


def _sized(data: bytes, at: int) -> bytes | None:
    if len(data) < at + _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    return data[at : at + size] if size <= _LONGEST and at + size <= len(data) else None


class Addresses:
    """The addresses of one group. Written by the thread that forms it, read by the thread that disconnects it."""

    def __init__(self, store_port: int, serves: bool) -> None:
        """``serves``: this is rank 0, which runs torch's store."""
        self.store_port = store_port
        self.store_hosts: frozenset[str] = frozenset()
        """Addresses that the store's name resolves to; empty until they are known."""
        self.own: frozenset[Endpoint] = frozenset()
        self.others: frozenset[Endpoint] = frozenset()
        self._serves = serves

    def note_own(self, data: bytes) -> None:
        """Record a value that this rank has published."""
        found = published(data)
        if found is not None:
            self.own |= {found}

    def note_other(self, data: bytes) -> None:
        """Record a published value that this rank has read."""
        found = published(data)
        if found is not None:
            self.others |= {found}

    def accepted(self, here: Endpoint) -> bool:
        """Whether a peer opened this connection to this rank. Valid only while the listener exists: afterwards others
        may use its port."""
        return here in self.own or (self._serves and here[1] == self.store_port)

    def called(self, here: Endpoint, there: Endpoint | None) -> bool:
        """Whether this rank opened this connection to a peer or the store."""
        if there is None:
            return False
        to_store = there[1] == self.store_port and (
            there[0] in self.store_hosts or (self._serves and there[0] == here[0])
        )
        return to_store or there in self.others

    def listens(self, here: Endpoint) -> bool:
        """Whether gloo listens at this address for this rank."""
        return here in self.own
