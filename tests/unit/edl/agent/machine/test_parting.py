"""Use of the remaining time: which node writes, and what a leaving node still does."""

from __future__ import annotations

import dataclasses

import pytest

from edl.agent.machine.events import Interrupted, Noticed
from edl.agent.machine.leaving import saving_time_s
from edl.agent.machine.state import Outcome
from edl.config import NodeRange
from edl.types import Round
from edl.wire.messages import Depart, Dismissed, Kept, Leaving, Pace
from edl.wire.purpose import Purpose
from edl.wire.records import Holding, Version
from edl.wire.scale_requests import DrainMode
from tests.unit.edl.agent.machine.test_leaving import DRAINED, settled
from tests.unit.edl.agent.machine.test_leaving import outcome as outcome_of
from tests.unit.edl.agent.machine.test_machine import ended
from tests.unit.edl.agent.machine.test_rounds import training as worker_node
from tests.unit.edl.master.test_resizing import Resizable, training


def measured(names: str = "abc", step_s: float = 1.0, save_s: float = 4.0) -> Resizable:
    rule = training(names)
    for name in names:
        rule.say(name, Pace(Round(1), 5, step_s))
    rule.say("a", Kept(Version(1, 5), "dir", took_s=save_s))
    return rule


def dismissed(rule: Resizable, name: str) -> Dismissed:
    """The message to a leaving node once the next world is underway."""
    members = rule.members
    assert rule.boundary() is Purpose.SWITCH
    rule.park(members)
    for member in rule.members:
        rule.underway(member)
    (message,) = [one for one in rule.sent(name) if isinstance(one, Dismissed)]
    return message


def test_enough_time_the_one_that_leaves_writes() -> None:
    rule = measured()
    rule.say("b", Leaving("SIGTERM", 4.5))  # 9 s in all: one step and two checkpoints
    assert dismissed(rule, "b").save
    assert rule.state.agreement is None, "nothing is owed"


def test_too_little_those_who_hold_a_copy_write_and_the_doomed_does_nothing() -> None:
    rule = measured()
    rule.say("b", Leaving("spot instance-action", 4.0))
    message = dismissed(rule, "b")
    assert not message.save and not message.needed
    assert rule.state.agreement is not None
    assert (rule.state.agreement.purpose, rule.state.agreement.reason) == (
        Purpose.SAVE,
        "node b left without time for a checkpoint",
    )
    assert rule.members == "ac"
    assert rule.boundary(20) is Purpose.SAVE
    assert rule.state.record.owed == "" and rule.state.agreement is None, "once"


def test_nothing_is_known_of_saving_so_it_tries() -> None:
    rule = training("abc")
    rule.say("b", Leaving("SIGTERM", 0.1))
    assert dismissed(rule, "b").save


def test_a_sharded_state_is_written_by_whoever_has_a_part() -> None:
    rule = measured()
    parts = {node: entry._replace(holdings=(Holding(Version(1, 5), 0, 3),)) for node, entry in rule.state.nodes.items()}
    rule.state = dataclasses.replace(rule.state, nodes=parts)
    rule.say("b", Leaving("spot", 0.1))
    assert dismissed(rule, "b").save


def test_the_last_two_and_one_goes_in_a_hurry_the_job_needs_it() -> None:
    """No world without it: nobody trains meanwhile, so it may as well write."""
    rule = training("ab", NodeRange(2, 4))
    rule.say("a", Kept(Version(1, 5), "dir", took_s=4.0))
    rule.say("b", Leaving("spot", 0.5))
    assert rule.boundary() is Purpose.SWITCH
    rule.park("ab")
    (message,) = [one for one in rule.sent("b") if isinstance(one, Dismissed)]
    assert (message.needed, message.save) == (True, True)


# --- the node --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "save", "saves"), [(DrainMode.TRY, True, True), (DrainMode.TRY, False, False), (DrainMode.NO, True, False)]
)
def test_it_saves_unless_one_of_them_says_no(mode: DrainMode, save: bool, saves: bool) -> None:
    node = settled(worker_node()).hear(Depart("maintenance", 20.0, mode))
    assert node.state.gone_by_s == node.now_s + 20.0
    node.hear(Dismissed("the others go on", save=save)).feed(ended(0, 0), ended(1, 0))
    assert (outcome_of(node).exit_code, outcome_of(node).save) == (DRAINED, saves)


def test_the_shortest_deadline_counts_and_a_plain_signal_names_none() -> None:
    node = settled(worker_node()).feed(Interrupted(15, again=False))
    assert node.state.gone_by_s is None
    node.feed(Noticed("AWS", 120.0))
    assert node.state.gone_by_s == node.now_s + 120.0
    node.feed(Noticed("AWS again", 30.0), Noticed("and later", 90.0))
    assert node.state.gone_by_s == node.now_s + 30.0


@pytest.mark.parametrize(
    ("outcome", "gone_by_s", "left_s"),
    [
        (Outcome(0, "all workers ended with status 0"), None, 0.0),
        (Outcome(0, "left", drained=True), None, 600.0),
        (Outcome(0, "left", drained=True), 60.0, 10.0),
        (Outcome(0, "left", drained=True), 40.0, 0.0),
        (Outcome(0, "left", drained=True, save=False), None, 0.0),
        (Outcome(143, "left"), None, 600.0),
        (Outcome(1, "a worker failed"), None, 600.0),
        (Outcome(1, "a worker failed"), 5000.0, 600.0),
        (Outcome(10, "all workers ended with status 0; one file was left out"), None, 0.0),
        (Outcome(143, "left", save=False), 60.0, 0.0),
    ],
)
def test_time_to_save(outcome: Outcome, gone_by_s: float | None, left_s: float) -> None:
    assert saving_time_s(outcome, gone_by_s, now_s=50.0, limit_s=600.0) == left_s
