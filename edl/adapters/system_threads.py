"""``edl.threads.Threads`` of the operating system."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from edl.adapters.clock import SystemClock
from edl.threads import Threads


class SystemThreads:
    """Threads of the operating system."""

    def __init__(self) -> None:
        self.now_s = SystemClock().now_s

    def sleep(self, seconds: float) -> object:
        """See ``Threads``."""
        return threading.Event().wait(seconds)

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> threading.Thread:
        """See ``Threads``."""
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def current(self) -> object:
        """See ``Threads``."""
        return threading.current_thread()

    def lock(self) -> threading.Lock:
        """See ``Threads``."""
        return threading.Lock()

    def rlock(self) -> threading.RLock:
        """See ``Threads``."""
        return threading.RLock()

    def condition(self, lock: Any = None) -> threading.Condition:
        """See ``Threads``."""
        return threading.Condition(lock)

    def event(self) -> threading.Event:
        """See ``Threads``."""
        return threading.Event()

    def queue(self) -> queue.SimpleQueue[Any]:
        """See ``Threads``."""
        return queue.SimpleQueue()


SYSTEM_THREADS: Threads = SystemThreads()
