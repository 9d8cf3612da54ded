"""A thread for writes that the event loop must not wait for.

A log folder may be on a network disk, and hang as long as that does. On the event loop this would cost the node its
lease, and all nodes at once if they share the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MOST_BYTES = 32 * 1024 * 1024
"""Bytes queued for a slow disk; output beyond that is dropped."""

log = logging.getLogger(__name__)


class Scribe:
    """The writer thread: runs functions one after another, in the order of ``do``. They handle their own errors.

    While the system allows no further thread, as at a container's limit on processes, they wait in the queue.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._work: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None], size: int = 0) -> bool:
        """Queue a function. ``size``: bytes that it holds; returns False, without queueing it, if too many are already
        waiting."""
        with self._lock:
            if size and self._held_bytes + size > self._most_bytes:
                return False
            self._held_bytes += size
            self._work.put((size, work))
            if self._thread is None:
                # A daemon: a hanging disk must not keep the launcher from exiting.
                thread = threading.Thread(target=self._run, name="edl-scribe", daemon=True)
                with contextlib.suppress(RuntimeError):  # no further thread at present: the next call tries again
                    thread.start()
                    self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            size, work = self._work.get()
            try:
                work()
            except OSError:
                pass  # reported by the function itself, where that helps
            except Exception:  # the thread must survive, or nothing is written any more
                log.exception("a bug in edl: writing a worker's files failed")
            with self._lock:
                self._held_bytes -= size

    async def done(self, limit_s: float) -> bool:
        """Wait until all queued functions have run; False after ``limit_s``."""
        if self._thread is None and self._work.empty():
            return True
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        self.do(tell)
        try:
            await asyncio.wait_for(done.wait(), limit_s)
        except asyncio.TimeoutError:
            return False
        return True


def in_loop(action: Callable[[T], object]) -> Callable[[T], None]:
    """Wrap ``action`` so that a thread can call it: it runs in the current event loop."""
    loop = asyncio.get_running_loop()

    def later(value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the launcher has ended meanwhile
            loop.call_soon_threadsafe(action, value)

    return later


def said_by_loop(log: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap ``log`` for threads: it is called in the current event loop."""
    return in_loop(log)
