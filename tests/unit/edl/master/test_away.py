"""Nodes that return after they were lost or have left."""

from __future__ import annotations

import dataclasses

import pytest

from edl.config import NodeRange
from edl.job_records import HealthMode, HealthRules
from edl.master import events as ev
from edl.master.away import KEPT
from edl.master.state import Away, Phase
from edl.types import NodeId, Round
from edl.wire.messages import Dismissed, Leaving, Ready
from edl.wire.scale_requests import Suspend
from tests.unit.edl.master.test_machine import Rule, info, pair
from tests.unit.edl.master.test_resizing import Resizable, training


def notes(rule: Rule) -> list[ev.HistoryNote]:
    """The notes of the last step about nodes that have come."""
    kinds = (ev.Kind.NODE_JOINED, ev.Kind.NODE_RETURNED)
    return [one for one in rule.effects if isinstance(one, ev.HistoryNote) and one.kind in kinds]


def come(rule: Rule, name: str, life: int = 1) -> list[ev.HistoryNote]:
    rule.feed(ev.NodeRegistered(info(name, life)))
    rule.attach(name, life=life)
    rule.ready(name, life=life)
    return notes(rule)


def back(name: str, away: str) -> list[ev.HistoryNote]:
    text = f"node {name} is ready with 2 slots; it was away for {away}"
    return [ev.HistoryNote(ev.Kind.NODE_RETURNED, text, name)]


def joined(name: str) -> list[ev.HistoryNote]:
    return [ev.HistoryNote(ev.Kind.NODE_JOINED, f"node {name} is ready with 2 slots", name)]


def test_a_lost_node_that_is_ready_again_has_returned() -> None:
    rule = pair()
    rule.lose("b")
    rule.wait(6.5)
    assert come(rule, "b") == back("b", "6.5 s")


def test_so_has_a_node_that_had_left_and_its_time_counts_from_its_dismissal() -> None:
    rule = pair()
    rule.say("b", Leaving("SIGTERM"))
    rule.wait(2.0)
    rule.lose("b")
    rule.wait(1.0)
    assert come(rule, "b") == back("b", "3.0 s")


def test_a_launcher_that_replaces_a_living_one_returns_when_it_is_ready() -> None:
    rule = pair()
    rule.feed(ev.NodeRegistered(info("b", life=1)))
    rule.attach("b", life=1)
    rule.now_s += 4.0
    rule.ready("b", life=1)
    assert notes(rule) == back("b", "4.0 s")


def test_another_name_is_a_new_node() -> None:
    rule = pair()
    rule.lose("b")
    assert come(rule, "c") == joined("c")


def test_a_dismissed_launcher_that_attaches_again_has_not_returned() -> None:
    rule = pair()
    rule.join("c")
    rule.say("c", Leaving("SIGTERM"))
    rule.attach("c")
    rule.ready("c")
    assert notes(rule) == joined("c")


def test_a_node_returns_once_per_absence() -> None:
    rule = Rule(NodeRange(1, 3))
    rule.join("a", "b", "c")
    for life in (1, 2):
        rule.feed(ev.NodeExpired(NodeId("c"), info("c", life - 1).incarnation))
        rule.wait(1.0)
        assert come(rule, "c", life) == back("c", "1.0 s")
        assert not rule.state.record.away
        assert not rule.state.away_s


def test_under_the_next_master_the_least_time_is_known() -> None:
    before = pair()
    before.lose("b")
    before.wait(5.0)
    rule = Rule(NodeRange(1, 2), record=before.state.record, present="a")
    rule.now_s += 2.0
    assert come(rule, "b") == back("b", "at least 2.0 s")


def test_members_lost_while_the_job_had_no_master_return_too() -> None:
    rule = Rule(NodeRange(1, 2), record=pair().state.record, present="a")
    rule.attach("a", seen=1, running=1)
    rule.now_s += 2.0
    assert come(rule, "b") == back("b", "at least 2.0 s")


def test_a_node_that_drains_is_away_once_it_is_dismissed() -> None:
    rule = training("abc")
    rule.say("c", Leaving("SIGTERM", grace_s=30.0))
    rule.wait(2.0)
    assert not rule.state.record.away, "it trains until the others have a world without it"
    rule.change()
    assert rule.members == "ab"
    assert isinstance(rule.told()["c"], Dismissed)
    rule.lose("c")
    rule.wait(1.5)
    rule.feed(ev.NodeRegistered(info("c", 1)))
    rule.attach("c", life=1)
    rule.say("c", Ready(Round(0), (1, 2, 3), True), life=1)
    assert [one.text for one in notes(rule)] == [
        "node c is ready with 2 slots, its workers wait; it was away for 1.5 s"
    ]


@pytest.mark.parametrize("event", [ev.NodeRefused, ev.NodeExpired])
def test_a_node_that_was_dismissed_by_an_earlier_master_is_not_lost(
    event: type[ev.NodeRefused] | type[ev.NodeExpired],
) -> None:
    """It exits before it attaches to the next Master, as when the Master's node is drained with it."""
    before = training("abc")
    before.say("c", Leaving("edl drain", grace_s=30.0))
    before.change()
    assert isinstance(before.told()["c"], Dismissed)
    health = HealthRules(HealthMode.FAILURE)
    rule = Rule(NodeRange(1, 3), record=before.state.record, present="abc", health=health)
    rule.feed(event(NodeId("c"), info("c").incarnation))
    assert NodeId("c") not in rule.state.nodes
    assert [one for one in rule.effects if isinstance(one, ev.HistoryNote)] == []
    assert not rule.state.record.health.suspects, "nor is it suspected"


def test_nor_is_a_failure_excused_because_it_exits() -> None:
    """It was dismissed for want of nodes, while the next world was forming after a failure that was charged."""
    before = training("abc")
    before.fail("a")
    record = dataclasses.replace(before.state.record, away=(Away(NodeId("c"), info("c").incarnation),))
    assert (record.phase, record.charged, record.restarts) == (Phase.FORMING, True, 1)
    rule = Rule(NodeRange(1, 3), record=record, present="abc")
    rule.feed(ev.NodeExpired(NodeId("c"), info("c").incarnation))
    assert NodeId("c") not in rule.state.nodes
    assert (rule.state.record.charged, rule.state.record.restarts) == (True, 1)
    assert "lost" not in rule.state.record.reason


def test_the_members_of_a_world_are_not_away() -> None:
    """A node that is ready while the job is suspended is not noted, and joins the next world all the same."""
    rule = Resizable(NodeRange(1, 2))
    rule.join("a", "b")
    rule.submit(Suspend(True, "me"))
    rule.ready("a", 1)
    rule.lose("b")
    assert come(rule, "b") == []
    assert rule.state.record.away
    rule.submit(Suspend(False, "me"))
    assert rule.members == "ab"
    assert not rule.state.record.away


def test_the_record_of_an_ended_job_does_not_change() -> None:
    rule = pair(restarts=0)
    rule.feed(ev.NodeRegistered(info("c")))
    rule.fail("a")
    for name in "ab":
        rule.ready(name, seen=1)
    assert rule.state.record.phase is Phase.ENDED
    record = rule.state.record
    rule.lose("c")
    assert rule.state.record == record


def test_only_the_latest_are_remembered() -> None:
    rule = Rule(NodeRange(1, 1))
    rule.join("a")
    for number in range(KEPT + 2):
        name = chr(1000 + number)
        rule.join(name)
        rule.lose(name)
    away = [one.node for one in rule.state.record.away]
    assert away == [chr(1002 + number) for number in range(KEPT)]
    assert set(rule.state.away_s) == set(away)
