"""Which etcd member belongs to which endpoint: pure arithmetic, the same on every launcher of a job."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edl.errors import SettingError
from edl.wire.address import address

if TYPE_CHECKING:
    from edl.adapters.identity import Identity  # it needs the network's libraries, this module is for the help, too

HIGHEST_PORT = 65535


DEFAULT_PORT = 29400
"""Port of an endpoint given without one, as in torchrun."""
SOCKET = "unix:"
"""Begins the endpoint of a member that listens on a unix socket: the path follows."""
LONGEST_SOCKET_PATH = 107
"""What fits into ``sun_path`` (unix(7)) with the zero byte at its end."""


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """One embedded etcd member."""

    name: str
    host: str
    """As written in the endpoint: what clients and other members connect to."""
    client_port: int
    peer_port: int
    initial_cluster: str
    """All members as ``name=peer-url,...``, the same text for every member."""
    size: int
    """Number of members."""
    identity: Identity | None = field(default=None, repr=False)
    """Of a job with a secret: clients and members meet over TLS alone."""

    @property
    def endpoint(self) -> str:
        """What a client is given."""
        return address(self.host, self.client_port)

    @property
    def client_url(self) -> str:
        """Where clients find the member."""
        return f"{_scheme(self.identity)}://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        """Where other members find the member."""
        return f"{_scheme(self.identity)}://{address(self.host, self.peer_port)}"


@dataclass(frozen=True, slots=True)
class SocketPlan:
    """A member of one launcher alone. It listens on unix sockets, so the folder's mode says who may connect."""

    folder: Path
    """Holds the sockets, and is the working directory of etcd, which takes paths relative to it alone."""
    name: str = "private"
    client_url: str = "unix://client:0"
    """etcd takes no URL without a port: it is part of the socket's name."""
    peer_url: str = "unix://peer:0"
    size: int = 1

    @property
    def client_socket(self) -> Path:
        """Where clients connect."""
        return self.folder / self.client_url.removeprefix("unix://")

    @property
    def endpoint(self) -> str:
        """What a client is given."""
        return SOCKET + urllib.parse.quote(str(self.client_socket), safe="/:")

    @property
    def initial_cluster(self) -> str:
        """The only member."""
        return f"{self.name}={self.peer_url}"

    def fits(self) -> bool:
        """Whether the kernel takes so long a path."""
        return len(str(self.client_socket).encode()) <= LONGEST_SOCKET_PATH


def is_socket(endpoint: str) -> bool:
    """Whether this is a member of this host alone, at a unix socket."""
    return endpoint.startswith(SOCKET)


def parse_endpoints(text: str) -> tuple[str, ...]:
    """``"host1:port,host2"`` as ``host:port`` each; ``etcd://`` in front is allowed, a missing port is 29400.

    ``unix:/path`` stays as it is. Raises ``SettingError`` for what makes no address.
    """
    endpoints = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if is_socket(part):
            endpoints.append(part)
            continue
        bare = part.partition("://")[2] if part.startswith(("etcd://", "etcds://")) else part
        host_only = ":" not in bare or bare.endswith("]")
        endpoints.append(address(*split_endpoint(f"{bare}:{DEFAULT_PORT}" if host_only else bare)))
    return tuple(endpoints)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """``"host:port"`` (an IPv6 address in brackets) in its two parts. Raises ``SettingError``."""
    host, _, digits = endpoint.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not (digits.isascii() and digits.isdigit()):
        raise SettingError("--rdzv-endpoint", endpoint, "not an address", "Write host:port, such as node1:2379")
    port = int(digits)
    if not 0 < port <= HIGHEST_PORT:
        raise SettingError("--rdzv-endpoint", endpoint, f"the port must be from 1 to {HIGHEST_PORT}")
    return bare, port


def plan_members(endpoints: Sequence[str], identity: Identity | None = None) -> tuple[MemberPlan, ...]:
    """One member for each endpoint, in the order given; none for a socket, whose member another launcher runs.

    A member's peer port is its client port plus the smallest offset that keeps all peer ports clear of all client
    ports. Hosts are left out of that comparison on purpose: two names may mean one host. The order of the endpoints
    does not matter to the cluster. Raises ``SettingError``.
    """
    addresses = [split_endpoint(endpoint) for endpoint in endpoints if not is_socket(endpoint)]
    if not endpoints:
        raise SettingError("--rdzv-endpoint", "''", "must name at least one host:port")
    if not addresses:
        return ()
    repeated = sorted({address(*pair) for pair in addresses if addresses.count(pair) > 1})
    if repeated:
        raise SettingError("--rdzv-endpoint", ",".join(endpoints), f"{', '.join(repeated)} is listed more than once")
    ports = {port for _, port in addresses}
    offset = next(offset for offset in range(1, HIGHEST_PORT) if not any(port + offset in ports for port in ports))
    if max(ports) + offset > HIGHEST_PORT:
        raise SettingError(
            "--rdzv-endpoint", ",".join(endpoints), f"etcd also needs port {max(ports) + offset}, which does not exist"
        )
    cluster = ",".join(f"{_name(h, p)}={_scheme(identity)}://{address(h, p + offset)}" for h, p in sorted(addresses))
    return tuple(MemberPlan(_name(h, p), h, p, p + offset, cluster, len(addresses), identity) for h, p in addresses)


def _scheme(identity: Identity | None) -> str:
    return "http" if identity is None else "https"


def _name(host: str, port: int) -> str:
    # The name is a directory as well; colons of an IPv6 address read badly there.
    return f"{host.replace(':', '-')}-{port}"
