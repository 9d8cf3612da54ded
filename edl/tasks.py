"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.1


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it is over, whatever it ends with.

    Cancelling once is not enough: ``asyncio.wait_for`` before Python 3.12 loses a cancellation that meets the end of
    what it waits for, and the task goes on.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)
