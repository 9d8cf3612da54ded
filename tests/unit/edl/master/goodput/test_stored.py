"""The accounts outlive their Master."""

from __future__ import annotations

from edl.config import NodeRange
from edl.master import events as ev
from edl.master.goodput.slot_times import NS
from edl.master.goodput.slot_use import SlotUse
from edl.master.goodput.stored import StoredSlotTimes, continued, stored
from edl.master.machine import take_over
from edl.types import Round
from edl.wire import plain
from edl.wire.messages import Attach, Pace
from tests.unit.edl.master.goodput.test_slot_times import Accounted, two_train, without_a_slot
from tests.unit.edl.master.test_machine import info

WALL_S = 1_800_000_000.0


def succeed(rule: Accounted, names: str, gap_s: float) -> None:
    """The Master dies; ``gap_s`` later another one takes over, with a clock of its own, and finds these nodes."""
    value = plain.dumps(stored(rule.times, WALL_S))
    before = sum(e.info.slots for e in rule.state.nodes.values() if e.registered)
    rule.now_s = 5.0
    decision = take_over(rule.spec, rule.state.record, [info(name) for name in names], rule.now_s)
    rule.times = continued(plain.loads(StoredSlotTimes, value), decision.state, rule.now_s, WALL_S + gap_s)
    rule.whole_ns += before * round(max(0.0, gap_s) * NS)
    assert sum(rule.times.amounts().values()) == rule.whole_ns
    rule.followed_ns = rule.times.at_ns
    rule.state, rule.effects = decision.state, decision.effects
    rule.account_take_over()


def attach(rule: Accounted, name: str, *, underway: bool = True) -> None:
    number = rule.state.record.round
    rule.feed(ev.NodeAttached(Attach(info(name), number, number, False, underway=underway)))


def test_a_world_that_trains_goes_on_training() -> None:
    rule = two_train()
    rule.wait(10.0)
    succeed(rule, "ab", gap_s=2.0)
    rule.wait(0.5)
    attach(rule, "a")
    rule.wait(0.5)
    attach(rule, "b")
    rule.wait(7.0)
    assert rule.spent()["useful"] == 2 * 20.0
    assert not rule.costs


def test_the_node_of_the_dead_master_is_lost_since_the_last_write() -> None:
    rule = two_train()
    rule.wait(10.0)
    succeed(rule, "b", gap_s=2.0)
    rule.wait(0.5)
    rule.attach("b", 1, 1)
    rule.stopped("b", commit=7, age_s=4.5)  # 2 s before the write
    rule.wait(0.5)
    rule.train("b")
    spent = rule.spent()
    assert spent["lost"] == 2.0
    assert spent["redone"] == 2.0 + 4.0
    assert spent["useful"] == 8.0 + 8.0
    (cost,) = rule.costs
    assert cost.took_s == 1.0
    assert cost.amounts[SlotUse.LOST] == 2 * 2 * NS


def test_the_next_master_knows_when_there_were_waits() -> None:
    rule = two_train()
    for age_s, data_share in ((0.0, 0.25), (10.0, 0.5)):
        rule.wait(10.0)
        for name in "ab":
            rule.say(name, Pace(rule.state.record.round, 10, 1.0, age_s, 0.0, data_share))
    succeed(rule, "ab", gap_s=0.0)
    for name in "ab":
        attach(rule, name)
    rule.lose("a")
    rule.parked("b", (1, 10))
    rule.train("b")
    spent = rule.spent()
    assert (spent["useful"], spent["redone"], spent["data_wait"]) == (15.0, 20.0, 5.0)


def test_a_change_in_progress_is_priced_from_its_beginning() -> None:
    rule = two_train()
    rule.wait(10.0)
    rule.fail("a")
    rule.wait(1.0)
    succeed(rule, "ab", gap_s=2.0)
    rule.attach("a", 1, 0)
    rule.attach("b", 1, 0)
    rule.stopped("ab", commit=7, age_s=3.5)
    rule.wait(1.0)
    rule.train("ab")
    (cost,) = rule.costs
    assert cost.took_s == 4.0
    assert cost.amounts[SlotUse.REDONE] == 4 * NS // 2


def test_a_slot_that_the_world_does_not_use_stays_idle() -> None:
    rule = without_a_slot()
    before = rule.spent()
    rule.wait(10.0)
    succeed(rule, "ab", gap_s=2.0)
    rule.wait(1.0)
    for name in "ab":
        attach(rule, name)
    rule.wait(7.0)
    after = rule.spent()
    assert after["useful"] - before["useful"] == 20.0 * 3 / 2
    assert after["idle"] - before.get("idle", 0.0) == 20.0 / 2


def test_a_wall_clock_that_was_set_back_gives_no_gap() -> None:
    rule = two_train()
    succeed(rule, "ab", gap_s=-100.0)
    assert sum(rule.times.amounts().values()) == rule.whole_ns


def test_nodes_that_are_new_begin_with_nothing() -> None:
    rule = Accounted(NodeRange(1, 3))
    rule.join("a")
    rule.wait(1.0)
    succeed(rule, "abc", gap_s=3.0)
    assert sum(rule.times.amounts().values()) == rule.whole_ns
    assert Round(1) == rule.state.record.round
