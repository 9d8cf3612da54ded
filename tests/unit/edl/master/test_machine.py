"""The Master, event by event. Every step is also checked for contradictions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from edl.config import FaultTolerance, HyperPolicy, JobSpec, NodeRange, Timeouts
from edl.exit_codes import ExitCode
from edl.job_records import HealthRules
from edl.master import events as ev
from edl.master.incidents import CAUSE_WAIT_S
from edl.master.invariants import state_violations, step_violations
from edl.master.machine import absent, step, take_over
from edl.master.state import MasterState, NodeStatus, Phase, Record
from edl.master.turn import MasterTurn
from edl.types import Incarnation, JobId, NodeId, Rank, Round
from edl.wire.messages import (
    AgentMessage,
    Attach,
    Expelled,
    Finish,
    Leaving,
    MasterMessage,
    Preparing,
    Ready,
    StartRound,
    StopRound,
    WorkerFailed,
    WorkersDone,
)
from edl.wire.records import Failure, NodeInfo


class Rule:
    """A Master under test; node ``a`` has incarnation 1, ``b`` 2 and so on."""

    def __init__(
        self,
        bounds: NodeRange,
        level: FaultTolerance = FaultTolerance.ELASTIC,
        restarts: int = 1,
        record: Record | None = None,
        present: str = "",
        hyper: HyperPolicy | None = None,
        health: HealthRules | None = None,
    ) -> None:
        timeouts = Timeouts(10.0, shutdown_s=1.0, lease_ttl_s=3.0, restart_s=0.0, warming_s=40.0, loading_s=90.0)
        policies = {"hyper": hyper or HyperPolicy(), "health": health or HealthRules()}
        self.spec = JobSpec(JobId("job"), bounds, restarts, level, timeouts, **policies)  # type: ignore[arg-type]
        self.now_s = 100.0
        decision = take_over(self.spec, record, [info(name) for name in present], self.now_s)
        assert not list(state_violations(decision.state))
        self.state: MasterState = decision.state
        self.effects = decision.effects
        self.reason = decision.reason

    def feed(self, event: ev.Event) -> None:
        decision = step(self.state, event, self.now_s)
        assert not list(step_violations(self.state, decision))
        self.state, self.effects, self.reason = decision.state, decision.effects, decision.reason

    def attach(self, name: str, seen: int = 0, running: int = 0, done: bool = False, life: int = 0) -> None:
        self.feed(ev.NodeAttached(Attach(info(name, life), Round(seen), Round(running), done)))

    def say(self, name: str, message: AgentMessage, life: int = 0) -> None:
        assert not isinstance(message, Attach)
        self.feed(ev.NodeSaid(NodeId(name), info(name, life).incarnation, message))

    def ready(self, name: str, seen: int = 0, life: int = 0) -> None:
        self.say(name, Ready(Round(seen), (9000 + ord(name), 1, 2)), life)

    def join(self, *names: str) -> None:
        for name in names:
            self.feed(ev.NodeRegistered(info(name)))
            self.attach(name)
        for name in names:
            self.ready(name)

    def fail(self, name: str, *, peer_loss: bool = False, round: int = 1, final: int = 0) -> None:
        what = "ended with exit status 1"
        failure = Failure(NodeId(name), Round(round), Rank(0), 0, 1, what, peer_loss=peer_loss, final=final)
        self.say(name, WorkerFailed(failure))

    def lose(self, name: str) -> None:
        self.feed(ev.NodeExpired(NodeId(name), info(name).incarnation))

    def wait(self, for_s: float) -> None:
        self.now_s += for_s
        self.feed(ev.Tick())

    def told(self) -> dict[str, MasterMessage]:
        """Messages sent in this step, by node."""
        return {effect.node: effect.message for effect in self.effects if isinstance(effect, ev.TellNode)}

    @property
    def members(self) -> str:
        world = self.state.record.world
        return "".join(member.node for member in world.members) if world else ""


def info(name: str, life: int = 0) -> NodeInfo:
    return NodeInfo(NodeId(name), Incarnation(ord(name) - 96 + 100 * life), name, 1, 2)


def pair(restarts: int = 1, level: FaultTolerance = FaultTolerance.ELASTIC) -> Rule:
    rule = Rule(NodeRange(1, 2), level, restarts)
    rule.join("a", "b")
    assert rule.members == "ab"
    return rule


def test_a_step_carries_every_field_of_the_state() -> None:
    """A field that ``MasterTurn`` forgets would get its default after each step."""
    fields: dict[str, Any] = {one.name: object() for one in dataclasses.fields(MasterState)}
    state = MasterState(**{**fields, "nodes": {}})
    assert MasterTurn(state, 100.0).decision().state == state


def test_first_world_forms_at_once_when_full() -> None:
    rule = Rule(NodeRange(1, 2))
    rule.join("a", "b")
    assert rule.state.record.phase is Phase.RUNNING
    world = rule.state.record.world
    assert world is not None
    assert (world.round, world.size, world.master_host, world.master_port) == (1, 4, "a", 9097)
    assert rule.reason == "round 1: 2 nodes, 4 workers (2 nodes ready)"
    assert {name: type(message) for name, message in rule.told().items()} == {"a": StartRound, "b": StartRound}


def test_first_world_gives_others_the_grace_and_no_more() -> None:
    rule = Rule(NodeRange(1, 2))
    rule.join("a")
    assert rule.reason == "1 node ready; giving others 1 s to join the first world"
    assert ev.WakeAt(101.0) in rule.effects
    rule.wait(1.0)
    assert rule.members == "a"


def test_first_world_waits_for_a_node_that_warms_up() -> None:
    rule = Rule(NodeRange(1, 3))
    rule.feed(ev.NodeRegistered(info("b")))
    rule.attach("b")
    rule.join("a")
    rule.wait(39.0)
    assert rule.reason == "waiting for the first nodes; waiting for b"
    rule.wait(1.0)  # --warming-timeout
    rule.wait(1.0)  # --join-grace
    assert rule.members == "a"


def test_too_few_nodes_end_the_job_after_the_recover_time() -> None:
    rule = Rule(NodeRange(2, 3))
    rule.join("a")
    assert rule.reason == (
        "waiting for the first nodes; 1 node ready, at least 2 needed (--nnodes=2:3); "
        "without them the job ends after 10 s (--recover-timeout)"
    )
    rule.wait(10.0)
    finish = rule.told()["a"]
    assert isinstance(finish, Finish)
    assert finish.exit_code == ExitCode.NOT_ENOUGH_NODES
    assert finish.reason == (
        "1 node ready, at least 2 needed (--nnodes=2:3) for 10 s (--recover-timeout=10); waiting for the first nodes"
    )


def test_failed_worker_stops_the_world_and_is_charged_once() -> None:
    rule = pair()
    rule.fail("a")
    assert rule.state.record.restarts == 1
    assert rule.state.record.reason == "worker 0 on a ended with exit status 1; restart 1 of 1"
    assert {name: type(message) for name, message in rule.told().items()} == {"a": StopRound, "b": StopRound}
    rule.fail("b")
    assert rule.state.record.restarts == 1
    rule.ready("a", seen=1)
    assert rule.state.record.phase is Phase.FORMING
    rule.ready("b", seen=1)
    assert (rule.state.record.phase, rule.state.record.round, rule.members) == (Phase.RUNNING, 2, "ab")


def test_spent_budget_ends_the_job_when_all_have_stopped() -> None:
    rule = pair(restarts=0)
    rule.fail("a", peer_loss=True)
    rule.fail("b")
    rule.ready("a", seen=1)
    rule.ready("b", seen=1)
    outcome = rule.state.record.outcome
    assert outcome is not None
    assert outcome.exit_code == ExitCode.WORKER_FAILED
    assert outcome.reason == "worker 0 on b ended with exit status 1; --max-restarts=0"
    assert [failure.node for failure in outcome.failures] == ["b", "a"], "the root cause comes first"


def test_a_final_failure_ends_the_job_with_its_status_whatever_the_budget() -> None:
    rule = pair(restarts=5)
    rule.fail("a", peer_loss=True)
    rule.fail("b", final=11)
    rule.ready("a", seen=1)
    assert rule.state.record.outcome is None
    rule.ready("b", seen=1)
    outcome = rule.state.record.outcome
    assert outcome is not None
    assert outcome.exit_code == ExitCode.STATE_DIFFERS
    assert outcome.reason.endswith("starting again would not help")


def test_failure_that_a_lost_node_caused_is_given_back() -> None:
    rule = pair(restarts=0)
    rule.fail("a", peer_loss=True)
    rule.wait(CAUSE_WAIT_S)
    rule.ready("a", seen=1)
    assert rule.state.record.restarts == 1
    rule.lose("b")
    assert (rule.state.record.restarts, rule.members, rule.state.record.round) == (0, "a", 2)


def test_failure_that_a_leaving_node_caused_is_given_back() -> None:
    rule = pair(restarts=0)
    rule.fail("a", peer_loss=True)
    rule.wait(CAUSE_WAIT_S)
    assert rule.state.record.restarts == 1
    rule.say("b", Leaving("SIGTERM"))
    assert rule.state.record.restarts == 0
    assert rule.state.record.reason == "node b leaves: SIGTERM"


@pytest.mark.parametrize(
    "message",
    [
        Ready(Round(1), (20_000,), stopped_itself=True),
        Preparing(Round(1), "starting workers ahead of the next world", stopped_itself=True),
    ],
    ids=["ready", "preparing"],
)
@pytest.mark.parametrize("consequence", [True, False])
def test_a_consequence_of_workers_that_a_node_killed_itself_is_given_back(
    message: Ready | Preparing, consequence: bool
) -> None:
    rule = pair(restarts=1)
    rule.fail("a", peer_loss=consequence)
    rule.wait(CAUSE_WAIT_S)
    assert rule.state.record.restarts == 1
    rule.say("b", message)
    assert rule.state.record.restarts == (0 if consequence else 1)
    if consequence:
        assert rule.state.record.reason == "node b had stopped its workers"


def test_failure_of_its_own_is_not_given_back_to_a_leaving_node() -> None:
    rule = pair()
    rule.fail("a")
    rule.say("b", Leaving("SIGTERM"))
    assert rule.state.record.restarts == 1


def test_unheard_member_may_be_the_cause() -> None:
    rule = pair(restarts=0)
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    rule.fail("a", peer_loss=True)
    rule.wait(CAUSE_WAIT_S)
    rule.ready("a", seen=1)
    rule.wait(7.0)
    assert rule.reason == "worker 0 on a ended with exit status 1; waiting for a report from b, which may be the cause"
    rule.wait(3.0)
    assert rule.state.record.phase is Phase.ENDED


@pytest.mark.parametrize("lease_s", [0.0, 24.0])
def test_a_member_that_is_cut_off_gets_the_time_of_its_own_lease(lease_s: float) -> None:
    """It stops its workers one and a half of its leases after the cut at the latest; before that no world may form."""
    rule = Rule(NodeRange(1, 2), FaultTolerance.ELASTIC, 1)
    for name in "ab":
        rule.feed(ev.NodeRegistered(dataclasses.replace(info(name), lease_s=lease_s)))
    rule.join("a", "b")
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    rule.fail("a")
    rule.ready("a", seen=1)
    limit_s = 2 * (lease_s or rule.spec.timeouts.lease_ttl_s)
    rule.wait(limit_s - 0.5)
    assert rule.members == "ab"
    rule.wait(1.0)
    assert rule.members == "a"


def test_node_whose_host_refuses_is_lost_before_its_lease_ends() -> None:
    rule = pair()
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    assert rule.effects[0] == ev.Probe(info("b"))
    assert rule.state.record.phase is Phase.RUNNING, "a broken stream is no death"
    rule.feed(ev.NodeRefused(NodeId("b"), info("b").incarnation))
    assert ev.Revoke(info("b").incarnation) in rule.effects
    assert rule.state.record.reason == "node b lost: its launcher is gone (connection refused)"


def test_dead_incarnation_is_expelled_and_never_listed() -> None:
    rule = pair()
    rule.lose("b")
    rule.feed(ev.NodeRegistered(info("b")))
    assert "b" not in rule.state.nodes
    rule.attach("b", seen=1, running=1)
    assert rule.told()["b"] == Expelled("its lease ended; the job went on without it")


def test_new_life_of_a_member_replaces_the_old_one() -> None:
    rule = pair()
    rule.feed(ev.NodeRegistered(info("b", life=1)))
    assert rule.state.record.reason == "node b lost: replaced by a new launcher of the same name"
    rule.attach("b", life=1)
    rule.ready("a", seen=1)
    assert rule.members == "a", "who still warms up is not waited for"
    rule.ready("b", life=1)
    assert rule.state.record.reason == "b joined: growing from 1 to 2 nodes"


def test_growth_only_where_it_is_wanted() -> None:
    for level, phase in ((FaultTolerance.ELASTIC, Phase.FORMING), (FaultTolerance.SHRINK, Phase.RUNNING)):
        rule = Rule(NodeRange(1, 3), level)
        rule.join("a")
        rule.wait(1.0)
        rule.join("b")
        assert rule.state.record.phase is phase


def test_spare_beyond_the_maximum_disturbs_nobody() -> None:
    rule = pair()
    rule.join("c")
    assert (rule.members, rule.state.record.phase, rule.told()) == ("ab", Phase.RUNNING, {})
    assert rule.reason == "node c is ready with 2 slots"


def test_newcomer_waits_a_moment_for_another_that_warms_up() -> None:
    rule = Rule(NodeRange(1, 3))
    rule.join("a")
    rule.wait(1.0)
    for name in "bc":
        rule.feed(ev.NodeRegistered(info(name)))
        rule.attach(name)
    rule.ready("b")
    assert rule.state.record.phase is Phase.RUNNING
    rule.ready("c")
    assert rule.state.record.reason == "b, c joined: growing from 1 to 3 nodes"


def test_ready_from_before_an_order_is_not_taken_for_the_end_of_a_stop() -> None:
    rule = pair()
    rule.ready("b")
    assert rule.told() == {}, "the start order is on its way"
    rule.fail("a")
    rule.ready("a", seen=1)
    rule.ready("b")
    assert rule.state.record.round == 1, "b still stops its workers"
    rule.ready("b", seen=1)
    assert rule.state.record.round == 2


def test_member_that_could_not_start_asks_for_another_world() -> None:
    rule = pair()
    rule.ready("b", seen=1)
    assert rule.state.record.reason == "node b has stopped its workers"


def test_start_order_that_was_lost_is_sent_again() -> None:
    rule = pair()
    rule.attach("b")
    message = rule.told()["b"]
    assert isinstance(message, StartRound)
    assert message.world == rule.state.record.world


def test_older_workers_are_stopped_wherever_they_show_up() -> None:
    rule = pair()
    rule.feed(ev.NodeRegistered(info("c")))
    rule.attach("c", seen=1, running=1)
    assert rule.told() == {"c": StopRound(Round(1), "2 nodes ready")}


def test_success_needs_every_node_and_survives_the_loss_of_one_that_was_done() -> None:
    rule = pair()
    rule.say("a", WorkersDone(Round(1)))
    rule.lose("a")
    assert rule.state.record.phase is Phase.RUNNING
    rule.say("b", WorkersDone(Round(1)))
    assert rule.told()["b"] == Finish(0, "all 4 workers of round 1 ended with status 0")


def test_master_goes_when_all_have_heard_the_end() -> None:
    rule = pair()
    rule.say("a", WorkersDone(Round(1)))
    rule.feed(ev.NodeDetached(NodeId("a"), info("a").incarnation))
    rule.say("b", WorkersDone(Round(1)))
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    assert ev.Conclude() not in rule.effects, "a has not heard it"
    rule.attach("a", seen=1, running=1, done=True)
    assert isinstance(rule.told()["a"], Finish)
    rule.feed(ev.NodeDetached(NodeId("a"), info("a").incarnation))
    assert ev.Conclude() in rule.effects


def test_next_master_tells_the_end_to_those_who_have_not_heard_it() -> None:
    ended = pair()
    ended.say("a", WorkersDone(Round(1)))
    ended.say("b", WorkersDone(Round(1)))
    rule = Rule(NodeRange(1, 2), record=ended.state.record, present="b")
    assert ev.Conclude() not in rule.effects
    rule.attach("b", seen=1, running=1, done=True)
    assert rule.told()["b"] == ended.state.record.outcome
    rule.wait(5.0)
    assert ev.Conclude() in rule.effects


def test_next_master_leaves_a_running_world_alone() -> None:
    rule = Rule(NodeRange(1, 2), record=pair().state.record, present="ab")
    rule.attach("a", seen=1, running=1)
    rule.attach("b", seen=1, running=1)
    assert (rule.state.record.phase, rule.told()) == (Phase.RUNNING, {})


def test_a_job_may_wait_for_ever() -> None:
    timeouts = Timeouts(math.inf, shutdown_s=1.0, lease_ttl_s=3.0)
    spec = JobSpec(JobId("job"), NodeRange(2, 3), 1, FaultTolerance.ELASTIC, timeouts)
    state = take_over(spec, None, [info("a")], 0.0).state
    state = step(state, ev.NodeAttached(Attach(info("a"), Round(0), Round(0), done=False)), 1.0).state
    ready = Ready(Round(0), (9000, 1, 2))
    decision = step(state, ev.NodeSaid(NodeId("a"), info("a").incarnation, ready), 1e6)
    assert decision.reason == "waiting for the first nodes; 1 node ready, at least 2 needed (--nnodes=2:3)"


def notes(rule: Rule) -> list[ev.HistoryNote]:
    return [one for one in rule.effects if isinstance(one, ev.HistoryNote)]


def test_next_master_counts_out_who_died_meanwhile() -> None:
    rule = Rule(NodeRange(1, 2), record=pair().state.record, present="b")
    text = "node a lost while the job had no Master"
    assert rule.state.record.reason == text
    assert rule.state.record.phase is Phase.FORMING
    assert notes(rule) == [ev.HistoryNote(ev.Kind.NODE_LOST, text, "a")], "it notifies as any other loss"


def test_next_master_notes_each_node_that_died_meanwhile() -> None:
    rule = Rule(NodeRange(1, 2), record=pair().state.record, present="")
    assert [(one.kind, one.node) for one in notes(rule)[:2]] == [(ev.Kind.NODE_LOST, "a"), (ev.Kind.NODE_LOST, "b")]
    assert rule.state.record.reason.startswith("nodes a, b lost while the job had no Master")
    assert ev.Kind.WORLD_STOPPED not in [one.kind for one in notes(rule)]


def test_next_master_does_not_repeat_what_an_earlier_one_has_noted() -> None:
    before = Rule(NodeRange(3, 3))
    before.join("a", "b", "c")
    before.lose("c")
    assert [one.kind for one in notes(before)][:1] == [ev.Kind.NODE_LOST]
    assert notes(Rule(NodeRange(3, 3), record=before.state.record, present="ab")) == []
    before.feed(ev.NodeRegistered(info("c", 1)))
    before.attach("c", life=1)
    before.ready("c", life=1)
    taken = take_over(before.spec, before.state.record, [info("a"), info("b"), info("c", 1)], 200.0)
    assert [one for one in taken.effects if isinstance(one, ev.HistoryNote)] == []


def test_absent_nodes_are_those_that_live_and_are_not_attached() -> None:
    rule = pair()
    streams = {(entry.info.node, entry.info.incarnation) for entry in rule.state.nodes.values()}
    assert absent(rule.state, streams) == ()
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    assert absent(rule.state, streams) == ("b",)


def test_a_node_whose_stream_has_ended_is_absent_before_the_machine_knows() -> None:
    rule = pair()
    assert absent(rule.state, {(NodeId("a"), info("a").incarnation)}) == ("b",)


class TestWorkersThatFailAtOnce:
    """Each world fails 1 s after it was formed, unless something else is said."""

    def rule(self, longest_s: float = 30.0) -> Rule:
        rule = pair(restarts=20)
        timeouts = dataclasses.replace(rule.spec.timeouts, restart_s=longest_s)
        rule.state = dataclasses.replace(rule.state, spec=dataclasses.replace(rule.spec, timeouts=timeouts))
        return rule

    def restart(self, rule: Rule, ran_s: float = 1.0) -> float:
        """Seconds until the next world after a failure."""
        number = rule.state.record.round
        rule.wait(ran_s)
        rule.fail("a", round=number)
        began_s = rule.now_s
        rule.ready("a", seen=number)
        rule.ready("b", seen=number)
        while rule.state.record.phase is Phase.FORMING:
            (wake,) = [effect.at_s for effect in rule.effects if isinstance(effect, ev.WakeAt)]
            assert f"the last {rule.state.quick} worlds failed at once: pausing before the next one" in rule.reason
            rule.wait(wake - rule.now_s)
        assert rule.members == "ab"
        return rule.now_s - began_s

    def test_are_started_again_at_once_the_first_time_and_later_and_later_then(self) -> None:
        rule = self.rule()
        assert [self.restart(rule) for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]

    def test_that_ran_for_a_while_before_start_over(self) -> None:
        rule = self.rule()
        assert [self.restart(rule, ran_s) for ran_s in (1, 1, 1, 5, 1, 1)] == [0, 0.5, 1, 0, 0, 0.5]

    def test_a_lost_node_is_never_waited_for_because_of_that(self) -> None:
        rule = self.rule()
        self.restart(rule)
        number = rule.state.record.round
        rule.lose("b")
        rule.ready("a", seen=number)
        assert (rule.members, rule.state.record.phase) == ("a", Phase.RUNNING)

    def test_no_pause_where_none_is_wanted(self) -> None:
        rule = self.rule(0.0)
        assert [self.restart(rule) for _ in range(4)] == [0, 0, 0, 0]

    def test_are_forgotten_once_a_world_has_run_for_a_while(self) -> None:
        rule = self.rule()
        for _ in range(5):
            self.restart(rule)
        number = rule.state.record.round
        rule.wait(1000.0)
        rule.lose("b")
        rule.ready("a", seen=number)
        assert (rule.members, rule.state.record.phase) == ("a", Phase.RUNNING)


@pytest.mark.parametrize("master", ["same", "next"])
def test_a_node_whose_workers_are_done_stays_so_when_it_attaches_again(master: str) -> None:
    rule = pair()
    rule.say("b", WorkersDone(Round(1)))
    if master == "next":
        rule.state = take_over(rule.spec, rule.state.record, [info("a"), info("b")], rule.now_s).state
    else:
        rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    rule.attach("b", seen=1, running=1, done=True)
    entry = rule.state.nodes[NodeId("b")]
    assert (entry.status, entry.finished, rule.state.record.done) == (NodeStatus.DONE, True, ("b",))
