"""Workers that wait for files: for the machine they have been started."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from edl.agent.held_starts import FilesAlike, HeldStarts
from edl.agent.machine.events import WorkerEnded
from edl.errors import CheckpointError
from edl.types import Round
from edl.wire.records import World

ONE, TWO = World(Round(1), (), 0), World(Round(2), (), 0)


class Files:
    """Synchronised directories that become alike when a test says so."""

    def __init__(self) -> None:
        self.waits: dict[Round, asyncio.Future[None]] = {}
        self.started: list[int] = []

    async def caught_up(self) -> None:
        return

    async def alike(self, world: World, started: int) -> None:
        self.started.append(started)
        self.waits[world.round] = asyncio.get_running_loop().create_future()
        await self.waits[world.round]


class Held:
    """Held workers, and what they post."""

    def __init__(self) -> None:
        self.files = Files()
        self.posted: list[object] = []
        self.bugs: list[Exception] = []
        self.starts = HeldStarts(self.files, self.posted.append, self.bugs.append)

    async def enter(self, world: World) -> None:
        self.starts.enter(world, (0, 1))
        await asyncio.sleep(0)

    async def done(self, world: World, error: CheckpointError | None = None) -> None:
        wait = self.files.waits[world.round]
        wait.set_exception(error) if error else wait.set_result(None)
        for _ in range(3):
            await asyncio.sleep(0)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_workers_start_when_the_files_are_alike() -> None:
    async def scenario() -> None:
        held = Held()
        await held.enter(ONE)
        assert held.starts.hold((0, 1))
        await held.done(ONE)
        assert held.files.started == [2]
        assert held.posted == [FilesAlike(ONE)]
        assert held.starts.released(ONE) == (0, 1)
        assert held.starts.released(ONE) == ()
        assert not held.starts.hold((1,))  # a replacement in the same round need not wait again

    play(scenario())


def test_a_signal_ends_workers_that_wait_also_just_before_they_start() -> None:
    async def scenario() -> None:
        held = Held()
        await held.enter(ONE)
        held.starts.hold((0, 1, 2))
        held.starts.signal(15, (1,))
        await held.done(ONE)
        held.starts.signal(9, ())
        ended = [WorkerEnded(Round(1), 1, -15), WorkerEnded(Round(1), 0, -9), WorkerEnded(Round(1), 2, -9)]
        assert held.posted == [ended[0], FilesAlike(ONE), *ended[1:]]
        assert held.starts.released(ONE) == ()

    play(scenario())


def test_files_that_do_not_arrive_fail_the_workers_with_the_reason() -> None:
    async def scenario() -> None:
        held = Held()
        await held.enter(ONE)
        held.starts.hold((0,))
        await held.done(ONE, CheckpointError("node b is unreachable"))
        assert held.starts.hold((1,))
        assert held.posted == [WorkerEnded(Round(1), slot, 1, exception="node b is unreachable") for slot in (0, 1)]
        assert held.bugs == []

    play(scenario())


def test_the_next_round_begins_anew() -> None:
    async def scenario() -> None:
        held = Held()
        await held.enter(ONE)
        held.starts.hold((0,))
        held.starts.signal(15, (0,))
        await held.enter(TWO)
        assert held.files.waits[Round(1)].cancelled()
        assert held.starts.hold((0,))
        assert held.starts.released(ONE) == ()
        await held.done(TWO)
        assert held.posted[-1] == FilesAlike(TWO)
        held.starts.drop()

    play(scenario())
