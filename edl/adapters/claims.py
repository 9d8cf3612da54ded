"""One process of a user at a time: locks on files in a folder that nobody else may enter.

Names that everybody can take, such as those of abstract sockets, could be held by others for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

from edl.adapters.clock import SystemClock

LOOK_S = 0.01
"""Pause between two tries to take a claim."""

_now_s = SystemClock().now_s


@contextlib.asynccontextmanager
async def claim(path: Path, timeout_s: float) -> AsyncIterator[None]:
    """Hold the lock on ``path``; the file goes with it. A process that is killed holds nothing.

    Raises ``TimeoutError`` when others have held it for ``timeout_s``.
    """
    deadline_s = _now_s() + timeout_s
    while (descriptor := _take(path)) is None:
        if _now_s() >= deadline_s:
            raise TimeoutError(f"{path} has been locked for {timeout_s:g} s")
        await asyncio.sleep(LOOK_S)
    try:
        yield
    finally:
        _release(path, descriptor)


def _take(path: Path) -> int | None:
    """The locked file; None while somebody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, named = os.fstat(descriptor), os.stat(path)
        if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
            return descriptor
    os.close(descriptor)
    return None


def _release(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)  # while it is held: whoever waits for this file sees that it is another one by then
    os.close(descriptor)
