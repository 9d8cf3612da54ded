"""Background tasks, timers and backoff for shells."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

AGAIN_S = 0.1
"""Seconds between two cancellations of a task that has not ended, and between other retries."""


async def end(task: asyncio.Future[Any], limit_s: float = math.inf) -> None:
    """Cancel a task and wait until it has ended, ignoring its result; waits at most ``limit_s`` seconds.

    One cancellation is not enough: before Python 3.12 ``asyncio.wait_for`` loses a cancellation that coincides with the
    end of the awaited call, and the task continues.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + limit_s
    while not task.done() and loop.time() < give_up_s:
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)


async def pause(seconds: float, until: asyncio.Event) -> None:
    """Sleep for so many seconds, but no longer than until the event is set."""
    waiting = asyncio.ensure_future(until.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()


class Backoff:
    """Exponential backoff: each pause is twice the previous one, up to ``longest_s`` seconds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next(self) -> float:
        """Seconds to wait now; doubles the next pause."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._next_s = self._first_s


class BackgroundTasks:
    """Tasks that run alongside their owner until it calls ``drop``. asyncio alone keeps no strong reference to a task.

    ``failed`` is called with an exception that ends a task, which indicates a bug. By default the event loop's handler
    logs it.
    """

    def __init__(self, failed: Callable[[Exception], None] | None = None) -> None:
        self._failed = failed
        # In order: a set's order would differ from run to run, and with it that of the cancellations in `drop`.
        self._tasks: dict[asyncio.Task[None], None] = {}

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine as a task."""
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
            what = {"message": "a bug in edl: a background task failed", "exception": error, "task": task}
            task.get_loop().call_exception_handler(what)

    def drop(self) -> None:
        """Cancel all tasks that still run."""
        for task in list(self._tasks):
            task.cancel()


class Timer:
    """One timer; setting it again replaces the previous setting."""

    def __init__(self, now_s: Callable[[], float], fire: Callable[[], None]) -> None:
        self._now_s = now_s
        self._fire = fire
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float | None) -> None:
        """Call ``fire`` at this time (seconds on the ``now_s`` clock); None clears the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if at_s is not None:
            delay_s = max(0.0, at_s - self._now_s())
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)
