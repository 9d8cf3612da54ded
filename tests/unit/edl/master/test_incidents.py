"""Failures that only report a lost peer wait for the failure that caused them."""

from __future__ import annotations

import dataclasses

import pytest

from edl.job_records import Training
from edl.master import events as ev
from edl.master import incidents
from edl.master.incidents import CAUSE_WAIT_S, MAX_FAILURES_KEPT
from edl.master.state import Phase
from edl.types import NodeId, Rank, Round
from edl.wire.messages import Hanging, Leaving, StopRound, WorkerFailed, WorkersDone
from edl.wire.records import Failure
from tests.unit.edl.master.test_machine import Rule, pair


def report(rule: Rule, node: str, slot: int, *, peer_loss: bool = False, final: int = 0) -> None:
    rank = slot if node == "a" else 2 + slot
    what = f"ended with exit status {1 if peer_loss else 3}"
    failure = Failure(NodeId(node), Round(1), Rank(rank), slot, 1, what, peer_loss=peer_loss, slot=slot, final=final)
    rule.say(node, WorkerFailed(failure))


def notes(rule: Rule) -> list[str]:
    return [effect.text for effect in rule.effects if isinstance(effect, ev.HistoryNote)]


def ranks(rule: Rule) -> list[int]:
    return [failure.rank for failure in rule.state.record.failures]


def test_the_world_runs_until_the_peers_own_end_is_reported() -> None:
    rule = pair()
    report(rule, "a", 0, peer_loss=True)
    assert (rule.state.record.phase, rule.state.record.restarts, rule.told()) == (Phase.RUNNING, 0, {})
    assert ev.WakeAt(rule.now_s + CAUSE_WAIT_S) in rule.effects
    report(rule, "b", 0, peer_loss=True)
    report(rule, "b", 1)
    assert {name: type(message) for name, message in rule.told().items()} == {"a": StopRound, "b": StopRound}
    assert rule.state.record.reason == "worker 3 on b ended with exit status 3; restart 1 of 1"
    assert rule.state.record.restarts == 1
    assert ranks(rule) == [0, 2, 3]
    assert notes(rule) == [
        "2 workers ended that had lost a peer: 0 on a, 2 on b",
        "worker 3 on b ended with exit status 3; restart 1 of 1",
    ]


def test_a_single_consequence_is_noted_with_its_end() -> None:
    rule = pair()
    report(rule, "a", 0, peer_loss=True)
    report(rule, "b", 1)
    assert notes(rule)[0] == "worker 0 on a ended with exit status 1 (it had lost a peer)"


def test_a_failure_of_its_own_stops_the_world_at_once() -> None:
    rule = pair()
    report(rule, "a", 0)
    assert (rule.state.record.phase, rule.state.record.restarts) == (Phase.FORMING, 1)


def test_the_wait_for_a_cause_is_bounded() -> None:
    rule = pair()
    report(rule, "a", 0, peer_loss=True)
    rule.wait(CAUSE_WAIT_S / 2)
    report(rule, "b", 0, peer_loss=True)
    assert rule.state.record.phase is Phase.RUNNING
    rule.wait(CAUSE_WAIT_S / 2)
    assert (rule.state.record.phase, rule.state.record.restarts) == (Phase.FORMING, 1)
    assert rule.state.record.reason == "worker 0 on a ended with exit status 1; restart 1 of 1"


@pytest.mark.parametrize("done", [False, True])
def test_once_all_workers_have_ended_nothing_is_waited_for(done: bool) -> None:
    rule = pair()
    report(rule, "a", 0, peer_loss=True)
    if done:
        rule.say("b", WorkersDone(Round(1)))
    else:
        report(rule, "b", 0, peer_loss=True)
        report(rule, "b", 1, peer_loss=True)
    assert rule.state.record.phase is Phase.RUNNING
    report(rule, "a", 1, peer_loss=True)
    assert (rule.state.record.phase, rule.state.record.restarts) == (Phase.FORMING, 1)


def test_a_repeated_report_counts_once() -> None:
    rule = pair()
    report(rule, "a", 0, peer_loss=True)
    report(rule, "a", 0, peer_loss=True)
    assert len(rule.state.held) == 1
    report(rule, "a", 1)
    report(rule, "a", 0, peer_loss=True)
    assert ranks(rule) == [0, 1]


@pytest.mark.parametrize("ends", ["lost", "leaves", "hangs"])
def test_another_reason_to_stop_takes_the_held_failures_with_it(ends: str) -> None:
    rule = pair()
    report(rule, "a", 0, peer_loss=True)
    if ends == "lost":
        rule.lose("b")
    elif ends == "leaves":
        rule.say("b", Leaving("SIGTERM"))
    else:
        rule.say("b", Hanging(Round(1), "worker 2 has been in step 7 for 60 s"))
    assert rule.state.record.phase is Phase.FORMING
    assert rule.state.record.restarts == (1 if ends == "hangs" else 0)
    assert (ranks(rule), rule.state.held) == ([0], ())
    assert "also worker 0 on a ended with exit status 1" in notes(rule)


def test_a_failure_is_not_added_to_the_incident_of_an_earlier_world() -> None:
    rule = pair(restarts=5)
    report(rule, "a", 0)
    rule.ready("a", seen=1)
    rule.ready("b", seen=1)
    assert (rule.state.record.round, ranks(rule)) == (2, [0])
    rule.lose("b")
    rule.fail("a", peer_loss=True, round=2)
    assert [failure.round for failure in rule.state.record.failures] == [2]


def test_workers_that_are_independent_have_no_peers_to_wait_for() -> None:
    rule = pair()
    with_servers = dataclasses.replace(rule.spec, servers=Training())
    rule.state = dataclasses.replace(rule.state, spec=with_servers)
    report(rule, "a", 0, peer_loss=True)
    assert rule.state.record.phase is Phase.FORMING


def test_of_many_failures_the_last_consequences_go_first_and_then_the_last_of_the_others() -> None:
    what = "ended with exit status 3"
    many = tuple(Failure(NodeId("a"), Round(1), Rank(n), n, 3, what, peer_loss=n in (0, 20, 21)) for n in range(22))
    assert [one.rank for one in incidents._kept(many)] == list(range(1, 1 + MAX_FAILURES_KEPT))
    assert [one.rank for one in incidents._kept(many[10:])] == list(range(10, 22))
    assert [one.rank for one in incidents._kept((many[0], *many[10:]))] == [0, *range(10, 21)]
