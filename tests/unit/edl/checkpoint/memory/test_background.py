"""Work in threads, at a container's limit on processes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edl.checkpoint.memory import background
from edl.checkpoint.memory.background import WaitingPool, in_pool, in_thread


def test_it_waits_until_there_can_be_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 0
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(background, "THREAD_AGAIN_S", 0.0)
    assert asyncio.run(in_thread("edl-test", lambda: "written")) == "written"
    assert refused == 3


def test_an_error_of_the_work_is_passed_on() -> None:
    def fails() -> None:
        raise RuntimeError("of the work itself")

    with pytest.raises(RuntimeError, match="of the work itself"):
        asyncio.run(in_thread("edl-test", fails))


def test_calls_of_a_pool_wait_until_there_can_be_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a container's limit on processes: a worker's request for memory is not refused, and nothing is done
    twice."""
    refused, start = [3], threading.Thread.start
    calls: list[str] = []

    def scarce(thread: threading.Thread) -> None:
        if thread.name.startswith("edl-test") and refused[0]:
            refused[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    async def both() -> list[str]:
        pool = WaitingPool(1, "edl-test")
        try:
            return list(await asyncio.gather(*(in_pool(pool, done, name) for name in ("one", "two"))))
        finally:
            pool.shutdown(wait=False)

    def done(name: str) -> str:
        calls.append(name)
        return name

    monkeypatch.setattr(threading.Thread, "start", scarce)
    monkeypatch.setattr(background, "THREAD_AGAIN_S", 0.001)
    assert asyncio.run(both()) == ["one", "two"] == calls
    assert refused == [0]
