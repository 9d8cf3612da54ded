"""A copy takes no more of the network than it is allowed to."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

from edl.adapters.clock import SystemClock
from edl.adapters.copies import TcpCopies
from edl.adapters.copy_connection import CopyConnection, CopyLimits
from edl.testing.clock import FakeClock
from tests.support.copies_fixture import LIMITS, NEW, TOKEN, A, B, lent, snapshot_pool
from tests.support.spoiling_proxy import HOST


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


def test_a_copy_that_a_node_sends_by_itself_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[int] = []
    send_file = CopyConnection.send_file

    def watched(self: CopyConnection, descriptor: int, size: int, rate: int, pause: Callable[[float], object]) -> None:
        rates.append(rate)
        send_file(self, descriptor, size)

    monkeypatch.setattr(CopyConnection, "send_file", watched)
    receiver = TcpCopies(B, lambda: TOKEN, SystemClock(), LIMITS)
    sender = TcpCopies(A, lambda: TOKEN, SystemClock(), LIMITS, rate_bytes_per_s=4321)
    there = snapshot_pool(B)
    try:
        sender.put(HOST, receiver.start(there, HOST), lent(snapshot_pool(A)))
    finally:
        sender.stop()
        receiver.stop()
    assert rates == [4321]
    assert there.holdings() == (NEW,)


class _Plain:
    """A socket of a pair, which knows no TCP options."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def setsockopt(self, *arguments: object) -> None:
        """Does nothing."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)
