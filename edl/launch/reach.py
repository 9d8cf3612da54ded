"""How this host reaches the job's store, and at which address others reach this host."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_plan import is_socket, split_endpoint
from edl.adapters.etcd_rpc import EtcdTls
from edl.errors import SettingError
from edl.launch.settings import StoreSettings


def etcd_store(wanted: StoreSettings, endpoints: Sequence[str]) -> EtcdStore:
    """The store at these endpoints, with the credentials and time limits of the settings."""
    return EtcdStore(
        endpoints,
        request_timeout_s=wanted.request_timeout_s,
        tls=EtcdTls(wanted.ca, wanted.cert or None, wanted.key or None) if wanted.ca else None,
        user=wanted.user or None,
        password=wanted.password or None,
    )


def address_towards(endpoint: str) -> str:
    """The address of this host on the way to the store: where other nodes, which reach the store too, reach it.

    A store at a unix socket is for this host alone.
    """
    if is_socket(endpoint):
        return "127.0.0.1"
    host, port = split_endpoint(endpoint)
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # no packet is sent; the kernel only picks the route
            return str(probe.getsockname()[0])
    raise SettingError("--local-addr", "''", f"no route from here to {endpoint}", "Name this node's address")
