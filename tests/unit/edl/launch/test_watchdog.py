"""An event loop that stands still is named, with the place."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from types import FrameType

import pytest

from edl.launch import watchdog
from edl.launch.watchdog import LoopWatch


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the watchdog has looked where the loop is."""
    seen, frames = threading.Event(), sys._current_frames

    def current() -> dict[int, FrameType]:
        found = frames()
        seen.set()
        return found

    monkeypatch.setattr(sys, "_current_frames", current)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.001)
    return seen


def read_from_a_disk_that_hangs(until: threading.Event) -> None:
    assert until.wait(10)


@pytest.mark.parametrize("why", ["blocked", "frozen", "starved"])
def test_what_blocks_the_loop_is_named_and_a_process_that_does_not_run_is_told_from_it(
    looked: threading.Event, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(watchdog, "FROZEN_S", -1.0 if why == "frozen" else 1000.0)
    waits = itertools.count(step=1000 if why == "starved" else 0)
    monkeypatch.setattr(watchdog, "waited_for_a_core_s", lambda thread: float(next(waits)))
    said: list[str] = []

    async def scenario() -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()

        def log(text: str) -> None:
            said.append(text)
            loop.call_soon_threadsafe(told.set)

        watch = LoopWatch(log, limit_s=0.01)
        try:
            read_from_a_disk_that_hangs(looked)
            await asyncio.wait_for(told.wait(), 10)
        finally:
            watch.end()

    asyncio.run(scenario())
    text = said[0]
    if why != "blocked":
        assert text.startswith("this launcher was not running for ")
    else:
        assert text.startswith("this launcher's event loop was blocked for ")
        assert "in read_from_a_disk_that_hangs" in text


def test_a_loop_that_answers_is_not_mentioned(looked: threading.Event) -> None:
    said: list[str] = []

    async def scenario() -> None:
        watch = LoopWatch(said.append, limit_s=10.0)
        for _ in range(100):
            await asyncio.sleep(0)
        watch.end()

    asyncio.run(scenario())
    assert said == []
    assert not looked.is_set()


def test_a_thread_that_waits_for_a_core_is_counted() -> None:
    assert watchdog.waited_for_a_core_s(threading.get_native_id()) >= 0.0
    assert watchdog.waited_for_a_core_s(0) == 0.0, "there is none"
