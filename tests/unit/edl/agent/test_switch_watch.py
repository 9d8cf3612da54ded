"""Files that ask for a checkpoint or for the end of the job."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine

import pytest

from edl.agent.machine.events import Event, Report
from edl.agent.machine.state import AgentPhase, AgentState, Worker
from edl.agent.switch_watch import SwitchWatch
from edl.config import Timeouts
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose
from edl.wire.records import Member, NodeInfo, Version, World

SAVE = Asked(Purpose.SAVE, "the file SAVE")
KILL = Asked(Purpose.KILL, "the file KILL")


def world(number: int = 4, first: str = "a", era: int = 2, restore: int = 9) -> World:
    member = Member(NodeId(first), Incarnation(1), "h", 1, Rank(0), (1, 2))
    return World(Round(number), (member,), 0, era=era, restore=Version(era - 1, restore))


def running(place: World) -> AgentState:
    return AgentState(
        NodeInfo(NodeId("a"), Incarnation(1), "h", 1, 1),
        Timeouts(),
        AgentPhase.RUNNING,
        connected=True,
        world=place,
        workers=(Worker(0, Rank(0), born=place.round, underway=True),),
    )


class Files:
    """The switches of a directory."""

    poll_s = 0.001

    def __init__(self) -> None:
        self.present: set[Asked] = set()
        self.cleared = 0
        self.touched = False
        self.polls = 0
        self.busy = False

    def poll(self) -> frozenset[Asked]:
        assert not self.busy
        self.busy = True
        self.polls += 1
        self.busy = False
        return frozenset(self.present)

    def clear_save(self) -> None:
        assert not self.busy
        self.cleared += 1
        if not self.touched:
            self.present.discard(SAVE)
        self.touched = False


class Setup:
    def __init__(self) -> None:
        self.files = Files()
        self.state = running(world())
        self.progress = {0: 9}
        self.posted: list[Event] = []
        self.watch = SwitchWatch(self.files, lambda: self.state, self.progress, self.posted.append)

    async def polls(self, count: int = 3) -> None:
        wanted = self.files.polls + count
        while self.files.polls < wanted:  # noqa: ASYNC110 - a thread counts them
            await asyncio.sleep(0.001)

    @property
    def asked(self) -> list[Asked]:
        found = [event.message for event in self.posted if isinstance(event, Report)]
        return [message for message in found if isinstance(message, Asked)]


def play(act: Callable[[Setup], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        scenario = Setup()
        task = asyncio.ensure_future(scenario.watch.run())
        try:
            await asyncio.wait_for(act(scenario), 30)
            assert not task.done(), task
        finally:
            task.cancel()

    asyncio.run(main())


class TestSave:
    def test_asks_once_for_a_file(self) -> None:
        async def act(scenario: Setup) -> None:
            await scenario.polls()
            assert scenario.posted == []
            scenario.files.present.add(SAVE)
            await scenario.polls(5)
            assert scenario.asked == [SAVE]

        play(act)

    def test_clears_the_file_once_a_newer_commit_is_kept(self) -> None:
        async def act(scenario: Setup) -> None:
            await scenario.polls()
            scenario.progress[0] = 12
            scenario.files.present.add(SAVE)
            await scenario.polls()
            scenario.watch.kept(Version(2, 12))  # was on its way before
            await scenario.polls()
            assert scenario.files.cleared == 0
            scenario.watch.kept(Version(2, 13))
            await scenario.polls()
            assert (scenario.files.cleared, scenario.files.present) == (1, set())
            scenario.watch.kept(Version(2, 14))
            await scenario.polls()
            assert scenario.files.cleared == 1

        play(act)

    def test_progress_of_a_round_before_does_not_count(self) -> None:
        async def act(scenario: Setup) -> None:
            scenario.progress[0] = 30
            scenario.files.present.add(SAVE)
            await scenario.polls()
            scenario.watch.kept(Version(2, 10))
            await scenario.polls()
            assert scenario.files.cleared == 1

        play(act)

    def test_a_file_that_was_touched_meanwhile_asks_again(self) -> None:
        async def act(scenario: Setup) -> None:
            scenario.files.present.add(SAVE)
            await scenario.polls()
            scenario.files.touched = True
            scenario.watch.kept(Version(2, 13))
            await scenario.polls()
            assert (scenario.files.cleared, scenario.asked) == (1, [SAVE, SAVE])

        play(act)

    def test_a_file_that_comes_back_asks_again(self) -> None:
        async def act(scenario: Setup) -> None:
            for _ in range(2):
                scenario.files.present.add(SAVE)
                await scenario.polls()
                scenario.files.present.clear()
                await scenario.polls()
            assert scenario.asked == [SAVE, SAVE]
            scenario.watch.kept(Version(2, 99))
            await scenario.polls()
            assert scenario.files.cleared == 0  # nobody asks any more

        play(act)

    def test_asks_again_in_the_next_round_if_nothing_came_of_it(self) -> None:
        async def act(scenario: Setup) -> None:
            scenario.files.present.add(SAVE)
            await scenario.polls()
            scenario.state = running(world(5, era=3))
            await scenario.polls()
            assert scenario.asked == [SAVE, SAVE]

        play(act)

    def test_waits_for_a_world_in_training(self) -> None:
        async def act(scenario: Setup) -> None:
            ready, scenario.state = scenario.state, dataclasses.replace(scenario.state, phase=AgentPhase.IDLE)
            scenario.files.present.add(SAVE)
            await scenario.polls()
            scenario.state = dataclasses.replace(ready, workers=(Worker(0, Rank(0), born=Round(4)),))
            await scenario.polls()
            assert scenario.asked == []
            scenario.state = ready
            await scenario.polls()
            assert scenario.asked == [SAVE]

        play(act)

    def test_only_the_node_that_writes_asks(self) -> None:
        async def act(scenario: Setup) -> None:
            mine = Member(NodeId("a"), Incarnation(1), "h", 1, Rank(1), (1, 2))
            other = world(first="b")
            scenario.state = running(dataclasses.replace(other, members=(*other.members, mine)))
            scenario.files.present |= {SAVE, KILL}
            await scenario.polls()
            assert scenario.asked == [KILL]

        play(act)


class TestMaster:
    @pytest.mark.parametrize("request_", [SAVE, KILL])
    def test_is_told_when_it_is_in_reach_and_again_when_it_was_not(self, request_: Asked) -> None:
        async def act(scenario: Setup) -> None:
            there = scenario.state
            scenario.state = away = dataclasses.replace(there, connected=False)
            scenario.files.present.add(request_)
            await scenario.polls()
            assert scenario.asked == []
            scenario.state = there
            await scenario.polls()
            scenario.state = away
            await scenario.polls()
            scenario.state = there
            await scenario.polls()
            assert scenario.asked == [request_, request_]

        play(act)

    def test_is_told_to_end_also_while_no_world_runs(self) -> None:
        async def act(scenario: Setup) -> None:
            scenario.state = dataclasses.replace(scenario.state, phase=AgentPhase.IDLE, world=None, workers=())
            scenario.files.present.add(KILL)
            await scenario.polls(5)
            assert scenario.asked == [KILL]

        play(act)
