"""Threads at a container's limit on processes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edl.adapters.system_threads import PatientPool, room_for_threads


def test_a_call_waits_for_the_thread_of_another_where_there_can_be_no_further_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def first_call() -> str:
        begun.set()
        return str(go_on.wait(60))

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> list[str]:
        asyncio.get_running_loop().set_default_executor(PatientPool())
        first = asyncio.ensure_future(asyncio.to_thread(first_call))
        while not begun.is_set():  # noqa: ASYNC110 - it is set in the thread
            await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            second = asyncio.ensure_future(asyncio.to_thread(lambda: "second"))
            await asyncio.sleep(0)
            assert not second.done()
            go_on.set()
            return [await first, await second]

    assert asyncio.run(scenario()) == ["True", "second"]


def test_without_any_thread_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="start new thread"):
        PatientPool().submit(int)


@pytest.mark.parametrize(("allowed", "room"), [(0, False), (1, False), (2, True)])
def test_room_for_threads_is_that_for_all_of_them(allowed: int, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) >= allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert room_for_threads(2) is room
    assert not any(thread.is_alive() for thread in started)
