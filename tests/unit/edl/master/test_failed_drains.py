"""Nodes that were to leave after a checkpoint stay if it cannot be written; the history says so by kind and node."""

from __future__ import annotations

import pytest

from edl.config import NodeRange
from edl.master import events as ev
from edl.master.machine import take_over
from edl.master.view import job_status
from edl.types import NodeId, Round
from edl.wire.messages import Attach, Depart, Kept
from edl.wire.purpose import Purpose
from edl.wire.records import Version
from edl.wire.scale_requests import Drain, DrainMode
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_resizing import Resizable, training


def drain_notes(rule: Resizable) -> list[ev.HistoryNote]:
    kinds = (ev.Kind.DRAIN, ev.Kind.DRAIN_FAILED)
    return [one for one in rule.effects if isinstance(one, ev.HistoryNote) and one.kind in kinds]


@pytest.mark.parametrize(
    ("nodes", "by", "asked", "who", "node"),
    [
        ("c", "me", "drain of c requested by me", "c stays", "c"),
        ("cd", "", "drain of c, d requested by a client that gave no name", "c, d stay", ""),
    ],
)
def test_with_care_and_a_checkpoint_that_fails_they_stay(nodes: str, by: str, asked: str, who: str, node: str) -> None:
    rule = training("abcd")
    rule.submit(Drain(tuple(nodes), by, mode=DrainMode.MUST))
    assert drain_notes(rule) == [ev.HistoryNote(ev.Kind.DRAIN, asked)]
    rule.boundary(9)
    rule.say("a", Kept(Version(1, 9), "dir", error="disk full"))
    text = f"{who}: the checkpoint could not be written (disk full)"
    assert drain_notes(rule) == [ev.HistoryNote(ev.Kind.DRAIN_FAILED, text, node)]
    assert (rule.state.record.departing, rule.state.agreement) == ((), None)


@pytest.mark.parametrize("late", [9, 20])
def test_a_checkpoint_that_is_complete_while_there_is_no_master_is_not_waited_for(late: int) -> None:
    """Nobody repeats the report, and the next checkpoint may be hours away. The first one counts as well, if it is not
    complete yet."""
    rule = training("abc")
    rule.submit(Drain(("c",), "me", mode=DrainMode.MUST))
    assert rule.boundary(9) is Purpose.SAVE
    rule.state = take_over(rule.spec, rule.state.record, [info(name) for name in "abc"], rule.now_s).state
    for name in "abc":
        rule.feed(ev.NodeAttached(Attach(info(name), Round(1), Round(1), False, underway=True)))
    assert rule.boundary(20) is Purpose.SAVE
    rule.wait(1.0)
    assert rule.state.agreement is None, "one is enough"
    rule.say("a", Kept(Version(1, late), "dir"))
    assert isinstance(rule.sent("c")[0], Depart)
    assert rule.state.nodes[NodeId("c")].orders.depart


def test_after_the_end_of_the_job_nobody_stays() -> None:
    rule = training("abc")
    rule.submit(Drain(("c",), "me", mode=DrainMode.MUST))
    rule.boundary(9)
    rule.feed(ev.Failed("nothing is left to read"))
    record = rule.state.record
    assert record.departing
    rule.say("a", Kept(Version(1, 9), "dir", error="disk full"))
    assert (rule.state.record, drain_notes(rule)) == (record, [])


def test_what_a_master_has_heard_of_a_checkpoint_the_next_one_knows() -> None:
    rule = training("abc")
    rule.submit(Drain(("c",), "me", mode=DrainMode.MUST))
    assert rule.boundary(9) is Purpose.SAVE
    rule.feed(ev.NodeDetached(NodeId("c"), info("c").incarnation))
    rule.say("a", Kept(Version(1, 9), "dir"))
    rule.state = take_over(rule.spec, rule.state.record, [info(name) for name in "abc"], rule.now_s).state
    assert job_status(rule.state, NodeId("a"), ()).saved == Version(1, 9)
    for name in "abc":
        rule.feed(ev.NodeAttached(Attach(info(name), Round(1), Round(1), False, underway=True)))
    assert isinstance(rule.sent("c")[0], Depart)
    rule.say("a", Kept(Version(1, 8), "dir"))
    assert rule.state.record.saved == Version(1, 9)


@pytest.mark.parametrize(("nodes", "next_world"), [("abc", "ac"), ("abcd", "ad")])
def test_without_enough_others_they_train_on_until_a_checkpoint_is_complete(nodes: str, next_world: str) -> None:
    rule = training(nodes, NodeRange(2, 4))
    rule.submit(Drain(("c",), "me", mode=DrainMode.MUST))
    assert rule.boundary(8) is Purpose.SAVE
    rule.lose("b")
    rule.park(nodes.replace("b", ""), 7)
    assert (rule.members, rule.state.record.round) == (next_world, 2)
    rule.underway(*next_world)
    assert rule.boundary(9) is Purpose.SAVE
    assert not any(isinstance(message, Depart) for message in rule.sent("c"))
    rule.say("a", Kept(Version(2, 9), "dir"))
    assert isinstance(rule.sent("c")[0], Depart)


def test_once_it_is_complete_they_leave_however_many_others_are_there() -> None:
    rule = training("abc", NodeRange(2, 4))
    rule.submit(Drain(("c",), "me", mode=DrainMode.MUST))
    rule.boundary(8)
    rule.lose("b")
    rule.park("a", 8)
    rule.say("a", Kept(Version(1, 8), "dir"))
    rule.park("c", 8)
    assert rule.state.record.round == 1
    assert "1 node ready, at least 2 needed" in rule.reason
