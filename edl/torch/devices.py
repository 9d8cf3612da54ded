"""gloo's devices, kept by whoever forms a group.

A group that cannot be formed is freed by C++ at once. In older versions of torch gloo's thread may still be reading
then, and is the last to hold its own device: it waits for its own end, and the process ends with "Resource deadlock
avoided". So somebody else holds the device until the next group is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAFE = (2, 13)
"""From this version on gloo does not do that."""
_INTERFACES = "GLOO_SOCKET_IFNAME"


def needed(version: str) -> bool:
    """Whether gloo of this torch has to be kept from it."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < _SAFE


def options(gloo: Any, timeout: Any, environment: Mapping[str, str]) -> Any:
    """What torch gives to a group of gloo by default. Holds the devices."""
    interfaces = environment.get(_INTERFACES, "")
    if len(interfaces) > 1:  # as torch asks
        devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        devices = [gloo.create_default_device()]
    made = gloo._Options()
    made._devices, made._threads, made._timeout = devices, 2 * len(devices), timeout
    return made
