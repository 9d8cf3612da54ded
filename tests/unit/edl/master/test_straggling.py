"""The Master finds stragglers among the ranks of a world, and does about them what the job wants."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edl.config import FaultTolerance, NodeRange
from edl.job_records import StragglerMode, StragglerRules
from edl.master import events as ev
from edl.master.machine import take_over
from edl.master.state import Phase
from edl.master.view import job_status
from edl.types import NodeId, Round
from edl.wire import codec
from edl.wire.alarm import Alarm
from edl.wire.messages import Alarms, Attach, Pace
from edl.wire.rank_pace import RankPace
from edl.wire.status import JobStatus
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_resizing import Resizable

WINDOWS = 3
GOOD, SLOW = 0.6, 0.1
"""Share of time that a rank waits for the others."""


class OneEach(Resizable):
    """Nodes with one slot."""

    def arrive(self, names: str, index: bool = False) -> None:
        for name in names:
            who = dataclasses.replace(info(name), slots=1)
            self.feed(ev.NodeRegistered(who))
            self.feed(ev.NodeAttached(Attach(who, Round(0), Round(0), False)))
        for name in names:
            self.parked(name, seen=0)


def job(
    names: str = "ab", mode: StragglerMode = StragglerMode.REPORT, lowest: int = 1, highest: int = 4, **more: Any
) -> Resizable:
    rule = OneEach(NodeRange(lowest, highest), FaultTolerance.ELASTIC)
    rule.spec = dataclasses.replace(rule.spec, stragglers=StragglerRules(mode, WINDOWS, **more))
    rule.state = dataclasses.replace(rule.state, spec=rule.spec)
    rule.arrive(names)
    if rule.phase is Phase.FORMING:
        rule.wait(1.0)
    rule.underway(*names)
    assert rule.members == names
    return rule


def window(rule: Resizable, **shares: float) -> list[ev.HistoryNote]:
    """Each node reports one window of its only worker; returns what is new in the history."""
    noted: list[ev.HistoryNote] = []
    number = rule.state.record.round
    for name in rule.members:
        rank = RankPace(0, 0.1, 0.2, shares.get(name, GOOD))
        rule.say(name, Pace(Round(number), 5, 0.1, ranks=(rank,)))
        noted += [one for one in rule.effects if isinstance(one, ev.HistoryNote)]
    return [one for one in noted if one.kind in (ev.Kind.ALARM, ev.Kind.ALARM_CLEARED)]


def windows(rule: Resizable, count: int = WINDOWS, **shares: float) -> list[ev.HistoryNote]:
    return [note for _ in range(count) for note in window(rule, **shares)]


def named(rule: Resizable) -> list[tuple[str, str]]:
    return [(one.node, one.about) for one in rule.state.record.alarms if one.name == "straggler"]


def test_a_straggler_is_named_in_one_line_and_cleared_in_one() -> None:
    rule = job()
    assert not windows(rule, WINDOWS - 1, b=SLOW)
    (note,) = window(rule, b=SLOW)
    assert (note.kind, note.node, note.severity) == (ev.Kind.ALARM, "b", "warning")
    assert note.text == (
        "straggler (slot 0) on b: the others wait for rank 1 for 50% of each step, cause compute: it computes 90% of "
        "the time, the others 40%. See docs/stragglers.md"
    )
    assert named(rule) == [("b", "slot 0")]
    assert not windows(rule, 5, b=SLOW)
    assert not windows(rule, WINDOWS - 1)
    (note,) = window(rule)
    assert (note.kind, named(rule)) == (ev.Kind.ALARM_CLEARED, [])


def test_nothing_is_compared_before_each_rank_has_reported() -> None:
    rule = job("abc")
    for _ in range(3 * WINDOWS):
        for name, peers in (("a", GOOD), ("b", SLOW)):
            rule.say(name, Pace(Round(1), 5, 0.1, ranks=(RankPace(0, 0.1, 0.2, peers),)))
    assert not named(rule)
    windows(rule, b=SLOW)
    assert named(rule) == [("b", "slot 0")]


def test_windows_of_another_world_are_void() -> None:
    rule = job("ab")
    windows(rule, WINDOWS - 1, b=SLOW)
    for name, peers in (("a", GOOD), ("b", SLOW)):
        rule.say(name, Pace(Round(0), 5, 0.1, ranks=(RankPace(0, 0.1, 0.2, peers),)))
    assert not named(rule)
    rule.arrive("c")
    rule.change()
    assert rule.members == "abc"
    assert not windows(rule, WINDOWS - 1, b=SLOW)
    assert window(rule, b=SLOW)


def test_the_next_master_measures_again_and_keeps_the_alarm_until_then() -> None:
    rule = job()
    windows(rule, b=SLOW)
    alarm = rule.state.record.alarms
    decision = take_over(rule.spec, rule.state.record, [entry.info for entry in rule.state.nodes.values()], 50.0)
    assert decision.state.record.alarms == alarm
    rule.state = dataclasses.replace(rule.state, straggling=decision.state.straggling)
    assert not windows(rule, WINDOWS - 1)
    assert named(rule)
    assert window(rule)
    assert not named(rule)


def test_an_alarm_about_a_node_that_is_gone_is_over() -> None:
    rule = job("abc")
    windows(rule, c=SLOW)
    assert named(rule) == [("c", "slot 0")]
    rule.feed(ev.NodeExpired(NodeId("c"), rule.state.nodes[NodeId("c")].info.incarnation))
    assert not named(rule)


def test_other_alarms_are_not_touched() -> None:
    rule = job()
    rule.say("b", Alarms((Alarm("disk-space", "logs", "warning", "1 byte free"),)))
    windows(rule, b=SLOW)
    assert [alarm.name for alarm in rule.state.record.alarms] == ["disk-space", "straggler"]
    rule.say("b", Alarms(()))
    assert [alarm.name for alarm in rule.state.record.alarms] == ["straggler"]
    rule.feed(ev.JobAlarms((Alarm("waiting", "", "critical", "long"),)))
    assert {alarm.name for alarm in rule.state.record.alarms} == {"straggler", "waiting"}
    windows(rule)
    assert [alarm.name for alarm in rule.state.record.alarms] == ["waiting"]


def test_off_means_off() -> None:
    rule = job(mode=StragglerMode.OFF)
    assert not windows(rule, 3 * WINDOWS, b=SLOW)
    assert job_status(rule.state, NodeId("a"), ()).nodes[1].ranks[0].peers_share == SLOW  # but it is shown


def test_a_master_that_does_not_look_withdraws_alarms() -> None:
    rule = job()
    windows(rule, b=SLOW)
    off = dataclasses.replace(rule.spec, stragglers=StragglerRules(StragglerMode.OFF))
    rule.state = dataclasses.replace(rule.state, spec=off)
    rule.feed(ev.Tick())
    assert not named(rule)


def test_on_request_it_is_excluded() -> None:
    rule = job("abc", StragglerMode.EXCLUDE)
    windows(rule, b=SLOW)
    (dropped,) = rule.state.record.dropped
    assert (dropped.node, dropped.slot) == ("b", 0)
    assert dropped.why.startswith("is a straggler: the others wait for rank 1")
    assert job_status(rule.state, NodeId("a"), ()).dropped[0].by == "straggler"  # no reason to deny it to other jobs
    rule.change()
    assert rule.members == "ac"
    assert not named(rule)


def test_but_never_below_the_minimum() -> None:
    rule = job("ab", StragglerMode.EXCLUDE, lowest=2)
    windows(rule, 3 * WINDOWS, b=SLOW)
    assert not rule.state.record.dropped
    assert named(rule) == [("b", "slot 0")]
    assert rule.phase is Phase.RUNNING


def test_and_later_once_there_is_a_spare() -> None:
    rule = job("ab", StragglerMode.EXCLUDE, lowest=2, highest=2)
    windows(rule, b=SLOW)
    assert not rule.state.record.dropped
    rule.arrive("c")
    assert rule.members == "ab"
    window(rule, b=SLOW)
    assert [one.node for one in rule.state.record.dropped] == ["b"]


def test_in_report_mode_it_stays() -> None:
    rule = job("abc")
    windows(rule, 3 * WINDOWS, b=SLOW)
    assert not rule.state.record.dropped


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_limit_is_that_of_the_watchdog(share: float) -> None:
    rule = job(share=share)
    windows(rule, b=SLOW)
    assert bool(named(rule)) is (share < 0.5)


def test_every_rank_is_in_the_status() -> None:
    rule = job()
    window(rule, b=SLOW)
    status = job_status(rule.state, NodeId("a"), ())
    assert [node.ranks for node in status.nodes] == [(RankPace(0, 0.1, 0.2, peers),) for peers in (GOOD, SLOW)]
    assert codec.decode(JobStatus, codec.encode(status)) == status
    rule.arrive("c")
    rule.change()
    assert not any(node.ranks for node in job_status(rule.state, NodeId("a"), ()).nodes)
