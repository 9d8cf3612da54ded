"""Threads in virtual time, for code that ships and waits on threads: one thread of a schedule runs at a time.

Each simulated thread is a thread of the operating system that runs only while the timeline waits for it, so the order
is the timeline's. Where the code waits (``SimSignal``, ``SimCondition``, ``SimLock``, ``join``, ``sleep``), time goes
on. Threads of a stopped process keep what wakes them; those of a dead one are unwound without any effect.
"""

from __future__ import annotations

import contextlib
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
import threading
from collections.abc import Callable
from types import TracebackType

from edl.testing.sim.checks import Violation
from edl.testing.sim.timeline import Timeline

WAKE_S = 50e-6
"""The longest time from the moment that something wakes a thread until it runs."""
UNWINDS = 50
"""A thread may wait so often on its way out."""


class ThreadKilled(BaseException):
    """The process of this thread is dead."""


_running: list[SimThread] = []
"""The thread that runs now, if the timeline is not running itself."""


def current() -> SimThread | None:
    """The simulated thread that runs now; None on the timeline."""
    return _running[-1] if _running else None


class ThreadedProcess:
    """``data_service.loader.deps.Threads`` of one process. ``failed`` gets what ends a thread unexpectedly."""

    def __init__(self, timeline: Timeline, rng: random.Random, failed: Callable[[str, BaseException], None]) -> None:
        self.timeline = timeline
        self.rng = rng
        self.failed = failed
        self.dead = False
        self.stopped = False
        """SIGSTOP."""
        self._threads: list[SimThread] = []
        self._kept: list[tuple[SimThread, int]] = []

    def signal(self) -> SimSignal:
        """An event that is not set."""
        return SimSignal()

    def condition(self) -> SimCondition:
        """A condition."""
        return SimCondition()

    def lock(self) -> SimLock:
        """A lock."""
        return SimLock()

    def thread(self, run: Callable[[], object], name: str) -> SimThread:
        """A thread that has not begun."""
        thread = SimThread(self, run, name)
        self._threads = [one for one in self._threads if not one.ended]
        self._threads.append(thread)
        return thread

    def keep(self, thread: SimThread, turn: int) -> None:
        """The process is stopped: this thread has something to do when it goes on."""
        self._kept.append((thread, turn))

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        kept, self._kept = self._kept, []
        for thread, turn in kept:
            self.timeline.after(self.rng.random() * WAKE_S, thread.proceed, turn)

    def kill(self) -> None:
        """End all threads."""
        self.dead = True
        for thread in self._threads:
            thread.unwind()
        self._threads.clear()


class SimThread:
    """A thread of a simulated process."""

    def __init__(self, process: ThreadedProcess, run: Callable[[], object], name: str) -> None:
        self._process = process
        self._run = run
        self.ended = False
        self._begun = False
        self._turn = 0
        """Number of the present wait; what wakes an earlier one comes too late."""
        self._joining: list[SimThread] = []
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    # --- what the code calls -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to run."""
        self.wake()

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most ``timeout`` seconds."""
        me = current()
        if not self.ended and me is not None:
            self._joining.append(me)
            me.wait(timeout)

    # --- the other side ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """It has something to do."""
        self._process.timeline.after(self._process.rng.random() * WAKE_S, self.proceed, self._turn)

    def proceed(self, turn: int) -> None:
        """Let it run until it waits again."""
        if turn != self._turn or self.ended or self._process.dead:
            return
        if self._process.stopped:
            self._process.keep(self, turn)
            return
        self._turn += 1
        self._switch()

    def wait(self, timeout_s: float | None) -> None:
        """On this thread: let time go on until ``wake`` is called, at most ``timeout_s``."""
        if self._process.dead:
            raise ThreadKilled
        timer = None if timeout_s is None else self._process.timeline.after(timeout_s, self.proceed, self._turn)
        self._back.release()
        self._go.acquire()
        if timer is not None:
            timer.cancel()
        if self._process.dead:
            raise ThreadKilled

    def unwind(self) -> None:
        """The process is dead."""
        if self is current():
            return  # it unwinds when it waits next
        for _ in range(UNWINDS if self._begun else 0):
            if self.ended:
                return
            self._switch()

    def _switch(self) -> None:
        _running.append(self)
        try:
            if self._begun:
                self._go.release()
            else:
                self._begun = True
                self._thread.start()
            self._back.acquire()
        finally:
            _running.pop()

    def _main(self) -> None:
        try:
            self._run()
        except ThreadKilled:
            pass
        except BaseException as error:  # noqa: BLE001 - told on, whatever it is
            if not self._process.dead:
                with contextlib.suppress(Violation):  # the timeline knows of it
                    self._process.failed(self._thread.name, error)
        finally:
            self.ended = True
            for thread in self._joining:
                thread.wake()
            self._back.release()


def sleep(for_s: float) -> None:
    """On a simulated thread: let time pass."""
    SimSignal().wait(for_s)


class SimSignal:
    """``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake who waits."""
        self._set = True
        for thread in self._waiting:
            thread.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds."""
        if not self._set:
            _wait_in(self._waiting, timeout)
        return self._set


class SimCondition:
    """``threading.Condition``. Its lock is always free: a thread is not interrupted where it does not wait."""

    def __init__(self) -> None:
        self._waiting: list[SimThread] = []

    def __enter__(self) -> SimCondition:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for ``notify_all``, at most ``timeout`` seconds."""
        _wait_in(self._waiting, timeout)

    def notify_all(self) -> None:
        """Wake all threads that wait."""
        for thread in self._waiting:
            thread.wake()


class SimLock:
    """``threading.Lock``, which may be held while its thread waits for something else."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: list[SimThread] = []

    def __enter__(self) -> SimLock:
        while self._held:
            _wait_in(self._waiting, None)
        self._held = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = False
        for thread in self._waiting:
            thread.wake()


def _wait_in(waiting: list[SimThread], timeout_s: float | None) -> None:
    thread = current()
    if thread is None:
        raise AssertionError("only simulated threads wait: the timeline would stand still")
    waiting.append(thread)
    try:
        thread.wait(timeout_s)
    finally:
        waiting.remove(thread)
