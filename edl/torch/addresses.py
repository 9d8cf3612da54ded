"""Which connections are a group's: by the addresses that its members have told each other.

gloo publishes in the store where each rank listens; the ranks then call one another there. So a connection of gloo's
has such an address at one of its ends, and one of torch's store has that of the store. Nothing else in the process
has, whoever opened it and whenever: the script, a library, another thread.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

Endpoint = tuple[str, int]
"""Host, as a number in its shortest form, and port."""

_LENGTH = struct.Struct("=Q")
_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")
_LONGEST = 1024


def endpoint(host: str, port: int) -> Endpoint:
    """An IPv4 host that is seen through an IPv6 socket counts as what it is; scopes are left out."""
    number = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(number, ipaddress.IPv6Address) and number.ipv4_mapped is not None:
        number = number.ipv4_mapped
    return str(number), port


def published(data: bytes) -> Endpoint | None:
    """Where a rank of gloo listens, as it says in the store; None for anything else.

    The format is that of ``gloo::rendezvous``: the host's name, the ``sockaddr_storage`` of the rank, the numbers of
    its pairs; text and address with their lengths in front.
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
    """Those of one group. Added to by the thread that forms it, read by the one that cuts it."""

    def __init__(self, store_port: int, serves: bool) -> None:
        """``serves``: this is rank 0, which torch's store is with."""
        self.store_port = store_port
        self.store_hosts: frozenset[str] = frozenset()
        """What the store's name stands for; empty as long as that is not known."""
        self.own: frozenset[Endpoint] = frozenset()
        self.others: frozenset[Endpoint] = frozenset()
        self._serves = serves

    def note_own(self, data: bytes) -> None:
        """This rank has published something."""
        found = published(data)
        if found is not None:
            self.own |= {found}

    def note_other(self, data: bytes) -> None:
        """This rank has read something that was published."""
        found = published(data)
        if found is not None:
            self.others |= {found}

    def connects(self, here: Endpoint, there: Endpoint | None) -> bool:
        """Whether a connection between these is the group's; ``there`` is None if it is not known.

        One that is ``accepted`` is so only while its listener is there: afterwards the port is anybody's.
        """
        return self.accepted(here) or self.called(here, there)

    def accepted(self, here: Endpoint) -> bool:
        """Whether a peer has called this rank there."""
        return here in self.own or (self._serves and here[1] == self.store_port)

    def called(self, here: Endpoint, there: Endpoint | None) -> bool:
        """Whether this rank calls a peer, or the store."""
        if there is None:
            return False
        to_store = there[1] == self.store_port and (
            there[0] in self.store_hosts or (self._serves and there[0] == here[0])
        )
        return to_store or there in self.others

    def listens(self, here: Endpoint) -> bool:
        """Whether gloo listens there for this rank."""
        return here in self.own
