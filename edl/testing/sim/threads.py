"""Deterministic threads: those of a simulated process run one at a time, in virtual time.

Each is a real thread that runs only while it holds the baton, so the shipped code runs unchanged. It returns the baton
where it would wait, and now and then before it takes a lock, as if it were preempted there. Which thread runs next is
drawn from the seed. Threads of a process stopped by SIGSTOP do not run; those of a dead one end without running more of
their code, except ``finally`` blocks, whose effects are lost.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from edl.testing.sim.checks import Violation
from edl.testing.sim.timeline import ScheduledCall, Timeline

WAKES_S = 200e-6
"""Longest delay until a runnable thread runs, in seconds."""
PREEMPTS = 0.02
"""Chance that a thread is preempted before it takes a lock."""
PREEMPTED_S = 0.003
"""Longest preemption, in seconds."""


class Uncertain(Protocol):
    """A source of random numbers."""

    def random(self) -> float:
        """A number from 0 to 1."""
        ...


class Home(Protocol):
    """The process that threads belong to."""

    def now_s(self) -> float:
        """Seconds on its host's clock."""
        ...

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Call soon; once the process continues if it is stopped; never if it is dead."""
        ...


class Ended(BaseException):
    """Unwinds a thread whose process is dead."""


class SimThread:
    """A simulated thread. Implements ``edl.threads.ThreadHandle``."""

    def __init__(
        self, threads: SimThreads, target: Callable[..., object], arguments: tuple[Any, ...], name: str
    ) -> None:
        self.name = name
        self.done = False
        self.woken = False
        """Whether the awaited event occurred; false after a timeout."""
        self._threads, self._target, self._arguments = threads, target, arguments
        self._ended = _WaitQueue(threads)
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._due = False
        """Whether it runs or is scheduled to run."""
        self._begun = False

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return not self.done

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends, for up to ``timeout`` seconds."""
        if not self.done:
            self._ended.wait(timeout)

    def wake(self, woken: bool, delay_s: float) -> None:
        """Schedule the thread after a delay, unless it is scheduled already."""
        if not self._due:
            self._due, self.woken = True, woken
            self._threads.timeline.after(delay_s, self._threads.home.run, self.step)

    def step(self) -> None:
        """Give the thread the baton and wait until it returns it."""
        if self.done:
            return
        before, self._threads.running = self._threads.running, self
        if not self._begun:
            self._begun = True
            _thread.start_new_thread(self._run, ())
        self._go.release()
        self._back.acquire()
        self._threads.running = before

    def pause(self) -> bool:
        """On the thread itself: return the baton and wait for ``wake``; returns ``woken``. Raises ``Ended``."""
        self._due = False
        self._back.release()
        self._go.acquire()
        if self._threads.dead:
            raise Ended
        return self.woken

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._threads.dead:
                self._target(*self._arguments)
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - the system would print it and go on
            if not self._threads.dead:
                with suppress(Violation):  # the timeline knows of it, and stops
                    self._threads.failed(self.name, error)
        del self._target, self._arguments
        self.done = True
        self._threads.alive.pop(self, None)
        self._ended.wake_all()
        self._back.release()


class _WaitQueue:
    """Threads that wait for the same event."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._waiting: dict[SimThread, None] = {}

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until woken, for up to ``timeout_s`` seconds; returns false after a timeout."""
        threads = self._threads
        thread = threads.running
        if threads.dead:
            raise Ended
        assert thread is not None, "only a simulated thread may wait"  # noqa: S101
        self._waiting[thread] = None
        timer: ScheduledCall | None = None
        if timeout_s is not None:
            timer = threads.timeline.after(max(0.0, timeout_s), thread.wake, False, threads.soon_s())
        try:
            return thread.pause()
        finally:
            self._waiting.pop(thread, None)
            if timer is not None:
                timer.cancel()

    def wake_one(self) -> None:
        """Wake the thread that has waited longest."""
        for thread in self._waiting:
            thread.wake(True, self._threads.soon_s())
            return

    def wake_all(self) -> None:
        """Wake all threads, in random order."""
        for thread in self._waiting:
            thread.wake(True, self._threads.soon_s())


class SimLock:
    """``edl.threads.ThreadLock``. A check that runs outside of all threads passes it without waiting."""

    def __init__(self, threads: SimThreads, again: bool) -> None:
        self._threads, self._again = threads, again
        self._holder: SimThread | None = None
        self._depth = 0
        self._waiting = _WaitQueue(threads)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; returns whether that succeeded in time."""
        threads, me = self._threads, self._threads.running
        if me is None or threads.dead:
            return True
        if self._holder is me and self._again:
            self._depth += 1
            return True
        if blocking:
            threads.preempt()
        until_s = threads.now_s() + timeout
        while self._holder is not None:
            if not blocking or (timeout >= 0 and threads.now_s() >= until_s):
                return False
            self._waiting.wait(None if timeout < 0 else until_s - threads.now_s())
        self._holder, self._depth = me, 1
        return True

    def release(self) -> None:
        """Release the lock and wake one waiting thread."""
        if self._threads.running is None or self._threads.dead:
            return
        assert self._holder is self._threads.running, "a lock is released by another thread"  # noqa: S101
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._waiting.wake_one()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def let_go(self) -> int:
        """Release the lock however often it was acquired; returns that number."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        """Acquire the lock as often as before ``let_go``."""
        self.acquire()
        self._depth = depth


class SimCondition:
    """Implements ``edl.threads.ThreadCondition`` in virtual time."""

    def __init__(self, threads: SimThreads, lock: SimLock) -> None:
        self._lock = lock
        self._waiting = _WaitQueue(threads)

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock and wait for a notification; returns false after a timeout."""
        depth = self._lock.let_go()
        try:
            return self._waiting.wait(timeout)
        finally:
            self._lock.take_back(depth)

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        self._waiting.wake_all()


class SimEvent:
    """Implements ``edl.threads.ThreadEvent`` in virtual time."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads, self._set = threads, False
        self._waiting = _WaitQueue(threads)

    def is_set(self) -> bool:
        """Whether the event is set."""
        return self._set

    def set(self) -> None:
        """Set the event and wake all waiting threads."""
        self._set = True
        self._waiting.wake_all()

    def clear(self) -> None:
        """Reset the event, so that ``wait`` blocks again."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set; returns false after a timeout."""
        return self._set or self._waiting.wait(timeout) or self._set


class SimQueue:
    """Implements ``edl.threads.ThreadQueue`` in virtual time."""

    def __init__(self, threads: SimThreads) -> None:
        self._items: deque[Any] = deque()
        self._waiting = _WaitQueue(threads)

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        """Add an item and wake one waiting thread."""
        self._items.append(item)
        self._waiting.wake_one()

    def get(self) -> Any:
        """Wait for the oldest item and remove it."""
        while not self._items:
            self._waiting.wait(None)
        return self._items.popleft()


class SimThreads:
    """``edl.threads.Threads`` of one simulated process. ``failed`` is called when a thread ends with an exception."""

    def __init__(
        self, home: Home, timeline: Timeline, rng: Uncertain, failed: Callable[[str, BaseException], None]
    ) -> None:
        self.home, self.timeline, self.failed = home, timeline, failed
        self.now_s = home.now_s
        self.dead = False
        self.running: SimThread | None = None
        """The thread of this process that holds the baton, if any."""
        self.alive: dict[SimThread, None] = {}
        self._rng = rng

    def random(self) -> float:
        """A random number from 0 to 1, for code that simulates what a thread waits for."""
        return self._rng.random()

    def soon_s(self) -> float:
        """Delay in seconds until a runnable thread runs."""
        return self._rng.random() * WAKES_S

    def preempt(self) -> None:
        """Preempt the running thread with chance ``PREEMPTS``."""
        thread = self.running
        if thread is not None and self._rng.random() < PREEMPTS:
            self.sleep(self._rng.random() * PREEMPTED_S)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let a check access what threads share, without running any thread."""
        running, self.running = self.running, None
        try:
            yield
        finally:
            self.running = running

    def waiting(self) -> _WaitQueue:
        """A new queue for threads that wait for the same event."""
        return _WaitQueue(self)

    def end(self) -> None:
        """The process is dead: end its threads. One that calls this itself ends when it next waits."""
        self.dead = True
        if self.running is None:
            for thread in list(self.alive):
                thread.step()
        else:
            self.timeline.after(0.0, self.end)

    # --- edl.threads.Threads ------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> object:
        """Wait for this many seconds."""
        return _WaitQueue(self).wait(seconds)

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> SimThread:
        """Create a thread and let it run soon; after the death of the process it never runs."""
        thread = SimThread(self, target, arguments, name)
        if not self.dead:
            self.alive[thread] = None
            thread.wake(True, self.soon_s())
        return thread

    def current(self) -> object:
        """The simulated thread that runs now."""
        return self.running

    def lock(self) -> SimLock:
        """A lock that is not reentrant."""
        return SimLock(self, again=False)

    def rlock(self) -> SimLock:
        """A new reentrant lock."""
        return SimLock(self, again=True)

    def condition(self, lock: Any = None) -> SimCondition:
        """A condition on ``lock``, or on a new reentrant lock."""
        return SimCondition(self, lock or self.rlock())

    def event(self) -> SimEvent:
        """An event that is not set."""
        return SimEvent(self)

    def queue(self) -> SimQueue:
        """A new, empty queue without a size limit."""
        return SimQueue(self)
