"""Background tasks: none fails in silence; pauses that grow."""

from __future__ import annotations

import asyncio
from typing import Any

from edl.tasks import BackgroundTasks, Backoff, pause


async def fails() -> None:
    raise ValueError("a mistake")


def test_pauses_double_up_to_the_longest_and_start_over_after_a_success() -> None:
    pauses = Backoff(0.1, 0.5)
    assert [pauses.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    pauses.reset()
    assert pauses.next() == 0.1


def test_the_owner_is_told_of_a_chore_that_fails() -> None:
    async def scenario() -> None:
        told: asyncio.Queue[Exception] = asyncio.Queue()
        BackgroundTasks(told.put_nowait).begin(fails())
        assert str(await told.get()) == "a mistake"

    asyncio.run(scenario())


def test_without_an_owner_that_listens_the_event_loop_is() -> None:
    seen: list[dict[str, Any]] = []

    async def scenario() -> None:
        told = asyncio.Event()

        def handler(_: object, context: dict[str, Any]) -> None:
            seen.append(context)
            told.set()

        asyncio.get_running_loop().set_exception_handler(handler)
        BackgroundTasks().begin(fails())
        await told.wait()

    asyncio.run(scenario())
    assert str(seen[0]["exception"]) == "a mistake"
    assert "background task" in seen[0]["message"]


def test_one_that_is_dropped_has_not_failed() -> None:
    async def scenario() -> None:
        failures: list[Exception] = []
        background = BackgroundTasks(failures.append)
        background.begin(asyncio.Event().wait())  # type: ignore[arg-type]
        await asyncio.sleep(0)
        background.drop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert failures == []

    asyncio.run(scenario())


def test_a_pause_lasts_as_long_as_it_should_unless_the_event_is_set() -> None:
    async def scenario() -> None:
        over = asyncio.Event()
        await pause(0.0, over)
        pausing = asyncio.ensure_future(pause(3600.0, over))
        await asyncio.sleep(0)
        assert not pausing.done()
        over.set()
        await asyncio.wait_for(pausing, 60.0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
