"""Alarms of watchdogs in the record and the history."""

from __future__ import annotations

import dataclasses
import random

import pytest

from edl.config import NodeRange
from edl.master import alarms
from edl.master import events as ev
from edl.master.machine import take_over
from edl.master.view import job_status
from edl.types import NodeId
from edl.wire.alarm import Alarm
from edl.wire.messages import Alarms
from tests.unit.edl.master.test_machine import Rule, info, pair

FULL = Alarm("disk-space", "log directory /l", "critical", "1 GiB free")
SHARED = Alarm("disk-space", "checkpoint directory /c", "critical", "2 GiB free", shared=True)
WAITING = Alarm("waiting", "", "critical", "for 5 min")


def notes(rule: Rule) -> list[tuple[str, str, str, str]]:
    found = [one for one in rule.effects if isinstance(one, ev.HistoryNote) and one.kind.value.startswith("alarm")]
    return [(one.kind.value, one.node, one.severity, one.text) for one in found]


def texts(rule: Rule) -> list[str]:
    return [text for _, _, _, text in notes(rule)]


def succeed(rule: Rule, names: str) -> None:
    decision = take_over(rule.spec, rule.state.record, [info(name) for name in names], rule.now_s)
    rule.state, rule.effects = decision.state, decision.effects


def test_a_nodes_alarm_is_noted_once_and_cleared_once() -> None:
    rule = pair()
    reason = rule.state.reason
    rule.say("b", Alarms((FULL,)))
    assert notes(rule) == [("alarm", "b", "critical", "disk-space (log directory /l) on b: 1 GiB free")]
    assert rule.state.reason == reason, "it explains no decision"
    rule.say("b", Alarms((FULL,)))
    assert notes(rule) == []
    assert job_status(rule.state, NodeId("a"), ()).alarms == (dataclasses.replace(FULL, node="b"),)
    rule.say("b", Alarms(()))
    assert notes(rule) == [("alarm-cleared", "b", "critical", "disk-space (log directory /l) on b: no longer")]
    assert job_status(rule.state, NodeId("a"), ()).alarms == ()


def test_a_shared_alarm_is_noted_once_and_lasts_while_one_node_has_it() -> None:
    rule = pair()
    rule.say("b", Alarms(()))
    rule.say("a", Alarms((SHARED,)))
    assert texts(rule) == ["disk-space (checkpoint directory /c): 2 GiB free"]
    rule.say("b", Alarms((SHARED,)))
    assert texts(rule) == []
    rule.say("a", Alarms(()))
    assert texts(rule) == []
    rule.say("b", Alarms(()))
    assert texts(rule) == ["disk-space (checkpoint directory /c): no longer"]


def test_the_next_master_neither_repeats_nor_forgets() -> None:
    rule = pair()
    rule.say("b", Alarms((FULL, SHARED)))
    rule.feed(ev.JobAlarms((WAITING,)))
    assert len(rule.state.record.alarms) == 3
    succeed(rule, "ab")
    assert texts(rule) == [] and len(rule.state.record.alarms) == 3
    rule.attach("a", seen=1, running=1)
    rule.say("a", Alarms(()))
    rule.attach("b", seen=1, running=1)
    assert texts(rule) == [], "b has not reported yet"
    rule.say("b", Alarms((FULL,)))
    assert texts(rule) == ["disk-space (checkpoint directory /c): no longer"]
    rule.feed(ev.JobAlarms((WAITING,)))
    assert texts(rule) == []
    rule.feed(ev.JobAlarms(()))
    assert texts(rule) == ["waiting: no longer"]


def test_a_lost_node_takes_its_alarms_with_it() -> None:
    rule = pair()
    rule.say("b", Alarms((FULL,)))
    rule.lose("b")
    assert notes(rule) == []
    assert rule.state.record.alarms == ()


def test_a_worse_alarm_is_noted_again() -> None:
    rule = pair()
    rule.feed(ev.JobAlarms((dataclasses.replace(WAITING, severity="warning"),)))
    rule.feed(ev.JobAlarms((WAITING,)))
    assert notes(rule) == [("alarm", "", "critical", "waiting: for 5 min")]


def test_an_ended_job_has_no_new_alarms() -> None:
    rule = pair()
    rule.feed(ev.Failed("the data is gone"))
    for name in "ab":
        rule.ready(name, seen=1)
    assert rule.state.record.outcome is not None
    rule.feed(ev.JobAlarms((WAITING,)))
    rule.say("b", Alarms((FULL,)))
    assert rule.state.record.alarms == ()


def test_the_record_stays_small() -> None:
    rule = pair()
    many = tuple(dataclasses.replace(FULL, about=f"directory {number}") for number in range(100))
    rule.say("b", Alarms(many))
    assert len(rule.state.record.alarms) == len(notes(rule)) == alarms.MOST_ALARMS
    rule.say("b", Alarms(many[90:]))
    assert {one.about for one in rule.state.record.alarms} == {one.about for one in many[90:]}


@pytest.mark.parametrize("seed", range(100))
def test_history_and_reports_agree_across_masters(seed: int) -> None:
    """What the history says, entry by entry, is what the nodes have reported."""
    random_, names = random.Random(seed), "abc"
    rule = Rule(NodeRange(1, 3))
    rule.join(*names)
    possible = (FULL, SHARED, dataclasses.replace(FULL, about="synchronised directory /s", severity="warning"))
    noted: set[tuple[str, str]] = set()
    reported: dict[str, tuple[Alarm, ...]] = dict.fromkeys(names, ())
    for name in names:
        rule.say(name, Alarms(()))
    for _ in range(30):
        if random_.random() < 0.2:
            succeed(rule, names)
            for name in names:
                rule.attach(name, seen=rule.state.record.round, running=rule.state.record.round)
                rule.say(name, Alarms(reported[name]))
                noted = follow(noted, rule)
        name = random_.choice(names)
        reported[name] = tuple(alarm for alarm in possible if random_.random() < 0.4)
        rule.say(name, Alarms(reported[name]))
        noted = follow(noted, rule)
        expected = {("" if a.shared else n, a.about) for n, found in reported.items() for a in found}
        assert noted == expected


def follow(noted: set[tuple[str, str]], rule: Rule) -> set[tuple[str, str]]:
    """Apply the notes of the last step; none of them says what was known."""
    noted = set(noted)
    for kind, node, _, text in notes(rule):
        key = node, text.partition("(")[2].partition(")")[0]
        assert (key in noted) == (kind == "alarm-cleared")
        noted ^= {key}
    return noted


def test_an_alarm_of_the_job_has_room_however_many_nodes_have_one() -> None:
    """It is reported once: its watchdog would not repeat it when there is room again."""
    rule = pair()
    rule.say("b", Alarms(tuple(dataclasses.replace(FULL, about=f"d{number}") for number in range(200))))
    rule.feed(ev.JobAlarms((WAITING,)))
    assert texts(rule) == ["waiting: for 5 min"]
    rule.feed(ev.JobAlarms(()))
    assert texts(rule) == ["waiting: no longer"]
    rule.say("b", Alarms(()))
    assert rule.state.record.alarms == ()
