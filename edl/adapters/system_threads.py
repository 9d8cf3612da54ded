"""``edl.threads.Threads`` of the operating system."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edl.adapters.clock import SystemClock
from edl.threads import Threads


class SystemThreads:
    """Threads of the operating system."""

    def __init__(self) -> None:
        self.now_s = SystemClock().now_s

    def sleep(self, seconds: float) -> object:
        """Block the calling thread for this many seconds."""
        return threading.Event().wait(seconds)

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> threading.Thread:
        """Start a daemon thread with this name."""
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def current(self) -> object:
        """The calling thread, for comparisons."""
        return threading.current_thread()

    def lock(self) -> threading.Lock:
        """A new lock that is not reentrant."""
        return threading.Lock()

    def rlock(self) -> threading.RLock:
        """A new reentrant lock."""
        return threading.RLock()

    def condition(self, lock: Any = None) -> threading.Condition:
        """A new condition, with its own lock unless one is given."""
        return threading.Condition(lock)

    def event(self) -> threading.Event:
        """A new event, not set."""
        return threading.Event()

    def queue(self) -> queue.SimpleQueue[Any]:
        """A new unbounded queue."""
        return queue.SimpleQueue()


def room_for_threads(number: int) -> bool:
    """Whether the system allows this many further threads now. For libraries that do not bear to be refused one."""
    over, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(number):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        over.set()
        for thread in started:
            thread.join()
    return True


class PatientPool(ThreadPoolExecutor):
    """The threads of an event loop. Where the system allows no further one, as at a container's limit on processes, a
    call waits for the thread of another call; ``ThreadPoolExecutor`` would refuse it."""

    def _adjust_thread_count(self) -> None:
        # The call is in the queue already.
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


SYSTEM_THREADS: Threads = SystemThreads()
