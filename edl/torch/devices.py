"""Keeps gloo's devices alive.

A group that cannot be formed is freed by C++ at once. In older versions of torch gloo's thread may still be reading
then, and holds the last reference to its own device: it joins itself, and the process ends with "Resource deadlock
avoided". So edl holds the device until the next group exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAFE = (2, 13)
"""From this version on gloo does not have the problem."""
_INTERFACES = "GLOO_SOCKET_IFNAME"


def needed(version: str) -> bool:
    """Whether this torch's gloo has the problem."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < _SAFE


def options(gloo: Any, timeout: Any, environment: Mapping[str, str]) -> Any:
    """The default options of a gloo group, which hold its devices."""
    interfaces = environment.get(_INTERFACES, "")
    if len(interfaces) > 1:  # the same check as in torch
        devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        devices = [gloo.create_default_device()]
    made = gloo._Options()
    made._devices, made._threads, made._timeout = devices, 2 * len(devices), timeout
    return made
