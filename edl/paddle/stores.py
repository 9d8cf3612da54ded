"""Makes Paddle's store faster, and avoids an error that its delays hide.

Two costs of Paddle 3.x's ``init_parallel_env`` are removed here, both measured on loopback: a rank that connects before
rank 0 listens sleeps three seconds before it retries, and each operation on the store takes 44 ms because Nagle's
algorithm (RFC 896) meets delayed acknowledgements (RFC 1122, 4.2.3.2).

A gloo group writes each rank's address under a key that is the same for every group of the store
(``process_group_gloo.cc`` adds no prefix). So the second group of a script, which ``fleet.init`` creates, may read the
addresses of the first: the connection is refused, or both sides wait for half a minute. With 44 ms per operation the
new address mostly arrived in time; without the delay it does not. So every further group gets its own store.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edl.worker.wait_until_open import wait_until_open


def adapt(core: Any, environment: Mapping[str, str]) -> None:
    """Replace the two functions of ``paddle.base.core`` that create the job's store and gloo groups. A second call does
    nothing, and functions that this version of Paddle lacks are left out. ``environment``: the worker's live
    environment."""
    original = getattr(core, "create_or_get_global_tcp_store", None)
    if original is not None and not getattr(original, "_edl_waits", False):
        core.create_or_get_global_tcp_store = _waiting(original, environment)
    groups = getattr(core, "ProcessGroupGloo", None)
    create = getattr(groups, "create", None)
    if groups is None or create is None or not hasattr(core, "TCPStore"):
        return
    if not getattr(create, "_edl_own_store", False):
        groups.create = staticmethod(_with_own_store(create, core.TCPStore, environment))


def _waiting(original: Callable[..., Any], environment: Mapping[str, str]) -> Callable[..., Any]:
    """The function that returns the job's store: it connects when rank 0 listens, and sends without delay."""
    made = False

    def create_or_get_global_tcp_store(*arguments: Any, **named: Any) -> Any:
        nonlocal made
        if made:
            return original(*arguments, **named)
        address = _store_address(environment)
        if address is not None and environment.get("PADDLE_TRAINER_ID", "0") != "0":
            wait_until_open(address)
        with _sending_at_once():
            store = original(*arguments, **named)
        made = True
        return store

    create_or_get_global_tcp_store._edl_waits = True  # type: ignore[attr-defined]
    return create_or_get_global_tcp_store


def _with_own_store(
    original: Callable[..., Any], tcp_store: Callable[..., Any], environment: Mapping[str, str]
) -> Callable[..., Any]:
    """The function that creates a gloo group: all but the first on a store use a separate store.

    Its rank 0 serves that store and publishes the address in the given store. All ranks create groups in the same
    order, as Paddle itself requires, so their counters agree.
    """
    seen: list[Any] = []
    made: Counter[tuple[int, int]] = Counter()

    def create(store: Any, rank: int, world_size: int, group_id: int = 0) -> Any:
        host = environment.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0].strip("[]")
        place = next((index for index, known in enumerate(seen) if known is store), -1)
        if place < 0:
            seen.append(store)
        elif world_size > 1 and host:
            made[place, group_id] += 1
            key = f"edl/group/{group_id}/{made[place, group_id]}"
            with _sending_at_once():
                store = _own_store(store, key, rank, host, tcp_store)
        return original(store, rank, world_size, group_id)

    create._edl_own_store = True  # type: ignore[attr-defined]
    return create


def _own_store(store: Any, key: str, rank: int, host: str, tcp_store: Callable[..., Any]) -> Any:
    """A new store for one group; the ranks find it by ``key`` in the shared store."""
    if rank == 0:
        with _held_port() as port:
            # For 0 workers: it does not wait for any, so the address can be sent to the others once it listens.
            own = tcp_store(host, port, True, 0)
        store.set(key, f"{host} {port}")
        return own
    said = store.get(key)
    host, port_text = (said.decode() if isinstance(said, bytes) else said).split()
    return tcp_store(host, int(port_text), False, 0)


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """A port that is reserved: bound, but never listened on. Paddle can listen there nevertheless, since it sets
    SO_REUSEADDR; if it could not listen, it would end the process."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def _store_address(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The address at which rank 0 serves the store, as in Paddle's ``store_utils.cc``, which ignores
    ``MASTER_ADDR``."""
    endpoint = environment.get("PADDLE_MASTER") or environment.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
    host, _, port = endpoint.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


@contextlib.contextmanager
def _sending_at_once() -> Iterator[None]:
    """Sets TCP_NODELAY on sockets that Paddle opens inside this context."""
    before = _sockets()
    yield
    for descriptor in _sockets() - before:
        _send_at_once(descriptor)


def _sockets() -> set[int]:
    """Descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def _send_at_once(descriptor: int) -> None:
    """Set TCP_NODELAY on Paddle's socket through a duplicate, which shares its options and is closed again."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
