"""Hangs with a learnt limit, and workers that spin in collectives."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Mapping

import pytest

from edl.agent.machine import events as ev
from edl.agent.workers.hang import START, HangVerdict, HangWatch, Sample
from edl.agent.workers.hang_limit import FACTOR, GROWTH, NEEDED
from edl.config import HangTimeout, Timeouts
from edl.ports import Activity
from edl.types import Round
from edl.wire.collective_wait import CollectiveWait, PendingCollective
from edl.wire.messages import Hanging, HangLimit
from tests.unit.edl.agent.machine.test_hang import RUNNING, Launcher

FLOOR_S = 30.0
LOOK_S = FLOOR_S / 10
AUTO = Timeouts(hang=HangTimeout(auto=True, seconds=FLOOR_S))
WAIT = CollectiveWait("x", (PendingCollective("nccl:all_reduce", 7, "default_pg", "1024"),))


class Node:
    """Workers of one node under a learnt limit."""

    def __init__(self, workers: int = 2, timeouts: Timeouts = AUTO) -> None:
        self.judge = HangWatch(timeouts)
        self.now_s, self.round = 1000.0, Round(1)
        self.samples = {rank: Sample(100 + rank, None, 0, Activity(0.0, 0)) for rank in range(workers)}

    def look(self, *, commit: bool = False, cpu_s: float = 0.0, waiting: str = "") -> HangVerdict | None:
        self.now_s += LOOK_S
        for rank, before in self.samples.items():
            assert before.used is not None
            used = dataclasses.replace(before.used, cpu_s=before.used.cpu_s + cpu_s)
            number = (before.commit or 0) + 1 if commit else before.commit
            self.samples[rank] = dataclasses.replace(before, used=used, commit=number, waiting=waiting)
        return self.judge.look(self.round, self.samples, self.now_s)

    def pause(self, seconds: float, *, cpu_s: float = 0.0, waiting: str = "") -> list[HangVerdict]:
        """What is said while nothing is committed for this long."""
        looks = (self.look(cpu_s=cpu_s, waiting=waiting) for _ in range(round(seconds / LOOK_S)))
        return [verdict for verdict in looks if verdict is not None]

    def commit(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.look(commit=True, cpu_s=LOOK_S) is None


def committed() -> Node:
    node = Node()
    node.commit(NEEDED + 2)
    assert node.judge.learnt.limit_s == FLOOR_S
    return node


class TestCommits:
    def test_nothing_is_said_before_a_limit_is_learnt(self) -> None:
        node = Node()
        node.commit(NEEDED + 1)
        assert node.pause(100 * FLOOR_S) == []
        node.commit()
        assert node.judge.learnt.limit_s == FACTOR * (100 * FLOOR_S + LOOK_S), "and the pause itself teaches"

    def test_then_a_pause_as_long_as_the_limit_is_said_once_it_lasts(self) -> None:
        node = committed()
        said = node.pause(FLOOR_S)
        assert [one.what for one in said] == ["local ranks 0, 1: no commit() for 30 s"]
        assert (said[0].limit_s, said[0].lifeless) == (FLOOR_S, True)
        assert said[0].learnt is not None and said[0].learnt.pauses == NEEDED

    def test_who_computes_meanwhile_is_not_lifeless(self) -> None:
        assert [one.lifeless for one in committed().pause(2 * FLOOR_S, cpu_s=1.0)] == [False] * 11

    def test_what_ended_well_is_not_said_again(self) -> None:
        node = committed()
        assert len(node.pause(2 * FLOOR_S)) == 11
        node.commit()
        assert node.pause(2 * FLOOR_S) == []
        assert node.pause(12 * FLOOR_S), "but one that is much longer is"

    def test_it_survives_a_change_of_the_world_and_starts_have_their_own_limit(self) -> None:
        node = committed()
        node.round = Round(2)
        said = node.pause(START * FLOOR_S + 2 * LOOK_S)
        assert said[0].what == f"local ranks 0, 1: no commit() since the round began, for {START * FLOOR_S:.0f} s"
        node.commit(3)
        assert node.judge.learnt.limit_s == FLOOR_S
        node.round = Round(3)
        assert node.pause(START * FLOOR_S + 5 * LOOK_S) == [], "the last start took that long"

    def test_a_pause_that_was_not_seen_as_a_whole_teaches_nothing(self) -> None:
        node = committed()
        node.pause(FLOOR_S / 2)
        node.judge.excuse()
        node.pause(FLOOR_S * 3 / 4)
        node.commit()
        assert node.judge.learnt.limit_s == FLOOR_S


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_jobs_are_suspected_rarely_and_real_hangs_always(seed: int) -> None:
    """Commits at random distances, idle or computing, through changes of the world; in the end it hangs."""
    rng = random.Random(f"jobs {seed}")
    node, longest_s, suspicions = Node(rng.randint(1, 4)), FLOOR_S, 0
    usual = rng.choice((0, 0, 1, 5, 12))
    node.commit()
    for _ in range(120):
        if rng.random() < 0.02:
            node.round = Round(node.round + 1)
            node.commit()
        looks = rng.randint(0, usual) if rng.random() < 0.97 else rng.randint(0, 60)
        busy = rng.choice((0.0, 1.0))
        said = node.pause(looks * LOOK_S, cpu_s=busy)
        node.look(commit=True)
        assert not (busy and any(one.lifeless for one in said)), "who computes is never taken for dead"
        if said:
            suspicions += 1
            assert said[0].limit_s >= GROWTH * longest_s or longest_s == FLOOR_S
            longest_s = (looks + 1) * LOOK_S
    assert suspicions <= 1 + math.log(61 * LOOK_S / FLOOR_S, GROWTH)
    limit_s = node.judge.learnt.limit_s
    assert limit_s
    said = node.pause(limit_s + LOOK_S)
    assert said and said[-1].lifeless


class TestPlainScripts:
    def test_activity_is_learnt_from(self) -> None:
        node = Node()
        assert node.pause(START * FLOOR_S + NEEDED * LOOK_S, cpu_s=1.0) == []
        said = node.pause(2 * FLOOR_S)
        assert said[0].what == "local ranks 0, 1: no CPU time used, nothing written and no file read for 30 s"
        assert said[0].lifeless and not said[0].waiting

    def test_who_spins_in_a_collective_hangs(self) -> None:
        node = Node()
        assert node.pause(START * FLOOR_S + NEEDED * LOOK_S, cpu_s=LOOK_S) == []
        said = node.pause(2 * FLOOR_S, cpu_s=LOOK_S, waiting="7")
        assert (
            said[0].what == "local ranks 0, 1: the same collectives pending, nothing written and no file read for 30 s"
        )
        assert said[0].lifeless and said[0].waiting

    def test_collectives_that_complete_are_progress_without_any_cpu_time(self) -> None:
        node = Node()
        node.pause(START * FLOOR_S + NEEDED * LOOK_S, cpu_s=LOOK_S)
        for number in range(100):
            assert node.look(waiting=str(number // 5)) is None

    def test_one_that_computes_while_the_others_wait_is_waited_for(self) -> None:
        node = Node()
        node.pause(START * FLOOR_S + NEEDED * LOOK_S, cpu_s=LOOK_S)
        for _ in range(100):
            node.now_s += LOOK_S
            for rank, waiting in ((0, ""), (1, "7")):
                used = node.samples[rank].used
                assert used is not None
                used = dataclasses.replace(used, cpu_s=used.cpu_s + LOOK_S)
                node.samples[rank] = dataclasses.replace(node.samples[rank], used=used, waiting=waiting)
            assert node.judge.look(node.round, node.samples, node.now_s) is None

    def test_a_given_limit_finds_it_too(self) -> None:
        node = Node(timeouts=Timeouts(hang=HangTimeout(auto=False, seconds=FLOOR_S)))
        node.pause(START * FLOOR_S, cpu_s=LOOK_S)
        assert node.pause(2 * FLOOR_S, cpu_s=LOOK_S, waiting="7")[0].waiting


class Learning(Launcher):
    """Plain scripts under a learnt limit: active for a while, then idle. ``commits``: scripts that commit."""

    def __init__(self, active: int, commits: bool = False) -> None:
        super().__init__(RUNNING)
        self.timeouts = AUTO
        self.active, self.commits = active, commits
        self.again_at = 10_000
        self.computes = False

    def activity(self, pids: Collection[int]) -> Mapping[int, Activity]:
        return {pid: Activity(float(self.looks) if self.computes else 0.0, 0) for pid in pids}

    async def pause(self, seconds: float) -> None:
        if self.looks < self.active or self.looks == self.again_at:
            self.output_bytes += 1
            if self.commits:
                self.progress.update({slot: self.looks + 1 for slot in (0, 1)})
        await super().pause(seconds)


class TestWhatIsReported:
    def test_an_alarm_first_and_a_hang_where_there_is_no_sign_of_life(self) -> None:
        posted = Learning(100).run()
        limits = [event.limit for event in posted if isinstance(event, ev.HangLimitChanged)]
        assert limits == [
            *(HangLimit(0.0, seen, NEEDED) for seen in range(5, NEEDED, 5)),
            HangLimit(FLOOR_S, NEEDED, NEEDED),
        ]
        suspected, hanging = [event for event in posted if not isinstance(event, ev.HangLimitChanged)][:2]
        assert isinstance(suspected, ev.Suspected) and suspected.alarm is not None
        assert suspected.alarm.name == "hang"
        assert suspected.alarm.shared, "all nodes of a world have it at once"
        limit = "for 30 s on a (limit 30 s, learnt from 99 pauses)"
        assert f"{limit}: rank 0 at train.py:31 in step" in suspected.alarm.text
        assert suspected.alarm.text.endswith("restarted if no other node shows a sign of life")
        assert isinstance(hanging, ev.Report) and isinstance(hanging.message, Hanging)
        assert hanging.message.learnt and len(hanging.message.workers) == 2

    def test_only_an_alarm_while_a_device_computes(self) -> None:
        launcher = Learning(100)
        launcher.busy = True
        posted = [event for event in launcher.run() if not isinstance(event, ev.HangLimitChanged)]
        assert len(posted) == 1
        assert isinstance(posted[0], ev.Suspected) and posted[0].alarm is not None
        assert posted[0].alarm.text.endswith("The round is not restarted, because workers are active")

    def test_only_an_alarm_while_workers_compute_without_committing(self) -> None:
        launcher = Learning(100, commits=True)
        launcher.computes = True
        posted = [event for event in launcher.run() if not isinstance(event, ev.HangLimitChanged)]
        assert len(posted) == 1
        assert isinstance(posted[0], ev.Suspected) and posted[0].alarm is not None
        assert "no commit() for 30 s on a" in posted[0].alarm.text

    def test_a_busy_device_is_no_sign_of_life_of_workers_that_all_wait(self) -> None:
        launcher = Learning(100)
        launcher.busy = True
        launcher.waiting = {100: WAIT, 101: WAIT}
        hanging = [event for event in launcher.run() if isinstance(event, ev.Report)]
        assert isinstance(hanging[0].message, Hanging)
        assert hanging[0].message.workers[0].exception == (
            "waits for nccl:all_reduce of 1024, number 7 of group default_pg"
        )
        assert "flight recorder: /logs/100.json, /logs/101.json" in hanging[0].message.what

    def test_the_alarm_is_withdrawn_when_work_goes_on(self) -> None:
        launcher = Learning(100, commits=True)
        launcher.again_at = 130
        posted = [event for event in launcher.run() if isinstance(event, ev.Suspected)]
        assert [event.alarm is not None for event in posted][:2] == [True, False]
