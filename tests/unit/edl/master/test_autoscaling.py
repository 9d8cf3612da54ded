"""The autoscale policy in the Master: from what agents say about their pace to another world, and its limits."""

from __future__ import annotations

from typing import Any

import pytest

from edl.config import AutoscaleRules, HyperPolicy
from edl.job_records import SchedulerChoice, SizeOwner
from edl.master import events as ev
from edl.master.machine import take_over
from edl.master.policies.autoscale import Found
from edl.master.state import Record
from edl.types import Round
from edl.wire import plain
from edl.wire.messages import Hold, Pace
from edl.wire.scale_requests import Resize, Suspend, Verdict
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_resizing import Resizable, training

RULES = AutoscaleRules(enabled=True, cooldown_s=30.0)
EXTERNAL = SchedulerChoice("statefulset", "train", owner=SizeOwner.EXTERNAL)
MASTER = SchedulerChoice("process")


def scaling(names: str = "abc", **more: Any) -> Resizable:
    return training(names, autoscale=more.pop("autoscale", RULES), **more)


def go_on(rule: Resizable, seconds: float, step_s: float = 0.1) -> None:
    """All members report their step rate until the world changes."""
    for _ in range(int(seconds / 5)):
        rule.wait(5.0)
        for name in rule.members:
            rule.say(name, Pace(Round(rule.state.record.round), 1, step_s))
            if rule.state.agreement is not None:
                return


def test_without_the_option_nothing_is_measured() -> None:
    rule = training("abc")
    go_on(rule, 300)
    assert (rule.scale.proposal, rule.scale.proposal_reason, rule.scale.desired) == (0, "", 4)


def test_what_the_last_node_brings_is_found_out_and_kept() -> None:
    rule = scaling("abc")
    assert "not measured yet" in rule.scale.proposal_reason
    go_on(rule, 20)
    assert "just begun" in rule.scale.proposal_reason or "not certain" in rule.scale.proposal_reason
    go_on(rule, 300)
    assert (
        "2 nodes requested by autoscale: 3 nodes: 60 worker steps/s; what the last one brings is unknown"
        in (rule.notes[0])
    )
    assert {type(m) for m in rule.told().values()} == {Hold}
    rule.change()
    assert (rule.members, rule.scale.desired, rule.scale.by) == ("ab", 2, "autoscale")
    assert rule.scale.observed == rule.scale.generation == 1
    go_on(rule, 300)  # as quick a step with fewer: the third brought its full share, and it stands ready
    rule.change(19)
    assert len(rule.members) == 3
    assert rule.state.record.learnt.rung(3).found is Found.GOOD
    go_on(rule, 600)
    assert rule.state.agreement is None
    assert rule.scale.proposal == 3
    assert rule.scale.proposal_reason.endswith("a 4th would be tried, but no node is available")


def test_with_a_global_batch_samples_are_counted() -> None:
    rule = scaling("abc", hyper=HyperPolicy(global_batch=300))
    go_on(rule, 40)
    assert "3000 samples/s" in rule.scale.proposal_reason


def test_a_size_by_hand_holds_until_it_is_given_back() -> None:
    rule = scaling("abc")
    assert rule.submit(Resize(3, "me")) is Verdict.ACCEPTED
    go_on(rule, 600)
    assert rule.state.agreement is None
    assert rule.scale.proposal == 2
    assert "3 nodes requested by hand: edl scale auto" in rule.scale.proposal_reason
    assert rule.submit(Resize(0, "me", auto=True)) is Verdict.ACCEPTED
    assert rule.notes[0] == "size given back to the autoscale policy by me"
    assert rule.submit(Resize(0, "me", auto=True)) is Verdict.KNOWN
    go_on(rule, 60)
    assert rule.state.agreement is not None


def test_to_ask_by_hand_for_what_the_policy_has_chosen_takes_it_over() -> None:
    rule = scaling("abc")
    go_on(rule, 300)
    rule.change()
    assert rule.state.record.sizing.automatic
    assert rule.submit(Resize(2, "me")) is Verdict.ACCEPTED
    assert not rule.state.record.sizing.automatic
    go_on(rule, 600)
    assert rule.members == "ab"


def test_without_a_policy_there_is_nobody_to_give_the_size_back_to() -> None:
    assert training("abc").submit(Resize(0, "me", auto=True)) is Verdict.REFUSED


def test_an_owner_outside_is_only_told() -> None:
    rule = scaling("abc", scheduler=EXTERNAL)
    rule.submit(Resize(3, "statefulset/train", external=True))
    assert rule.submit(Resize(0, "me", auto=True)) is Verdict.REFUSED
    go_on(rule, 300)
    assert rule.state.agreement is None
    assert rule.scale.proposal == 4
    assert "statefulset/train (external) decides" in rule.scale.proposal_reason


def test_a_scheduler_of_ours_is_asked_for_nodes() -> None:
    rule = scaling("abc", scheduler=MASTER)
    go_on(rule, 300)
    assert rule.scale.desired == 4
    assert rule.scale.waiting == "1 more node to come: 3 of 4 train"
    go_on(rule, 300)
    assert "1 more node to come" in rule.scale.proposal_reason
    assert rule.scale.desired == 4


def test_a_pace_of_another_world_or_of_a_spare_does_not_count() -> None:
    rule = scaling("abc")
    before = rule.state.scaling
    rule.say("a", Pace(Round(0), 1, 0.1))
    assert rule.state.scaling == before


def test_nothing_while_suspended() -> None:
    rule = scaling("abc")
    go_on(rule, 30)
    rule.submit(Suspend(True, "me"))
    assert rule.scale.proposal_reason == "the job is suspended"


@pytest.mark.parametrize("learnt", [True, False])
def test_what_is_known_is_in_the_record(learnt: bool) -> None:
    rule = scaling("abc")
    go_on(rule, 300 if learnt else 10)
    record = rule.state.record
    assert bool(record.learnt.rungs) is learnt
    assert plain.loads(Record, plain.dumps(record)) == record
    taken = take_over(rule.state.spec, record, [info(name) for name in "abc"], 1.0)
    assert taken.state.record.learnt == record.learnt
    assert taken.state.scaling.count == 0
    assert not [effect for effect in taken.effects if isinstance(effect, ev.TellNode)]
