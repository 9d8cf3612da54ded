"""Several ranks of Paddle in one process: a thread each, with a real ring.

Paddle keeps state that all threads share, so only one thread is in it at a time: the others are in collectives, or
wait for their turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from paddle.base import core

from edl.paddle import group
from edl.worker.ring import Ring
from tests.unit.edl.worker.test_ring import TOKEN, Ports

WAITS_S = 60
_here = threading.local()
_core: Any = core


class _Taking(Ring):
    """A ring whose ranks take turns."""

    turn: threading.Lock

    def _pump(self, *arguments: Any) -> None:
        self.turn.release()
        try:
            super()._pump(*arguments)
        finally:
            self.turn.acquire()


class PaddleWorld:
    """A world of one or more ranks."""

    def __init__(self, size: int) -> None:
        self._ports = Ports(size)
        self._turn = threading.Lock()
        self.rings = [_Taking(rank, size, self._ports.endpoints, TOKEN, 1) for rank in range(size)]
        for ring in self.rings:
            ring.turn = self._turn
        self._threads = ThreadPoolExecutor(size)
        for future in [self._threads.submit(ring.connect, 10) for ring in self.rings]:
            future.result(WAITS_S)

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """What ``work(rank)`` returns, of all ranks. Raises the first exception."""

        def in_turn(ring: Ring) -> Any:
            _here.ring = ring
            _core.set_num_threads(1)  # of this thread: pools of several would wait for one another
            with self._turn:
                return work(ring.rank)

        futures = [self._threads.submit(in_turn, ring) for ring in self.rings]
        errors = [error for future in futures if (error := future.exception(WAITS_S)) is not None]
        if errors:
            raise min(errors, key=lambda error: type(error).__name__ == "PeerLost")
        return [future.result() for future in futures]

    def close(self) -> None:
        for ring in self.rings:
            ring.abort()
        self._threads.shutdown()
        for ring in self.rings:
            ring.close()
        self._ports.close()


@contextmanager
def world(size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[PaddleWorld]:
    """A world that every thread of it sees as its own."""
    monkeypatch.setattr(group, "current", lambda: getattr(_here, "ring", None))
    made = PaddleWorld(size)
    try:
        yield made
    finally:
        made.close()
