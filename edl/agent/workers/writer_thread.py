"""A thread that writes what the event loop must not wait for.

A log folder may lie on a network's disk, and may hang for as long as that does. On the event loop that would cost this
node its lease, and every node at once where all share the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MOST_BYTES = 32 * 1024 * 1024
"""Held for a disk that does not keep up; what comes beyond that is not kept."""


class Scribe:
    """Carries out pieces of work one after the other, in the order of ``do``. What they raise is theirs to handle."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._work: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None], size: int = 0) -> bool:
        """Have this done. ``size``: bytes it holds on to; with too many already waiting it is not done: False."""
        with self._lock:
            if size and self._held_bytes + size > self._most_bytes:
                return False
            self._held_bytes += size
            if self._thread is None:
                # A daemon: nothing that hangs may keep the launcher from ending.
                self._thread = threading.Thread(target=self._run, name="edl-scribe", daemon=True)
                self._thread.start()
        self._work.put((size, work))
        return True

    def _run(self) -> None:
        while True:
            size, work = self._work.get()
            with contextlib.suppress(OSError):
                work()
            with self._lock:
                self._held_bytes -= size

    async def done(self, limit_s: float) -> bool:
        """Wait until all that was to be done is done; False when the time is up."""
        if self._thread is None:
            return True
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(done.set)

        self.do(tell)
        try:
            await asyncio.wait_for(done.wait(), limit_s)
        except asyncio.TimeoutError:
            return False
        return True


def in_loop(action: Callable[[T], object]) -> Callable[[T], None]:
    """The same for a thread: the running event loop does it."""
    loop = asyncio.get_running_loop()

    def later(value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the launcher has ended meanwhile
            loop.call_soon_threadsafe(action, value)

    return later


def said_by_loop(log: Callable[[str], None]) -> Callable[[str], None]:
    """What a thread says, said by the running event loop."""
    return in_loop(log)
