"""Connections from this host to the job's store, and the address at which other nodes reach this host."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence

from edl.adapters.etcd import EtcdStore
from edl.adapters.etcd_cluster import can_bind
from edl.adapters.etcd_lease import EtcdLeases
from edl.adapters.etcd_plan import SOCKET, is_socket, split_endpoint
from edl.adapters.etcd_rpc import EtcdTls
from edl.adapters.identity import Identity, identity_of
from edl.adapters.knocking import default_route_address, is_loopback, means_loopback, own_address_towards
from edl.errors import SettingError
from edl.launch.settings import Backend, StoreSettings
from edl.wire.secret import Secret


def identity_for(wanted: StoreSettings) -> Identity | None:
    """The identity with which this process proves that it belongs to the job; None: the job has no secret."""
    return None if wanted.secret is None else _identity(wanted.secret, wanted.endpoints)


@functools.cache
def _identity(secret: Secret, endpoints: tuple[str, ...]) -> Identity:
    return identity_of(secret, [split_endpoint(one)[0] for one in endpoints if not is_socket(one)])


def store_identity(wanted: StoreSettings) -> Identity | None:
    """The identity for connections to the store; None for a socket, which needs none, and for an existing etcd, which
    has its own certificates."""
    sockets = all(map(is_socket, wanted.endpoints))
    return None if sockets or wanted.backend is not Backend.EMBEDDED else identity_for(wanted)


def etcd_store(wanted: StoreSettings, endpoints: Sequence[str]) -> EtcdStore:
    """A client of the store at these endpoints, with the credentials and time limits of the settings. Raises
    ``SettingError`` if a socket belongs to another user."""
    for endpoint in filter(is_socket, endpoints):
        _check_may_connect(endpoint)
    return EtcdStore(
        endpoints,
        wanted.request_timeout_s,
        _tls(wanted),
        wanted.user or None,
        wanted.password or None,
        # Members start and end with their launchers; meanwhile any program may listen on their ports.
        one_cluster=wanted.backend is Backend.EMBEDDED,
    )


def etcd_leases(wanted: StoreSettings, endpoints: Sequence[str], lease_ttl_s: float) -> EtcdLeases:
    """A blocking client of the store for leases only, used by the thread that renews the lease while the event loop is
    busy. Then the store is often busy as well, and nothing but the lease waits for the answer."""
    limit_s = max(wanted.request_timeout_s, lease_ttl_s / 2)
    return EtcdLeases(endpoints, limit_s, _tls(wanted), wanted.user or None, wanted.password or None)


def _tls(wanted: StoreSettings) -> EtcdTls | Identity | None:
    return EtcdTls(wanted.ca, wanted.cert or None, wanted.key or None) if wanted.ca else store_identity(wanted)


def _check_may_connect(endpoint: str) -> None:
    """Raise ``SettingError`` if this user may not connect to the socket: waiting would not help. A socket that does not
    exist yet may still appear."""
    path = endpoint.removeprefix(SOCKET)
    try:
        os.stat(path)
        closed = not os.access(path, os.W_OK, effective_ids=True)
    except PermissionError:
        closed = True
    except OSError:
        closed = False
    if closed:
        what = f"belongs to another user: user {os.geteuid()} may not connect to it"
        raise SettingError("--rdzv-endpoint", endpoint, what, "Only the user who started a job on one node can use it")


def only_here(host: str, endpoints: Sequence[str]) -> str:
    """What is wrong with a name of this host that other nodes are to use: it means a loopback address here, as many an
    ``/etc/hosts`` has it, so nothing listens where they connect to. Empty: nothing. ``endpoints``: of the store."""
    found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    if host in found or not all(map(is_loopback, found)):
        return ""
    outward = address_towards(endpoints)
    if is_loopback(outward):
        return ""
    here = ", ".join(sorted(found))
    return (
        f"--local-addr={host} is {here} on this host, where other nodes cannot reach it. They see it at {outward}: "
        "give that address, or correct /etc/hosts"
    )


def reachable_address(
    local_addr: str, endpoints: Sequence[str], nodes: int, log: Callable[[str], None] = lambda text: None
) -> str:
    """The address at which other nodes reach this host. ``local_addr``: the one that the user has named; may be empty.
    ``nodes``: the most nodes that the job may have. Raises ``SettingError`` if there is no route to the store.

    The host of the store's only member reaches it over a loopback address if ``/etc/hosts`` has one for the host's own
    name, as Debian's does. No other node could use that, so the address of the default route is taken.
    """
    if local_addr:
        return local_addr
    found = address_towards(endpoints)
    if not is_loopback(found) or any(map(is_socket, endpoints)):
        return found
    hosts = [split_endpoint(endpoint)[0] for endpoint in endpoints]
    outward = "" if any(map(means_loopback, hosts)) else seen_at("", nodes)
    if not outward:
        return found
    log(
        f"{', '.join(hosts)} has a loopback address on this host, as /etc/hosts has it. Other nodes are given "
        f"{outward}, the address of the default route: if they cannot reach it, correct /etc/hosts or use --local-addr"
    )
    return outward


def seen_at(local_addr: str, nodes: int) -> str:
    """The address at which other hosts see this one, as far as it can be known without them; empty: the job has only
    one node, or there is no route. Arguments as for ``reachable_address``."""
    if nodes == 1:
        return ""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(local_addr)
        if can_bind(local_addr, 0):  # else it is the address of a router before this host
            return local_addr
    return default_route_address() or ""


def address_towards(endpoints: Sequence[str]) -> str:
    """This host's address on the route to the store, which other nodes use to reach this host.

    A store at a unix socket serves this host only, so the address is 127.0.0.1. Any member will do: the first one may
    be lost, and its name with it. A loopback address counts only if there is no other, because it may come from this
    host's own name in ``/etc/hosts``. Raises ``SettingError`` if there is no route.
    """
    if any(map(is_socket, endpoints)):
        return "127.0.0.1"
    local = ""
    for own in filter(None, map(_own_address, endpoints)):
        if not is_loopback(own):
            return own
        local = local or own
    if local:
        return local
    what = f"no route from here to {', '.join(endpoints)}"
    raise SettingError("--local-addr", "''", what, "Name this node's address")


def _own_address(endpoint: str) -> str | None:
    try:
        return own_address_towards(*split_endpoint(endpoint))
    except OSError:
        return None  # the name does not resolve
