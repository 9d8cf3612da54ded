"""Threads, what they wait with, and the clock of their waits, as a port: the simulator steps threads of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")


class ThreadLock(Protocol):
    """``threading.Lock``, or ``threading.RLock``."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait for the lock, at most ``timeout`` seconds (-1: without limit); returns whether it was acquired."""
        ...

    def release(self) -> None:
        """Release the lock."""
        ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ThreadCondition(Protocol):
    """``threading.Condition``."""

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
    """``threading.Event``."""

    def is_set(self) -> bool:
        """True after ``set``."""
        ...

    def set(self) -> None:
        """Wake up all waiting threads, now and later."""
        ...

    def clear(self) -> None:
        """Let threads wait again."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``set``, at most ``timeout`` seconds; returns False after a timeout."""
        ...


class ThreadQueue(Protocol[Item]):
    """``queue.SimpleQueue``."""

    def put(self, item: Item) -> None:
        """Append an item."""
        ...

    def get(self) -> Item:
        """Wait for an item and remove it."""
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
        """See ``edl.ports.Clock``."""
        ...

    def sleep(self, seconds: float) -> object:
        """Pause the calling thread."""
        ...

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> ThreadHandle:
        """Start a thread. Raises ``RuntimeError`` if the system allows no more."""
        ...

    def current(self) -> object:
        """The calling thread; equal to its ``ThreadHandle`` if this port started it."""
        ...

    def lock(self) -> ThreadLock:
        """A lock that its holder must not acquire again."""
        ...

    def rlock(self) -> ThreadLock:
        """A lock that its holder may acquire again."""
        ...

    def condition(self, lock: Any = None) -> ThreadCondition:
        """A condition with this lock of ``lock()``, or with one of its own that its holder may acquire again."""
        ...

    def event(self) -> ThreadEvent:
        """An event that is not set."""
        ...

    def queue(self) -> ThreadQueue[Any]:
        """An empty queue without a limit."""
        ...
