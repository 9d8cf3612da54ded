"""Detection of hangs, and cases that are none."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Mapping

import pytest

from edl.agent.machine import events as ev
from edl.agent.machine.state import AgentPhase, AgentState, Worker
from edl.agent.workers.hang import LATE, START, HangVerdict, HangWatch, Sample, Watched
from edl.agent.workers.hang_shell import HangDetection
from edl.config import HangTimeout, Timeouts
from edl.ports import Activity
from edl.testing.clock import FakeClock
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.collective_wait import CollectiveWait
from edl.wire.messages import Hanging
from edl.wire.node_requests import OutputLine
from edl.wire.records import Member, NodeInfo, World

HANG_S = 30.0
BOUNDARY_S = 60.0
STEP_S = 3.0
TIMEOUTS = Timeouts(hang=HangTimeout(auto=False, seconds=HANG_S), boundary_s=BOUNDARY_S)


class Setup:
    """Workers that do something from look to look, and what is thought of it."""

    def __init__(self, workers: int = 2) -> None:
        self.judge = HangWatch(TIMEOUTS)
        self.now_s = 1000.0
        self.round = Round(1)
        self.hold = 0
        self.verdict: HangVerdict | None = None
        self.samples = {rank: Sample(100 + rank, None, 0, Activity(0.0, 0)) for rank in range(workers)}

    def do(self, rank: int, *, cpu_s: float = 0.0, io: int = 0, output: int = 0, commit: int | None = None) -> None:
        before = self.samples[rank]
        assert before.used is not None
        used = Activity(before.used.cpu_s + cpu_s, before.used.io_bytes + io)
        commit = before.commit if commit is None else commit
        self.samples[rank] = Sample(before.pid, commit, before.output_bytes + output, used)

    def look(self, after_s: float = STEP_S) -> str:
        self.now_s += after_s
        self.verdict = self.judge.look(self.round, self.samples, self.now_s, self.hold)
        return self.verdict.what if self.verdict is not None else ""

    def until_hang(self, limit_s: float = 2000.0) -> tuple[float, str]:
        """Seconds until a hang is reported, without any progress."""
        for passed in range(1, int(limit_s / STEP_S)):
            what = self.look()
            if what:
                return passed * STEP_S, what
        return limit_s, ""

    def work(self, seconds: float, **deeds: float) -> None:
        """Everybody does this, from look to look."""
        for _ in range(int(seconds / STEP_S)):
            for rank in self.samples:
                self.do(rank, **deeds)  # type: ignore[arg-type]
            assert self.look() == ""

    def commit(self, seconds: float, first: int = 1) -> int:
        last = first + int(seconds / STEP_S) - 1
        for number in range(first, last + 1):
            for rank in self.samples:
                self.do(rank, commit=number)
            assert self.look() == ""
        return last


def started(workers: int = 2) -> Setup:
    """Plain scripts that have come up."""
    scenario = Setup(workers)
    scenario.work(START * HANG_S + STEP_S, cpu_s=1.0)
    return scenario


class TestPlainScripts:
    @pytest.mark.parametrize(
        "deeds",
        [{"cpu_s": STEP_S}, {"cpu_s": 0.05}, {"output": 1}, {"io": 10_000_000}],
        ids=["computing", "using little", "writing", "reading"],
    )
    def test_who_does_anything_is_alive_however_long(self, deeds: Mapping[str, float]) -> None:
        started().work(50 * HANG_S, **deeds)

    @pytest.mark.parametrize(
        ("deeds", "every"),
        [({}, 1), ({"cpu_s": 0.01}, 1), ({"cpu_s": 0.04}, 4), ({"io": 1000}, 1)],
        ids=["nothing", "a watchdog", "ticks that come together", "a tracker"],
    )
    def test_nothing_worth_mentioning_is_a_hang(self, deeds: Mapping[str, float], every: int) -> None:
        scenario = started()
        what = ""
        for look in range(int(HANG_S / STEP_S)):
            assert what == ""
            for rank in scenario.samples if look % every == 0 else ():
                scenario.do(rank, **deeds)  # type: ignore[arg-type]
            what = scenario.look()
        assert what.startswith("local ranks 0, 1: no CPU time used")

    def test_says_who_and_how_long_and_what_was_looked_at(self) -> None:
        after_s, what = started().until_hang()
        assert after_s == HANG_S
        assert what == "local ranks 0, 1: no CPU time used, nothing written and no file read for 30 s"

    def test_while_one_works_the_others_may_wait_for_it(self) -> None:
        scenario = started()
        for _ in range(100):
            scenario.do(1, cpu_s=1.0)
            assert scenario.look() == ""

    def test_a_worker_that_has_ended_does_not_count(self) -> None:
        scenario = started()
        del scenario.samples[1]
        assert scenario.until_hang() == (
            HANG_S,
            "local rank 0: no CPU time used, nothing written and no file read for 30 s",
        )

    def test_the_beginning_of_a_round_may_take_longer(self) -> None:
        scenario = Setup()
        assert scenario.until_hang()[0] == START * HANG_S + STEP_S
        scenario.round = Round(2)
        assert scenario.until_hang()[0] == START * HANG_S + STEP_S

    def test_a_burst_of_work_now_and_then_is_enough(self) -> None:
        scenario = started()
        for _ in range(20):
            for _ in range(8):
                assert scenario.look() == ""
            scenario.do(0, cpu_s=0.1)
            assert scenario.look() == ""

    def test_the_end_of_a_child_does_not_look_like_work_nor_hide_it(self) -> None:
        scenario = started()
        scenario.do(0, cpu_s=-5.0)
        scenario.do(1, cpu_s=-5.0)
        scenario.work(5 * HANG_S, cpu_s=0.05)
        for _ in range(5):
            scenario.do(0, cpu_s=-5.0)
            assert scenario.look() == ""
        assert scenario.until_hang()[0] <= HANG_S

    def test_where_nobody_can_tell_nobody_is_accused(self) -> None:
        scenario = started()
        scenario.samples = {rank: dataclasses.replace(sample, used=None) for rank, sample in scenario.samples.items()}
        assert scenario.until_hang()[1] == ""


class TestThoseThatCommit:
    def test_a_commit_is_all_that_counts(self) -> None:
        scenario = Setup()
        scenario.commit(10 * HANG_S)
        for _ in range(9):
            for rank in (0, 1):
                scenario.do(rank, cpu_s=STEP_S, output=100)
            assert scenario.look() == ""
        for rank in (0, 1):
            scenario.do(rank, cpu_s=STEP_S, output=100)
        assert scenario.look() == "local ranks 0, 1: no commit() for 30 s"

    def test_names_those_that_stopped(self) -> None:
        scenario = Setup()
        last = scenario.commit(HANG_S)
        what = ""
        while not what:
            last += 1
            scenario.do(1, commit=last)
            what = scenario.look()
        assert what == "local rank 0: no commit() for 30 s"

    def test_one_that_never_commits_is_not_asked_to(self) -> None:
        scenario = Setup()
        for number in range(1, 200):
            scenario.do(0, commit=number)
            assert scenario.look() == ""

    def test_the_first_commit_of_a_round_may_take_longer(self) -> None:
        scenario = Setup(1)
        scenario.commit(HANG_S)
        scenario.round = Round(2)
        after_s, what = scenario.until_hang()
        assert after_s == START * HANG_S + STEP_S
        assert what == "local rank 0: no commit() since the round began, for 150 s"

    def test_after_it_the_usual_time_holds(self) -> None:
        scenario = Setup(1)
        scenario.commit(HANG_S)
        scenario.round = Round(2)
        scenario.commit(2 * HANG_S, first=5)  # of an earlier commit: numbers go back
        assert scenario.until_hang() == (HANG_S, "local rank 0: no commit() for 30 s")

    def test_a_new_process_starts_over(self) -> None:
        scenario = Setup(1)
        scenario.commit(HANG_S)
        scenario.round = Round(2)
        scenario.samples[0] = Sample(777, None, 0, Activity(0.0, 0))
        scenario.work(3 * HANG_S, cpu_s=1.0)
        scenario.commit(HANG_S, first=40)
        assert scenario.until_hang()[0] == HANG_S


class TestWhatIsNoHang:
    def test_time_in_which_nobody_looked_does_not_count(self) -> None:
        scenario = started()
        for _ in range(9):
            assert scenario.look() == ""
        assert scenario.look(after_s=(LATE + 1) * STEP_S) == ""
        assert scenario.until_hang()[0] == HANG_S

    def test_nor_does_time_with_another_reason(self) -> None:
        scenario = started()
        for _ in range(9):
            assert scenario.look() == ""
        scenario.judge.excuse()
        assert scenario.look() == ""
        assert scenario.until_hang()[0] == HANG_S

    def test_workers_may_wait_at_a_boundary_as_long_as_that_may_take(self) -> None:
        scenario = Setup()
        scenario.commit(HANG_S)
        scenario.hold = 1
        assert scenario.look() == ""
        assert scenario.until_hang()[0] == HANG_S + BOUNDARY_S
        scenario.hold = 0
        assert scenario.look() == ""
        assert scenario.until_hang()[0] == HANG_S

    @pytest.mark.parametrize(("hang_s", "interval_s"), [(0.5, 0.2), (30.0, 3.0), (3600.0, 10.0)])
    def test_how_often_it_looks(self, hang_s: float, interval_s: float) -> None:
        assert HangWatch(Timeouts(hang=HangTimeout(auto=False, seconds=hang_s))).interval_s == pytest.approx(interval_s)


STACK = (
    "Thread 0x00007f0000000001 (most recent call first):",
    '  File "/usr/lib/python3.11/threading.py", line 331 in wait',
    "Current thread 0x00007f0000000002 (most recent call first):",
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_reduce',
    '  File "/home/me/train.py", line 31 in step',
    '  File "/home/me/train.py", line 50 in <module>',
)
INFO = NodeInfo(NodeId("a"), Incarnation(1), "h", 1, 2)
WORLD = World(Round(4), (Member(NodeId("a"), Incarnation(1), "h", 2, Rank(0), (1, 2, 3)),), 0)
RUNNING = AgentState(
    INFO,
    TIMEOUTS,
    AgentPhase.RUNNING,
    world=WORLD,
    workers=tuple(Worker(slot, Rank(slot), local_rank=slot, born=Round(4)) for slot in (0, 1)),
)


class Launcher:
    """Around ``HangDetection``: workers with pids, and what is posted."""

    def __init__(self, state: AgentState) -> None:
        self.clock = FakeClock(10.0)
        self.state = state
        self.posted: list[ev.Event] = []
        self.progress: dict[int, int] = {}
        self.asked: list[tuple[int, ...]] = []
        self.looks = 0
        self.opened = 0
        self.output_bytes = 0
        self.busy = False
        self.waiting: dict[int, CollectiveWait] = {}
        self.timeouts = TIMEOUTS
        self.at_look: dict[int, AgentState] = {}

    def open(self) -> None:
        self.opened += 1

    def close(self) -> None:
        self.opened -= 1

    def workers(self) -> Mapping[int, Watched]:
        return {slot: Watched(100 + slot, self.output_bytes) for slot in (0, 1, 2)}

    def waits(self) -> Mapping[int, CollectiveWait]:
        return self.waiting

    async def stacks(self) -> Collection[OutputLine]:
        self.output_bytes += 1000  # they are written to stderr
        return [OutputLine(rank, 4, True, line) for rank in (0, 1) for line in STACK]

    async def flight_recorders(self, pids: Collection[int]) -> Collection[str]:
        return [f"/logs/{pid}.json" for pid in pids]

    def devices_busy(self) -> bool:
        return self.busy

    def activity(self, pids: Collection[int]) -> Mapping[int, Activity]:
        self.asked.append(tuple(pids))
        return {pid: Activity(1.0, 1) for pid in pids}

    async def pause(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.looks += 1
        self.state = self.at_look.get(self.looks, self.state)
        if self.looks > 200:
            raise EOFError

    def run(self) -> list[ev.Event]:
        async def main() -> None:
            with pytest.raises(EOFError):
                detection = HangDetection(
                    HangWatch(self.timeouts),
                    self,
                    lambda: self.state,
                    self.progress,
                    self.clock.now_s,
                    self.posted.append,
                    self.pause,
                )
                await detection.run()

        asyncio.run(main())
        assert self.opened == 0
        return self.posted


class TestWatch:
    def test_reports_to_the_master(self) -> None:
        posted = Launcher(RUNNING).run()
        what = "local ranks 0, 1: no CPU time used, nothing written and no file read for 150 s"
        where = "rank 0 at train.py:31 in step; rank 1 at train.py:31 in step"
        first = posted[0]
        assert isinstance(first, ev.Report) and isinstance(first.message, Hanging)
        assert (first.message.round, first.message.what) == (Round(4), f"{what} ({where})")
        assert (first.message.for_s, first.message.learnt) == (150.0, False)
        assert [(one.rank, one.exit_code, one.what, one.traceback) for one in first.message.workers] == [
            (rank, 0, "made no progress for 150 s", "\n".join(STACK)) for rank in (0, 1)
        ]
        assert len(posted) > 1  # the first one may have met nobody

    @pytest.mark.parametrize("phase", [phase for phase in AgentPhase if phase is not AgentPhase.RUNNING])
    def test_only_while_a_world_runs(self, phase: AgentPhase) -> None:
        launcher = Launcher(dataclasses.replace(RUNNING, phase=phase))
        assert launcher.run() == []
        assert launcher.asked == []

    @pytest.mark.parametrize("odd", [{"frozen_since_s": 3.0}, {"condemned": "frozen"}])
    def test_not_while_a_worker_is_frozen_or_just_killed(self, odd: Mapping[str, object]) -> None:
        first, second = RUNNING.workers
        workers = (first, dataclasses.replace(second, **odd))  # type: ignore[arg-type]
        assert Launcher(dataclasses.replace(RUNNING, workers=workers)).run() == []

    def test_a_thawed_worker_has_all_its_time(self) -> None:
        first, second = RUNNING.workers
        frozen = dataclasses.replace(RUNNING, workers=(first, dataclasses.replace(second, frozen_since_s=1.0)))
        launcher = Launcher(RUNNING)
        launcher.at_look = {45: frozen, 55: RUNNING}
        posted = launcher.run()
        assert posted
        assert launcher.looks > 60

    def test_those_that_commit_are_known_by_the_worker_server(self) -> None:
        launcher = Launcher(RUNNING)
        launcher.progress = {0: 7}
        first = launcher.run()[0]
        assert isinstance(first, ev.Report)
        assert isinstance(first.message, Hanging)
        assert first.message.what.startswith("local rank 0: no commit() since the round began, for 150 s")
        assert [one.rank for one in first.message.workers] == [0]
