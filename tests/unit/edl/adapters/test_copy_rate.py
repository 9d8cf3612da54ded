"""A copy takes no more of the network than it is allowed to."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from edl.adapters.copy_connection import CopyConnection, CopyLimits
from edl.testing.clock import FakeClock


@pytest.mark.parametrize(("rate", "expected_s"), [(0, 0.0), (1 << 20, 3.0), (8 << 20, 0.375)])
def test_a_limited_copy_takes_its_time(rate: int, expected_s: float) -> None:
    size = 3 << 20
    descriptor = os.memfd_create("copy")
    os.ftruncate(descriptor, size)
    clock, pauses = FakeClock(), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(seconds)

    here, there = socket.socketpair()
    got: list[int] = []

    def read() -> None:
        count = 0
        while data := there.recv(1 << 20):
            count += len(data)
        got.append(count)

    reader = threading.Thread(target=read)
    reader.start()
    with here, there:
        line = CopyConnection(_Plain(here), clock, CopyLimits())  # type: ignore[arg-type]
        line.send_file(descriptor, size, rate, pause)
        here.shutdown(socket.SHUT_WR)
        reader.join()
    os.close(descriptor)
    assert got == [size]
    assert sum(pauses) == pytest.approx(expected_s, abs=0.06)
    assert not rate or max(pauses) < 0.1


class _Plain:
    """A socket of a pair, which knows no TCP options."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def setsockopt(self, *arguments: object) -> None:
        """Does nothing."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)
