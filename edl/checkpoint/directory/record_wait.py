"""Waits for the record, or the manifest, that another node writes after its file."""

from __future__ import annotations

import threading
from collections.abc import Callable

LOOKS = 20
PAUSE_S = 0.05
"""Seconds between two looks."""
_NEVER = threading.Event()


def appears(is_there: Callable[[], bool]) -> bool:
    """Whether ``is_there`` becomes true within ``LOOKS`` looks; else that node has probably died."""
    for _ in range(LOOKS):
        if is_there():
            return True
        _NEVER.wait(PAUSE_S)
    return False
