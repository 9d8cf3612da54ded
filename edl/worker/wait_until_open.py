"""Waits until rank 0's store listens, since the frameworks themselves sleep between their attempts."""

from __future__ import annotations

import socket
import time

LONGEST_WAIT_S = 60.0
"""Seconds after which the framework tries to connect anyway, with its own time limit and message."""
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05


def wait_until_open(address: tuple[str, int], longest_s: float = LONGEST_WAIT_S) -> bool:
    """Wait until a server listens there; False if none does within ``longest_s``."""
    deadline = time.monotonic() + longest_s
    pause_s = _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=1.0).close()
        except OSError:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        else:
            return True
    return False
