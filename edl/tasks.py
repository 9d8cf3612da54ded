"""Tasks and timers of the shells: ended for certain, and none forgotten."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

AGAIN_S = 0.1


async def end(task: asyncio.Future[Any], limit_s: float = math.inf) -> None:
    """Cancel a task and wait until it is over, whatever it ends with; no longer than ``limit_s``.

    Cancelling once is not enough: ``asyncio.wait_for`` before Python 3.12 loses a cancellation that meets the end of
    what it waits for, and the task goes on.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + limit_s
    while not task.done() and loop.time() < give_up_s:
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)


class Backoff:
    """Between tries of something that may never succeed: each twice as long as the last one."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next(self) -> float:
        """Seconds to wait now."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """It has succeeded."""
        self._next_s = self._first_s


class BackgroundTasks:
    """Tasks that run beside their owner and end with it. asyncio itself may forget a task that nobody holds.

    ``failed`` is told of an exception that one of them ends with, which none is meant to; unless given, the event
    loop's handler, which logs it.
    """

    def __init__(self, failed: Callable[[Exception], None] | None = None) -> None:
        self._failed = failed
        # In order: a set's order would differ from run to run, and with it that of the cancellations in `drop`.
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this from now on."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if not isinstance(error, Exception):
            return
        if self._failed is not None:
            self._failed(error)
        else:
            what = {"message": "a mistake in edl: a background task has failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(what)

    def drop(self) -> None:
        """Cancel whatever still runs."""
        for task in list(self._tasks):
            task.cancel()


class Timer:
    """One timer: setting it again replaces the last setting."""

    def __init__(self, now_s: Callable[[], float], fire: Callable[[], None]) -> None:
        self._now_s = now_s
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float | None) -> None:
        """Fire at this time; None: never."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if at_s is not None:
            delay_s = max(0.0, at_s - self._now_s())
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)
