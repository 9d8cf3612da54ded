"""What a worker start needs to know about Paddle. Called by name from ``edl.worker.frameworks``.

Two costs of Paddle 3.x's ``init_parallel_env`` are taken away here, both measured on loopback: a rank that comes
before rank 0 listens sleeps three seconds before it tries again, and each operation on the store waits 44 ms because
Nagle's algorithm (RFC 896) meets delayed acknowledgements (RFC 1122, 4.2.3.2).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

from edl.worker.patience import wait_until_open

_TRUE = ("1", "t", "true", "y", "yes")


def why_unsafe() -> str:
    """Why a process that has imported paddle must not be forked; empty when it may."""
    import paddle

    if paddle.is_compiled_with_cuda() and os.path.exists("/dev/nvidiactl"):
        # Its import counts and initialises the devices, and CUDA does not survive a fork.
        return "this build of paddle initialises CUDA when it is imported"
    return ""


def before_script(imported_under: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Make Paddle's store start without its pauses, and apply flags set after the import. Does nothing twice."""
    import paddle
    from paddle.base import core

    _apply_flags(paddle, imported_under, environment)
    original = getattr(core, "create_or_get_global_tcp_store", None)
    if original is None or getattr(original, "_edl_patient", False):
        return

    made = False

    def create_or_get_global_tcp_store(*arguments: Any, **named: Any) -> Any:
        nonlocal made
        if made:
            return original(*arguments, **named)
        address = _store_address(environment)
        if address is not None and environment.get("PADDLE_TRAINER_ID", "0") != "0":
            wait_until_open(address)
        before = _sockets()
        store = original(*arguments, **named)
        for descriptor in _sockets() - before:
            _send_at_once(descriptor)
        made = True
        return store

    create_or_get_global_tcp_store._edl_patient = True  # type: ignore[attr-defined]
    core.create_or_get_global_tcp_store = create_or_get_global_tcp_store


def _apply_flags(paddle: Any, imported_under: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Paddle reads ``FLAGS_*`` when it is imported; hand over those this worker has set otherwise."""
    for name, value in environment.items():
        if name.startswith("FLAGS_") and imported_under.get(name) != value:
            # Variables of launchers begin with FLAGS_ as well, and are no flags of the library.
            with contextlib.suppress(ValueError, TypeError):
                kind = type(paddle.get_flags(name)[name])
                paddle.set_flags({name: value.lower() in _TRUE if kind is bool else kind(value)})


def _store_address(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Where rank 0 serves the store: as in Paddle's ``store_utils.cc``, which does not look at ``MASTER_ADDR``."""
    endpoint = environment.get("PADDLE_MASTER") or environment.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
    host, _, port = endpoint.rpartition(":")
    return (host, int(port)) if host and port.isdigit() else None


def _sockets() -> set[int]:
    """Descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def _send_at_once(descriptor: int) -> None:
    """TCP_NODELAY for a socket that belongs to Paddle; the duplicate shares its options and is closed again."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
