"""A deterministic asyncio event loop in virtual time: one for each simulated process, all on one timeline.

The shipped shells run on it unchanged: tasks, futures, queues, timers and ``asyncio.to_thread`` are asyncio's own.
Within a loop, callbacks run in the order in which they became ready, as asyncio guarantees. Between loops the order is
random, drawn from the seed: an iteration begins up to ``TURN_S`` after its first callback became ready. A process
stopped by SIGSTOP runs its ready callbacks when it continues; a dead one drops them.
"""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from edl.testing.sim.timeline import ScheduledCall, Timeline

TURN_S = 20e-6
"""Longest delay of an iteration, in seconds."""
CLOSES = 20
"""How often a coroutine that is being closed may await."""
SLOWEST_CALL_S = 0.02
"""Longest delay until a function for ``run_in_executor`` is called, in seconds."""


class SimTimer(asyncio.TimerHandle):
    """A timer of a loop; ``call`` is its place on the timeline."""

    __slots__ = ("call",)
    call: ScheduledCall


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one process. Its clock reads ``offset_s`` at the timeline's start and advances by ``rate``
    seconds per second. ``failed`` receives what asyncio would log: exceptions of callbacks, and of tasks whose result
    is never read."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        offset_s: float,
        failed: Callable[[dict[str, Any]], None],
        rate: float = 1.0,
    ) -> None:
        self.dead = True  # asyncio's own start is not to run anything
        super().__init__()
        self.dead = False
        self.stopped = False
        """Whether the process is stopped by SIGSTOP."""
        self._timeline = timeline
        self._rng = rng
        self._offset_s = offset_s
        self._rate = rate
        self._failed = failed
        self._ready: deque[asyncio.Handle] = deque()
        self._scheduled = False
        self._tasks: list[asyncio.Task[Any]] = []
        """Every task that may still run. Holds those of a dead process too: collecting them would run their ``finally``
        blocks."""
        self._signals: dict[int, Callable[[], object]] = {}

    def __del__(self, _warn: object = None) -> None:
        """Does nothing: there are no descriptors and no threads to close."""

    # --- time ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds on this process's monotonic clock."""
        return self._timeline.now_s * self._rate + self._offset_s

    def _begin_soon(self) -> None:
        if not self._scheduled and not self.stopped and not self.dead:
            self._scheduled = True
            self._timeline.after(self._rng.random() * TURN_S, self._iterate)

    def _iterate(self) -> None:
        self._scheduled = False
        if self.stopped or self.dead:
            return
        asyncio._set_running_loop(self)
        try:
            ready = self._ready
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
                if self.dead:
                    return
        finally:
            asyncio._set_running_loop(None)
        if self._ready:
            self._begin_soon()

    def stop_process(self) -> None:
        """Stop the process as SIGSTOP does."""
        self.stopped = True

    def continue_process(self) -> None:
        """Continue as SIGCONT does. Callbacks that became ready meanwhile run now, in order."""
        self.stopped = False
        if self._ready:
            self._begin_soon()

    def kill(self) -> None:
        """Drop all callbacks and run nothing from now on."""
        self.dead = True
        self._ready.clear()

    def finish(self) -> None:
        """Close all waiting coroutines silently. To be called after the simulation."""
        self.kill()
        around = asyncio._get_running_loop()  # another world's, when this one is collected
        asyncio._set_running_loop(self)
        try:
            for task in self._tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                for _ in range(0 if task.done() or coroutine is None else CLOSES):
                    try:
                        coroutine.close()
                        break
                    except Exception:  # noqa: BLE001, S112 - it may await something on its way out; go on from there
                        continue
        finally:
            asyncio._set_running_loop(around)
        self._tasks.clear()

    # --- what asyncio calls -------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback in the next iteration."""
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self._ready.append(handle)
            self._begin_soon()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no threads

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback in ``delay`` seconds of this process's clock."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a time of this process's clock."""
        handle = SimTimer(when, callback, args, self, context)
        handle.call = self._timeline.at((when - self._offset_s) / self._rate, self._due, handle)
        if self.dead:
            handle.call.cancel()
        return handle

    def _due(self, handle: SimTimer) -> None:
        handle.call.cancel()  # the two refer to each other
        if not self.dead:
            self._ready.append(handle)
            self._begin_soon()

    def _timer_handle_cancelled(self, handle: SimTimer) -> None:
        handle.call.cancel()

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Start a task on this loop."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name)
        if len(self._tasks) > 64:
            self._tasks = [one for one in self._tasks if not one.done()]
        self._tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call a function on this loop, after a random delay and without interruption."""
        future = self.create_future()
        self.call_later(self._rng.random() * SLOWEST_CALL_S, self._execute, future, func, args)
        return future

    def _execute(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who awaits it
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        """Install a handler for ``signal``."""
        self._signals[sig] = lambda: callback(*args)

    def signal(self, number: int) -> bool:
        """Deliver a signal; returns whether the process handles it."""
        handler = self._signals.get(number)
        if handler is not None:
            self.call_soon(handler)
        return handler is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Pass on what asyncio would log."""
        if not self.dead:
            self._failed(context)

    def get_debug(self) -> bool:
        """Always false: asyncio's debug mode is never used."""
        return False

    def is_running(self) -> bool:
        """True until the process is dead."""
        return not self.dead

    def is_closed(self) -> bool:
        """True once the process is dead."""
        return self.dead
