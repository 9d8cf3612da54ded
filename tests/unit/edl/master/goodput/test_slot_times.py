"""The accounts of jobs whose every second is known."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from edl.config import NodeRange
from edl.master import events as ev
from edl.master.goodput.slot_times import NS, Cost, SlotTimes, follow
from edl.master.state import MasterState, Phase
from edl.types import Round
from edl.wire.messages import Attach, Hanging, Pace, Ready, Underway, WorkersDone
from edl.wire.records import Holding, Version
from edl.wire.scale_requests import Cordon, Suspend
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_resizing import Resizable

SLOTS = 2
"""Of each node of the rules."""


class Accounted(Resizable):
    """A Master whose decisions a times follows, and the sum of all slots' seconds counted in another way."""

    def __init__(self, bounds: NodeRange) -> None:
        self.times = SlotTimes()
        self.costs: list[Cost] = []
        super().__init__(bounds)
        self.began_s = self.now_s
        self.times = SlotTimes(at_ns=round(self.now_s * NS))
        self.whole_ns = 0
        self.followed_ns = self.times.at_ns

    def feed(self, event: ev.Event) -> None:
        before = self.state
        super().feed(event)
        self.account(before, event)

    def account(self, before: MasterState, *events: ev.Event) -> None:
        now_ns = round(self.now_s * NS)
        counted = (
            0
            if before.record.phase is Phase.ENDED
            else sum(e.info.slots for e in before.nodes.values() if e.registered)
        )
        self.whole_ns += counted * (now_ns - self.followed_ns)
        self.followed_ns = now_ns
        self.times, cost = follow(self.times, before, events, self.state, self.now_s)
        self.costs += [cost] if cost is not None else []
        assert sum(self.times.amounts().values()) == self.whole_ns
        assert min(self.times.amounts().values()) >= 0

    def account_take_over(self) -> None:
        """Follow the first decision of a new Master."""
        self.times, _ = follow(self.times, None, (), self.state, self.now_s)

    def spent(self) -> dict[str, float]:
        """Seconds of one slot by use, without the uses that it has none of."""
        return {use.value: amount / NS / SLOTS for use, amount in self.times.amounts().items() if amount}

    def train(self, names: str, connect_s: float = 0.0, restore_s: float = 0.0) -> None:
        for name in names:
            self.say(name, Underway(self.state.record.round, "in process", connect_s, restore_s))

    def stopped(self, names: str, commit: int, age_s: float) -> None:
        held = (Holding(Version(self.state.record.era, commit)),)
        for name in names:
            port = 9000 + ord(name)
            self.say(name, Ready(self.state.record.round, (port, 1, 2), True, held, commit_age_s=age_s))


def two_train() -> Accounted:
    """Two nodes start for 3 s, wait 1 s for a third one, start workers for 5 s and train."""
    rule = Accounted(NodeRange(1, 3))
    for name in "ab":
        rule.feed(ev.NodeRegistered(info(name)))
        rule.attach(name)
    rule.wait(3.0)
    rule.ready("a")
    rule.ready("b")
    rule.wait(1.0)
    assert rule.members == "ab"
    rule.wait(5.0)
    rule.train("ab", connect_s=0.5, restore_s=1.5)
    assert rule.spent() == {"starting": 6.0 + 6.0, "rendezvous": 2 * 1.5, "restore": 2 * 1.5}
    return rule


def test_the_start_of_a_job() -> None:
    two_train()


def test_a_killed_worker_costs_the_pause_and_what_is_redone() -> None:
    rule = two_train()
    began = rule.spent()
    rule.wait(10.0)
    rule.fail("a")
    rule.wait(0.1)
    rule.stopped("ab", commit=7, age_s=0.6)  # 0.5 s before the end
    rule.wait(0.2)
    rule.train("ab", connect_s=0.05, restore_s=0.15)
    after = {use: round(amount - began.get(use, 0.0), 6) for use, amount in rule.spent().items()}
    assert after == {"useful": 19.0, "redone": 1.0, "rendezvous": 0.3, "restore": 0.3, "starting": 0.0}
    (cost,) = rule.costs
    assert cost.took_s == pytest.approx(0.3)
    assert cost.slots == 4
    assert sum(cost.amounts.values()) / NS == pytest.approx(4 * (0.3 + 0.5))


def test_in_a_planned_change_nothing_is_redone() -> None:
    rule = two_train()
    rule.wait(10.0)
    rule.arrive("c")
    rule.boundary(9)
    rule.wait(0.5)
    rule.stopped("ab", commit=9, age_s=5.0)  # a step takes long
    rule.wait(0.5)
    rule.train("abc")
    spent = rule.spent()
    assert "redone" not in spent
    assert spent["resize"] == 1.5  # of all three nodes
    assert spent["useful"] == 20.0


def test_a_planned_change_that_is_interrupted_as_the_next_world_forms_was_not_planned() -> None:
    rule = two_train()
    rule.wait(10.0)
    rule.arrive("c")
    rule.boundary(9)
    rule.stopped("a", commit=7, age_s=0.5)
    rule.lose("b")
    assert (rule.phase, rule.members) == (Phase.RUNNING, "ac")
    assert not rule.times.planned
    assert rule.spent()["redone"] > 0


def test_a_silent_node_was_lost_before_it_was_given_up() -> None:
    rule = two_train()
    rule.wait(10.0)
    rule.feed(ev.NodeDetached(info("b").node, info("b").incarnation))
    rule.wait(3.0)
    rule.lose("b")
    rule.stopped("a", commit=7, age_s=4.0)
    rule.wait(0.5)
    rule.train("a")
    spent = rule.spent()
    assert spent["lost"] == 3.0
    assert spent["redone"] == 4.0 + 1.0  # of the other node, and of the lost one before it fell silent
    assert spent["useful"] == 26.0 - 3.0 - 5.0


def test_a_node_that_comes_back_in_time_was_not_lost() -> None:
    rule = two_train()
    rule.wait(1.0)
    rule.feed(ev.NodeDetached(info("b").node, info("b").incarnation))
    rule.wait(1.0)
    rule.feed(ev.NodeAttached(dataclasses.replace(attached("b"), underway=True)))
    rule.wait(1.0)
    assert rule.spent()["useful"] == 6.0


def attached(name: str) -> Attach:
    return Attach(info(name), Round(1), Round(1), False)


def test_a_hang_is_not_training() -> None:
    rule = two_train()
    rule.wait(100.0)
    rule.say("a", Hanging(rule.state.record.round, "worker 0 has made no training", 60.0))
    rule.stopped("ab", commit=30, age_s=61.0)
    rule.train("ab")
    spent = rule.spent()
    assert (spent["hang"], spent["redone"], spent["useful"]) == (120.0, 2.0, 78.0)


def test_a_hang_of_a_script_that_does_not_report_its_training_is_not_training() -> None:
    rule = Accounted(NodeRange(1, 2))
    rule.join("a", "b")
    began = rule.spent()
    rule.wait(100.0)
    assert rule.spent()["useful"] == began.get("useful", 0.0) + 200.0
    rule.say("a", Hanging(rule.state.record.round, "no sign of life", 60.0))
    rule.wait(1.0)
    spent = rule.spent()
    assert (spent["hang"], spent["useful"] - began.get("useful", 0.0)) == (120.0, 80.0)


def test_waits_for_commits_and_data_are_told_with_the_pace() -> None:
    rule = two_train()
    rule.wait(10.0)
    rule.say("a", Pace(rule.state.record.round, 10, 1.0, 0.0, 0.25, 0.5))
    rule.wait(10.0)
    rule.say("a", Pace(rule.state.record.round, 20, 1.0, 0.0, 0.75, 0.75))  # more than there is
    spent = rule.spent()
    assert (spent["commit"], spent["data_wait"], spent["useful"]) == (10.0, 7.5, 22.5)


def test_a_return_to_an_old_commit_is_priced_with_the_paces() -> None:
    rule = two_train()
    for commit in range(10, 60, 10):
        rule.wait(10.0)
        rule.say("a", Pace(rule.state.record.round, commit, 1.0, age_s=0.5))
    rule.wait(5.0)
    rule.lose("a")
    rule.parked("b", (1, 20))  # 20 was made at 19.5 s of 55 s
    rule.train("b")
    assert rule.spent()["redone"] == 2 * 35.5


def test_lost_waits_are_redone_and_leave_earlier_work_useful() -> None:
    rule = two_train()
    for age_s, data_share in ((0.0, 0.0), (10.0, 0.5)):
        rule.wait(10.0)
        for name in "ab":
            rule.say(name, Pace(rule.state.record.round, 10, 1.0, age_s, 0.0, data_share))
    assert rule.spent()["data_wait"] == 10.0
    rule.lose("a")
    rule.parked("b", (1, 10))
    rule.train("b")
    spent = rule.spent()
    assert (spent["useful"], spent["redone"], spent.get("data_wait", 0.0)) == (20.0, 20.0, 0.0)


def test_waits_before_the_commit_stay_waits() -> None:
    rule = two_train()
    rule.wait(10.0)
    for name in "ab":
        rule.say(name, Pace(rule.state.record.round, 10, 1.0, 4.0, 0.25, 0.5))  # made after 6 s
    rule.lose("a")
    rule.parked("b", (1, 10))
    rule.train("b")
    spent = rule.spent()
    assert (spent["redone"], spent["data_wait"], spent["commit"], spent["useful"]) == (8.0, 6.0, 3.0, 3.0)


def test_spares_and_suspended_jobs_are_idle() -> None:
    rule = two_train()
    rule.submit(Suspend(True, "me"))
    rule.boundary(9)
    rule.stopped("ab", 9, 0.1)
    before = rule.spent().get("idle", 0.0)
    rule.wait(100.0)
    assert rule.spent()["idle"] - before == 200.0


def without_a_slot() -> Accounted:
    """A slot of a node is dropped while it trains, and the next world does not use it."""
    rule = two_train()
    rule.wait(10.0)
    rule.submit(Cordon("a", True, "me", device="1"))
    rule.boundary(9)
    rule.stopped("ab", commit=9, age_s=0.1)
    rule.train("ab")
    return rule


def test_a_slot_that_the_world_does_not_use_is_idle() -> None:
    rule = without_a_slot()
    before = rule.spent()
    assert before["useful"] == 20.0
    rule.wait(100.0)
    after = rule.spent()
    assert after["useful"] - before["useful"] == 150.0
    assert after["idle"] - before.get("idle", 0.0) == 50.0


def test_after_the_end_nothing_is_counted() -> None:
    rule = two_train()
    rule.wait(4.0)
    rule.say("a", WorkersDone(rule.state.record.round))
    rule.wait(1.0)
    rule.say("b", WorkersDone(rule.state.record.round))
    assert rule.phase is Phase.ENDED
    total = rule.spent()
    assert (total["useful"], total["idle"]) == (9.0, 1.0)
    rule.wait(100.0)
    assert rule.spent() == total


def test_a_plain_script_is_useful_while_its_workers_run() -> None:
    rule = Accounted(NodeRange(1, 2))
    rule.join("a", "b")
    rule.wait(10.0)
    rule.fail("a")
    rule.wait(2.0)
    rule.ready("a", seen=1)
    rule.ready("b", seen=1)
    rule.wait(5.0)
    assert rule.spent() == {"useful": 30.0, "rendezvous": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_the_parts_of_random_histories_add_up(seed: int) -> None:
    """``Accounted`` compares after each event."""
    rng = random.Random(seed)
    rule = Accounted(NodeRange(1, 4))
    lives = dict.fromkeys("abcd", 0)
    commit = 0

    def one(name: str) -> None:
        nonlocal commit
        life = lives[name]
        entry = rule.state.nodes.get(info(name).node)
        if entry is None or entry.info.incarnation != info(name, life).incarnation:
            lives[name] = life = life + 1
            rule.feed(ev.NodeRegistered(info(name, life)))
            rule.attach(name, life=life)
            return
        number = rule.state.record.round
        commit += 1
        held = (Holding(Version(rule.state.record.era, commit)),)
        steps: list[Callable[[], object]] = [
            lambda: rule.say(
                name, Ready(number, (9000 + ord(name), 1, 2), True, held, commit_age_s=rng.random()), life
            ),
            lambda: rule.say(name, Underway(number, "in process", rng.random(), rng.random()), life),
            lambda: rule.say(
                name, Pace(number, commit, rng.random() + 0.1, rng.random(), rng.random(), rng.random()), life
            ),
            lambda: rule.say(name, Hanging(number, "a hang", 30.0), life),
            lambda: rule.feed(ev.NodeDetached(info(name).node, info(name, life).incarnation)),
            lambda: rule.attach(name, number, number if rng.random() < 0.5 else 0, life=life),
            lambda: rule.feed(ev.NodeExpired(info(name).node, info(name, life).incarnation)),
            lambda: rule.submit(Cordon(name, rng.random() < 0.5, "me", device=str(rng.randrange(SLOTS)))),
        ]
        rng.choices(steps, weights=[8, 8, 4, 1, 1, 1, 1, 2])[0]()

    for _ in range(120):
        if rule.phase is Phase.ENDED:
            break
        rule.wait(rng.choice([0.0, 0.01, 0.3, 2.0]))
        one(rng.choice("abcd"))
    assert sum(rule.times.amounts().values()) == rule.whole_ns
