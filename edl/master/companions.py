"""Helpers of the Master's shell: pending requests, change notifications, and companion tasks."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from edl.errors import FencedOut
from edl.wire.scale_requests import Granted, ScaleRequest

OVER = "this launcher is no longer the Master; ask the next one"


@dataclass(frozen=True, slots=True)
class Asking:
    """A request in the shell's queue, with the future for its answer."""

    request: ScaleRequest
    answer: asyncio.Future[Granted]

    def settle(self, granted: Granted) -> None:
        """Answer, unless the requester is gone."""
        if not self.answer.done():
            self.answer.set_result(granted)

    def fail(self) -> None:
        """Fail because this Master has stepped down. The request may be in the store, or not."""
        if not self.answer.done():
            self.answer.set_exception(FencedOut(OVER))


class Updates:
    """Lets any number of tasks wait for the next change, each since its last look."""

    def __init__(self) -> None:
        self._number = 0
        self._seen: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._next = asyncio.Event()
        self._over = False

    def tell(self) -> None:
        """Report a change."""
        self._number += 1
        self._next.set()
        self._next = asyncio.Event()

    def close(self) -> None:
        """End all waits, since there will be no more changes."""
        self._over = True
        self.tell()

    async def changed(self) -> None:
        """Wait until something has changed since this task's last call returned; the first call returns at once.

        Raises ``FencedOut`` when this Master has stepped down.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        while self._seen.get(task) == self._number and not self._over:
            await self._next.wait()
        if self._over:
            raise FencedOut(OVER)
        self._seen[task] = self._number


class Companions:
    """Coroutines that run beside an elected Master. A failure is logged and affects nothing else."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, work: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Start these coroutines."""
        self._tasks += [asyncio.get_running_loop().create_task(self._run(one)) for one in work]

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the top of a task that must not end the rule
            self._log(f"a companion task of the Master failed: {type(error).__name__}: {error}")

    async def settled(self, within_s: float) -> None:
        """Wait until all have ended by themselves, at most ``within_s`` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)

    def drop(self) -> None:
        """Cancel all that still run."""
        for task in self._tasks:
            task.cancel()
