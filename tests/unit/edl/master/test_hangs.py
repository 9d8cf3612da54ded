"""Hangs under a learnt limit: the round is restarted only if no node shows a sign of life."""

from __future__ import annotations

import dataclasses

from edl.master import events as ev
from edl.master.incidents import LIFELESS_S
from edl.master.machine import step_all
from edl.master.policies import slots
from edl.master.state import Phase
from edl.master.view import job_status
from edl.types import NodeId, Rank, Round
from edl.wire.alarm import Alarm
from edl.wire.messages import Alarms, Hanging, HangLimit, StopRound, WorkersDone
from edl.wire.records import Failure
from tests.unit.edl.master.test_machine import Rule, info, pair


def hung(node: str, rank: int) -> Failure:
    return Failure(NodeId(node), Round(1), Rank(rank), 0, 0, "made no progress for 300 s", traceback="the stacks")


def lifeless(node: str, rank: int, number: int = 1) -> Hanging:
    return Hanging(Round(number), "local ranks 0, 1: no CPU time used", 300.0, learnt=True, workers=(hung(node, rank),))


def stopped(rule: Rule) -> bool:
    return rule.state.record.phase is Phase.FORMING


def test_one_node_of_two_is_not_enough() -> None:
    rule = pair()
    for _ in range(5):
        rule.say("b", lifeless("b", 2))
        rule.wait(10.0)
    assert not stopped(rule) and rule.state.record.restarts == 0


def test_all_nodes_together_are_with_all_their_stacks() -> None:
    rule = pair()
    rule.say("b", lifeless("b", 2))
    rule.wait(10.0)
    rule.say("a", lifeless("a", 0))
    assert stopped(rule) and rule.state.record.restarts == 1
    assert rule.state.record.reason == (
        "local ranks 0, 1: no CPU time used on a, and 1 other node without a sign of life; restart 1 of 1"
    )
    assert [(one.rank, one.traceback) for one in rule.state.record.failures] == [(0, "the stacks"), (2, "the stacks")]
    told = rule.told()["a"]
    assert isinstance(told, StopRound) and told.dump


def test_the_suspicion_is_in_the_history_before_the_restart_even_if_both_come_together() -> None:
    rule = pair()
    rule.say("b", WorkersDone(Round(1)))
    said = (Alarms((Alarm("hang", text="the workers may hang"),)), lifeless("a", 0))
    events = [ev.NodeSaid(NodeId("a"), info("a").incarnation, message) for message in said]
    decision = step_all(rule.state, events, rule.now_s)
    noted = [effect.kind for effect in decision.effects if isinstance(effect, ev.HistoryNote)]
    assert noted[:2] == [ev.Kind.ALARM, ev.Kind.WORKER_FAILED]


def test_a_report_that_is_not_repeated_is_over() -> None:
    rule = pair()
    rule.say("b", lifeless("b", 2))
    rule.wait(LIFELESS_S + 1.0)
    rule.say("a", lifeless("a", 0))
    assert not stopped(rule)
    rule.say("b", lifeless("b", 2))
    assert stopped(rule)


def test_a_node_whose_workers_have_ended_is_not_waited_for() -> None:
    rule = pair()
    rule.say("b", WorkersDone(Round(1)))
    rule.say("a", lifeless("a", 0))
    assert stopped(rule)


def test_reports_about_another_round_do_not_count() -> None:
    rule = pair()
    rule.say("b", lifeless("b", 2, number=0))
    rule.say("a", lifeless("a", 0))
    assert not stopped(rule)


def test_a_given_limit_needs_one_node_and_keeps_its_stacks() -> None:
    rule = pair()
    rule.say("a", Hanging(Round(1), "local rank 0: no commit() for 30 s", 30.0, workers=(hung("a", 0),)))
    assert stopped(rule)
    assert rule.state.record.reason == "local rank 0: no commit() for 30 s on a; restart 1 of 1"
    assert [one.rank for one in rule.state.record.failures] == [0]


def test_a_worker_that_hung_gets_no_strike() -> None:
    """It may only have waited for the one that is to blame."""
    assert slots.culprit([hung("a", 0)]) is None
    failed = dataclasses.replace(hung("a", 0), exit_code=3)
    assert slots.culprit([failed, hung("b", 2)]) == failed


def test_the_status_shows_what_each_node_has_learnt() -> None:
    rule = pair()
    rule.say("a", HangLimit(312.0, 40, 20))
    seen = job_status(rule.state, NodeId("a"), ())
    assert seen.hang_timeout == "auto"
    assert {node.node: (node.hang_limit_s, node.hang_pauses, node.hang_needed) for node in seen.nodes} == {
        "a": (312.0, 40, 20),
        "b": (0.0, 0, 0),
    }
