"""Assigns embedded etcd members to endpoints. Pure, with the same result on all launchers of a job."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edl.errors import SettingError
from edl.wire.address import address, check_host

if TYPE_CHECKING:
    from edl.adapters.identity import Identity  # it needs the network's libraries, this module is for the help, too

HIGHEST_PORT = 65535


DEFAULT_PORT = 29400
"""Default port of an endpoint, as in torchrun."""
SOCKET = "unix:"
"""Prefix of the endpoint of a member that listens on a unix socket; the path follows."""
LONGEST_SOCKET_PATH = 107
"""Longest path that fits into ``sun_path`` (unix(7)) with its terminating zero byte."""


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """One embedded etcd member."""

    name: str
    host: str
    """As written in the endpoint; clients and other members connect to it."""
    client_port: int
    peer_port: int
    initial_cluster: str
    """All members as ``name=peer-url,...``, the same text for every member."""
    size: int
    """Number of members."""
    identity: Identity | None = field(default=None, repr=False)
    """Set in jobs with a secret: clients and members connect only over TLS."""

    @property
    def endpoint(self) -> str:
        """The endpoint for clients, ``host:port``."""
        return address(self.host, self.client_port)

    @property
    def client_url(self) -> str:
        """The URL at which the member serves clients: scheme, host and port."""
        return f"{_scheme(self.identity)}://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        """The URL for other members."""
        return f"{_scheme(self.identity)}://{address(self.host, self.peer_port)}"


@dataclass(frozen=True, slots=True)
class SocketPlan:
    """A member that serves a single launcher. It listens on unix sockets, so the folder's mode decides who may
    connect."""

    folder: Path
    """Contains the sockets, and is etcd's working directory, since etcd accepts only relative paths."""
    name: str = "private"
    client_url: str = "unix://client:0"
    """etcd accepts no URL without a port; here it is part of the socket's name."""
    peer_url: str = "unix://peer:0"
    size: int = 1

    @property
    def client_socket(self) -> Path:
        """Path of the socket for clients."""
        return self.folder / self.client_url.removeprefix("unix://")

    @property
    def endpoint(self) -> str:
        """The endpoint for clients, ``unix:`` and the path."""
        return SOCKET + urllib.parse.quote(str(self.client_socket), safe="/:")

    @property
    def initial_cluster(self) -> str:
        """The cluster, which has this member only."""
        return f"{self.name}={self.peer_url}"

    def fits(self) -> bool:
        """Whether the socket's path is short enough for the kernel."""
        return len(str(self.client_socket).encode()) <= LONGEST_SOCKET_PATH


def is_socket(endpoint: str) -> bool:
    """Whether this endpoint is a unix socket, that is a member for this host only."""
    return endpoint.startswith(SOCKET)


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Split ``"host1:port,host2"`` into ``host:port`` items; a leading ``etcd://`` is allowed, the default port is
    29400.

    ``unix:/path`` is kept unchanged. Raises ``SettingError`` for an invalid address.
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


def encrypted(endpoint: str, protocol: str) -> str:
    """``--rdzv-endpoint`` after torchrun's ``protocol`` of ``--rdzv-conf``; a scheme of the endpoint overrides it."""
    endpoint = endpoint.strip()
    https = protocol.lower() == "https" and endpoint and "://" not in endpoint
    return f"etcds://{endpoint}" if https else endpoint


def tls_files(endpoint: str, conf: Mapping[str, str]) -> dict[str, str]:
    """The files ``ca``, ``cert`` and ``key`` of ``--rdzv-conf`` for the store at ``--rdzv-endpoint``; all empty without
    TLS.

    Raises ``SettingError`` if TLS is requested without a CA certificate. Without TLS, the password would be sent to
    whoever answers.
    """
    files = {key: conf.get(key, "") for key in ("ca", "cert", "key")}
    requested = files["cert"] or files["key"] or "etcds://" in endpoint
    if requested and not files["ca"]:
        raise SettingError("--rdzv-conf ca", "''", "TLS needs the CA certificate", "Add ca=FILE to --rdzv-conf")
    return files


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split ``"host:port"`` (IPv6 addresses in brackets). Raises ``SettingError`` for an invalid address or a port
    outside 1 … 65535."""
    host, _, digits = endpoint.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not (digits.isascii() and digits.isdigit()):
        raise SettingError("--rdzv-endpoint", endpoint, "not an address", "Write host:port, such as node1:2379")
    check_host("--rdzv-endpoint", endpoint, bare)
    port = int(digits)
    if not 0 < port <= HIGHEST_PORT:
        raise SettingError("--rdzv-endpoint", endpoint, f"the port must be from 1 to {HIGHEST_PORT}")
    return bare, port


def plan_members(endpoints: Sequence[str], identity: Identity | None = None) -> tuple[MemberPlan, ...]:
    """One member for each endpoint, in the given order; none for a socket, whose member another launcher runs.

    A member's peer port is its client port plus the smallest offset that keeps all peer ports clear of all client
    ports. Hosts are deliberately not compared: two names may mean one host. The order of the endpoints does not affect
    the cluster. Raises ``SettingError``.
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
    # The name is also a directory name, where the colons of an IPv6 address are awkward.
    return f"{host.replace(':', '-')}-{port}"
