"""The simulator's event loops: asyncio's promises in virtual time, and processes that stop, go on and die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from edl.testing.sim.loop import SLOWEST_CALL_S, SimLoop
from edl.testing.sim.timeline import Timeline


class Host:
    """A timeline with some loops."""

    def __init__(self, seed: int = 1) -> None:
        self.timeline = Timeline()
        self.rng = random.Random(seed)
        self.failures: list[dict[str, Any]] = []
        self.said: list[object] = []

    def loop(self, offset_s: float = 0.0) -> SimLoop:
        return SimLoop(self.timeline, self.rng, offset_s, self.failures.append)

    def play(self, work: Coroutine[Any, Any, Any], loop: SimLoop | None = None, until_s: float = 100.0) -> Any:
        loop = loop or self.loop()
        task = loop.create_task(work)
        self.timeline.run(until_s)
        return task.result() if task.done() else None


def test_sleeping_takes_virtual_time_only() -> None:
    host = Host()
    loop = host.loop(offset_s=5000.0)

    async def work() -> float:
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(30.0)
        return asyncio.get_running_loop().time() - began_s

    assert host.play(work(), loop) == pytest.approx(30.0, abs=0.001)
    assert loop.time() == 5100.0


def test_callbacks_of_one_loop_keep_their_order() -> None:
    host = Host()
    loop = host.loop()
    for number in range(20):
        loop.call_soon(host.said.append, number)
    host.timeline.run(1.0)
    assert host.said == list(range(20))


def test_the_order_between_loops_is_drawn_from_the_seed() -> None:
    def order(seed: int) -> list[object]:
        host = Host(seed)
        for number in range(6):
            host.loop().call_soon(host.said.append, number)
        host.timeline.run(1.0)
        return host.said

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(10)}) > 5


def test_queues_events_and_time_limits_are_asyncios_own() -> None:
    host = Host()

    async def work() -> str:
        queue: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().call_later(2.0, queue.put_nowait, "late")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.get(), 1.0)
        first, second = await asyncio.gather(queue.get(), asyncio.sleep(0.5, "slept"))
        return f"{first} {second}"

    assert host.play(work()) == "late slept"


def test_a_cancelled_timer_does_not_fire() -> None:
    host = Host()
    handle = host.loop().call_later(1.0, host.said.append, "no")
    handle.cancel()
    host.timeline.run(5.0)
    assert host.said == []


def test_a_stopped_process_catches_up() -> None:
    host = Host()
    loop = host.loop()

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            host.said.append(loop.time())

    task = loop.create_task(work())
    host.timeline.run(1.5)
    loop.stop_process()
    host.timeline.run(10.0)
    assert len(host.said) == 1
    loop.continue_process()
    host.timeline.run(20.0)
    assert task.done()
    assert host.said[1] == pytest.approx(10.0, abs=0.001)
    assert host.said[2] == pytest.approx(11.0, abs=0.001)


def test_a_dead_process_does_nothing_more_not_even_its_ends() -> None:
    host = Host()
    loop = host.loop()

    async def work() -> None:
        try:
            await asyncio.sleep(1.0)
        finally:
            host.said.append("end")

    loop.create_task(work())
    host.timeline.run(0.5)
    loop.kill()
    host.timeline.run(5.0)
    assert host.said == []
    loop.finish()
    assert host.said == ["end"]


def test_an_exception_that_nobody_reads_is_handed_on() -> None:
    host = Host()

    async def work() -> None:
        raise ValueError("lost")

    loop = host.loop()
    loop.create_task(work())
    host.timeline.run(1.0)
    loop._tasks.clear()
    assert [type(failure["exception"]) for failure in host.failures] == [ValueError]


def test_a_failing_callback_is_handed_on() -> None:
    host = Host()
    host.loop().call_soon(lambda: 1 // 0)
    host.timeline.run(1.0)
    assert [type(failure["exception"]) for failure in host.failures] == [ZeroDivisionError]


def test_what_a_thread_would_do_comes_back_a_little_later() -> None:
    host = Host()

    async def work() -> float:
        began_s = asyncio.get_running_loop().time()
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(OSError, match="disk"):
            await asyncio.to_thread(_fail)
        return asyncio.get_running_loop().time() - began_s

    assert 0 < host.play(work()) <= 2 * SLOWEST_CALL_S + 0.001


def _fail() -> None:
    raise OSError("disk")


def test_signals_go_to_their_handler() -> None:
    host = Host()
    loop = host.loop()
    assert not loop.signal(15)
    loop.add_signal_handler(15, host.said.append, "SIGTERM")
    assert loop.signal(15)
    host.timeline.run(1.0)
    assert host.said == ["SIGTERM"]
