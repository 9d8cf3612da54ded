"""What a loader takes from its process: threads and what they wait with, a clock, and the numbers of requests.

A simulation in virtual time passes its own.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from edl.adapters.clock import SystemClock
from edl.ports import Clock


class Signal(Protocol):
    """``threading.Event``, as far as loaders use it."""

    def is_set(self) -> bool:
        """Whether it has been set."""
        ...

    def set(self) -> None:
        """Set it for good, and wake the threads that wait for it."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds. Returns whether it is set."""
        ...


class Condition(AbstractContextManager[object, None], Protocol):
    """``threading.Condition``, as far as loaders use it."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait for ``notify_all``, at most ``timeout`` seconds. The lock is held again afterwards."""
        ...

    def notify_all(self) -> None:
        """Wake all threads that wait."""
        ...


class Thread(Protocol):
    """``threading.Thread``, as far as loaders use it."""

    def start(self) -> None:
        """Begin to run."""
        ...

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most ``timeout`` seconds."""
        ...


class Threads(Protocol):
    """Makes threads and what they wait with."""

    def signal(self) -> Signal:
        """An event that is not set."""
        ...

    def condition(self) -> Condition:
        """A condition with a lock of its own."""
        ...

    def lock(self) -> AbstractContextManager[object, bool | None]:
        """A lock that may be held while its thread waits for something else."""
        ...

    def thread(self, run: Callable[[], object], name: str) -> Thread:
        """A daemon thread that has not begun."""
        ...


class SystemThreads:
    """``Threads`` of this process."""

    def signal(self) -> Signal:
        """See ``Threads.signal``."""
        return threading.Event()

    def condition(self) -> Condition:
        """See ``Threads.condition``."""
        return threading.Condition()

    def lock(self) -> AbstractContextManager[object, bool | None]:
        """See ``Threads.lock``."""
        return threading.Lock()

    def thread(self, run: Callable[[], object], name: str) -> Thread:
        """See ``Threads.thread``."""
        return threading.Thread(target=run, name=name, daemon=True)


class RequestNumbers:
    """Request ids, increasing over the life of the process, over all rounds and data sets."""

    def __init__(self, last: int = 0) -> None:
        """``last``: the id before the first one; 0: drawn at random."""
        self._lock = threading.Lock()
        self._last = last

    def next(self) -> int:
        """An id that neither this process nor a predecessor in its slot has used, whose requests may still be parked.
        The start is drawn on first use, because processes may be forked after this module is loaded."""
        with self._lock:
            self._last = (self._last or secrets.randbits(40)) + 1
            return self._last

    def rise_above(self, number: int) -> None:
        """A predecessor in this slot has used ids up to ``number``."""
        with self._lock:
            self._last = max(self._last, number)


@dataclass(frozen=True, slots=True)
class LoaderDeps:
    """What the loaders of one process share."""

    threads: Threads = field(default_factory=SystemThreads)
    clock: Clock = field(default_factory=SystemClock)
    numbers: RequestNumbers = field(default_factory=RequestNumbers)


PROCESS = LoaderDeps()
"""Those of this process."""
