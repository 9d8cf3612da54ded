"""File locks that only one process of a user holds at a time, in a folder that other users cannot enter.

Names in a shared namespace, such as abstract sockets, could be blocked forever by other users.
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
"""Pause between two attempts to take a lock."""

_now_s = SystemClock().now_s


@contextlib.asynccontextmanager
async def claim(path: Path, timeout_s: float) -> AsyncIterator[None]:
    """Hold the lock on ``path``; the file is removed with it. The kernel releases the lock of a process that is killed.

    Raises ``TimeoutError`` when other processes have held it for ``timeout_s``, and other kinds of ``OSError`` where
    there are no locks: on some file servers, or on a full disk.
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
    """A descriptor of the locked file; None while another process holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    kept = False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, named = os.fstat(descriptor), os.stat(path)
        kept = (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
    except (BlockingIOError, FileNotFoundError):
        pass  # another process holds it, or has just released it
    finally:
        if not kept:
            os.close(descriptor)
    return descriptor if kept else None


def _release(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)  # while the lock is held, so that waiting processes notice the change
    os.close(descriptor)
