"""Calls on a disk that may hang, and that the event loop waits for only so long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class DiskCalls:
    """Runs one function at a time in a thread of the event loop's pool. A disk that hangs holds that one: if each call
    took another, none would be left for the rest of the launcher."""

    def __init__(self) -> None:
        self._last: asyncio.Future[Any] | None = None

    async def call(self, work: Callable[[], T], limit_s: float) -> T:
        """The result of ``work``. Raises ``asyncio.TimeoutError`` if it has not ended, or could not begin, within
        ``limit_s`` seconds; what has begun continues."""
        return await asyncio.wait_for(self._call(work), limit_s)

    async def _call(self, work: Callable[[], T]) -> T:
        while self._last is not None and not self._last.done():
            await asyncio.wait({self._last})
        self._last = running = asyncio.ensure_future(asyncio.to_thread(work))
        return await asyncio.shield(running)
