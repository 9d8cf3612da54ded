"""A port for threads, their locks and queues, and the clock of their waits. The simulator implements it in virtual
time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")


class ThreadLock(Protocol):
    """The part of ``threading.Lock`` and ``threading.RLock`` that the code uses."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait for the lock, at most ``timeout`` seconds (-1: without limit); returns whether it was acquired."""
        ...

    def release(self) -> None:
        """Release the lock. Raises ``RuntimeError`` if it is not held."""
        ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ThreadCondition(Protocol):
    """The part of ``threading.Condition`` that the code uses."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until notified, at most ``timeout`` seconds; returns False after a timeout."""
        ...

    def notify_all(self) -> None:
        """Wake up all waiting threads. Requires the lock."""
        ...


class ThreadEvent(Protocol):
    """The part of ``threading.Event`` that the code uses."""

    def is_set(self) -> bool:
        """Whether ``set`` has been called since the last ``clear``."""
        ...

    def set(self) -> None:
        """Wake up all waiting threads; later calls of ``wait`` return at once until ``clear``."""
        ...

    def clear(self) -> None:
        """Reset the event, so that ``wait`` blocks again."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``set``, at most ``timeout`` seconds; returns False after a timeout."""
        ...


class ThreadQueue(Protocol[Item]):
    """The part of ``queue.SimpleQueue`` that the code uses."""

    def put(self, item: Item) -> None:
        """Append an item; never blocks."""
        ...

    def get(self) -> Item:
        """Remove and return the oldest item; blocks while the queue is empty."""
        ...


class ThreadHandle(Protocol):
    """A thread that has been started."""

    def is_alive(self) -> bool:
        """True until it has ended."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds."""
        ...


class Threads(Protocol):
    """Starts daemon threads and makes what they wait with. All timeouts are in seconds of ``now_s``."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock; see ``edl.ports.Clock``."""
        ...

    def sleep(self, seconds: float) -> object:
        """Block the calling thread for this many seconds."""
        ...

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> ThreadHandle:
        """Start a thread. Raises ``RuntimeError`` if the system allows no more."""
        ...

    def current(self) -> object:
        """The calling thread; equal to its ``ThreadHandle`` if this port started it."""
        ...

    def lock(self) -> ThreadLock:
        """A new lock, not reentrant."""
        ...

    def rlock(self) -> ThreadLock:
        """A new reentrant lock."""
        ...

    def condition(self, lock: Any = None) -> ThreadCondition:
        """A new condition with this lock, from ``lock()``, or with a reentrant lock of its own."""
        ...

    def event(self) -> ThreadEvent:
        """A new event, not set."""
        ...

    def queue(self) -> ThreadQueue[Any]:
        """A new unbounded queue."""
        ...
