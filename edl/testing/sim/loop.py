"""A deterministic event loop on virtual time: one for each simulated process, all on one timeline.

The shells that ship run on it unchanged: tasks, futures, queues, timers and ``asyncio.to_thread`` are asyncio's own.
Within a loop, callbacks run in the order in which they became ready, as asyncio promises. Between loops the order is
drawn from the seed: an iteration of a loop begins a moment after the first of its callbacks has become ready.
A stopped process (SIGSTOP) keeps what becomes ready for later; a dead one drops it.
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
"""The longest time until an iteration begins."""
CLOSES = 20
"""A coroutine may await so often on its way out."""
SLOWEST_CALL_S = 0.02
"""Seconds that a function run in a thread takes, at most."""


class SimTimer(asyncio.TimerHandle):
    """A timer of a loop; ``call`` is its place on the timeline."""

    __slots__ = ("call",)
    call: ScheduledCall


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one process. Its clock shows ``offset_s`` at the timeline's start, and advances by ``rate``
    seconds in each second. ``failed`` gets what asyncio would log: exceptions of callbacks, and of tasks whose result
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
        """SIGSTOP."""
        self._timeline = timeline
        self._rng = rng
        self._offset_s = offset_s
        self._rate = rate
        self._failed = failed
        self._ready: deque[asyncio.Handle] = deque()
        self._scheduled = False
        self._tasks: list[asyncio.Task[Any]] = []
        """Every task that may still run: those of a dead process must not be collected, which would run their ends."""
        self._signals: dict[int, Callable[[], object]] = {}

    def __del__(self, _warn: object = None) -> None:
        """There is nothing to close: no descriptors, no threads."""

    # --- time ----------------------------------------------------------------------------------------------------

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
                if not handle._cancelled:
                    handle._run()
                if self.dead:
                    return
        finally:
            asyncio._set_running_loop(None)
        if self._ready:
            self._begin_soon()

    def stop_process(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def continue_process(self) -> None:
        """SIGCONT: what became ready meanwhile runs now, in order."""
        self.stopped = False
        if self._ready:
            self._begin_soon()

    def kill(self) -> None:
        """Run nothing any more."""
        self.dead = True
        self._ready.clear()

    def finish(self) -> None:
        """After the simulation: close all coroutines that still wait, silently."""
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

    # --- what asyncio calls --------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run in the next iteration."""
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self._ready.append(handle)
            if not self._scheduled:
                self._begin_soon()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no threads

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run when ``delay`` seconds have passed."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run at a time of this process's clock."""
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
        """A task of this loop."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name)
        if len(self._tasks) > 64:
            self._tasks = [one for one in self._tasks if not one.done()]
        self._tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call the function at one moment, as if a thread had run it; the answer comes later."""
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
        """Have ``signal`` call this."""
        self._signals[sig] = lambda: callback(*args)

    def signal(self, number: int) -> bool:
        """A signal arrives; whether the process handles it."""
        handler = self._signals.get(number)
        if handler is not None:
            self.call_soon(handler)
        return handler is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Hand on what asyncio would log."""
        if not self.dead:
            self._failed(context)

    def get_debug(self) -> bool:
        """Never."""
        return False

    def is_running(self) -> bool:
        """From the start to the death of the process."""
        return not self.dead

    def is_closed(self) -> bool:
        """Once the process is dead."""
        return self.dead
