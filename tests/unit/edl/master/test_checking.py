"""Health checks as the Master sees them: who is checked and when, and what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from edl.config import FaultTolerance, NodeRange
from edl.job_records import HealthMode, HealthRules, SlowNodes
from edl.master import events as ev
from edl.master.checking import MARGIN_S, MOST_NOTED, request
from edl.master.machine import take_over
from edl.master.policies.health import KEPT, KnownHealth, with_suspect, with_verdicts
from edl.master.state import Phase, Record
from edl.master.turn import MasterTurn
from edl.master.view import job_status
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.health import CheckHealth, HealthChecked, LinkFinding, SlotFinding
from edl.wire.health_records import NO_HEALTH, Fitness, HealthVerdict
from edl.wire.messages import Attach, Prestart, StartRound, Underway, WorkerFailed
from edl.wire.records import Failure
from tests.unit.edl.master.test_machine import Rule, info

JOIN = HealthRules(HealthMode.JOIN)
FAILURE = HealthRules(HealthMode.FAILURE)


class Checked(Rule):
    """A Master whose nodes answer probes."""

    def __init__(self, bounds: NodeRange, rules: HealthRules = JOIN, **more: object) -> None:
        super().__init__(bounds, health=rules, restarts=5, **more)  # type: ignore[arg-type]

    @property
    def orders(self) -> dict[str, CheckHealth]:
        """The probes ordered in this step."""
        return {node: message for node, message in self.told().items() if isinstance(message, CheckHealth)}

    def probe(self, wrong: Mapping[str, str] | None = None, slow: str = "", deaf: str = "", dead: str = "") -> None:
        """All nodes answer the orders of this step. ``wrong``: errors by node; the others: nodes with a fault."""
        orders = self.orders
        assert orders
        for node, order in orders.items():
            if node not in dead:
                links = [
                    LinkFinding(peer.node, "timed out" if {node, peer.node} & {*deaf, *dead} else "")
                    for peer in order.peers
                ]
                took_s = 9.0 if node in slow else 1.0
                error = (wrong or {}).get(node, "")
                self.say(node, HealthChecked(order.number, order.stage, "cpu", took_s, error, links=tuple(links)))

    @property
    def notes(self) -> list[str]:
        """The notes of this step about health."""
        kind = ev.Kind.HEALTH
        return [one.text for one in self.effects if isinstance(one, ev.HistoryNote) and one.kind is kind]

    def crash(self, name: str, exit_code: int = -11, exception: str = "", *, peer_loss: bool = False) -> None:
        failure = Failure(
            NodeId(name), self.state.record.round, Rank(0), 0, exit_code, "ended", exception, peer_loss=peer_loss
        )
        self.say(name, WorkerFailed(failure))

    def verdicts(self) -> dict[str, Fitness]:
        return {one.node: one.fitness for one in self.state.record.health.verdicts}


def test_a_host_that_is_found_faulty_is_no_longer_good_by_what_an_earlier_node_found() -> None:
    old = HealthVerdict(NodeId("a"), "10.0.0.1", Incarnation(1), Fitness.GOOD, "", host_id="m1")
    bad = HealthVerdict(NodeId("b"), "10.0.0.2", Incarnation(2), Fitness.FAULTY, "wrong", excluded=True, host_id="m1")
    known = with_verdicts(NO_HEALTH, [old], {old.node: old.incarnation})
    assert with_verdicts(known, [bad], {bad.node: bad.incarnation}).verdicts == (bad,)
    both = {one.node: one.incarnation for one in (old, bad)}
    assert with_verdicts(known, [bad], both).verdicts == (old, bad)


def test_a_bad_host_is_remembered_when_the_name_of_its_node_moves_to_another_one() -> None:
    """As that of a pod of a StatefulSet does."""
    bad = HealthVerdict(NodeId("a"), "10.0.0.1", Incarnation(1), Fitness.FAULTY, "wrong", excluded=True, host_id="m1")
    good = HealthVerdict(NodeId("a"), "10.0.0.2", Incarnation(2), Fitness.GOOD, "", host_id="m2")
    known = with_verdicts(NO_HEALTH, [bad], {bad.node: bad.incarnation})
    moved = with_verdicts(known, [good], {good.node: good.incarnation})
    assert moved.verdicts == (bad, good)
    suspect = with_suspect(moved, dataclasses.replace(info("a"), host_id="m2"), "it went silent")
    assert suspect.verdicts == (bad,)
    again = HealthVerdict(NodeId("c"), "10.0.0.3", Incarnation(3), Fitness.GOOD, "", host_id="m1")
    assert with_verdicts(moved, [again], {one.node: one.incarnation for one in (good, again)}).verdicts == (good, again)
    rule = Checked(NodeRange(1, 4), FAILURE, record=Record(health=moved))
    kept_out = KnownHealth(moved)
    assert not kept_out.is_kept_out(dataclasses.replace(info("b"), incarnation=Incarnation(2)))
    assert kept_out.why_due(dataclasses.replace(info("c"), host_id="m1"), FAILURE, member=False)
    (view,) = job_status(rule.state, NodeId("a"), (), now_s=rule.now_s).health
    assert (view.node, view.state, view.host_id) == ("a", "good", "m2")


@pytest.mark.parametrize("silent", [False, True])
def test_the_host_of_a_bad_node_is_known_by_its_name(silent: bool) -> None:
    """In Kubernetes each pod has an address of its own, and a host has one pod after the other."""
    rule = Checked(NodeRange(1, 4), FAILURE)
    on = {name: dataclasses.replace(info(name), host_id="m1" if name in "bc" else f"m-{name}") for name in "abcd"}

    def come(names: str) -> None:
        for name in names:
            rule.feed(ev.NodeRegistered(on[name]))
            rule.feed(ev.NodeAttached(Attach(on[name], Round(0), Round(0), False)))
        for name in names:
            rule.ready(name)

    come("ab")
    rule.wait(1.0)
    assert rule.members == "ab"
    if silent:
        rule.lose("b")  # it went silent, and has not come back
    else:
        rule.crash("b")
        rule.ready("a", seen=1)
        rule.ready("b", seen=1)
        rule.probe({"b": "wrong numbers"})
        rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    come("cd")
    reasons = {turn.nodes[NodeId(name)].info.host_id: turn.must_be_checked(turn.nodes[NodeId(name)])
               for turn in [MasterTurn(rule.state, rule.now_s)] for name in "cd"}  # fmt: skip
    assert reasons == {"m1": True, "m-d": False}


# --- joining ---------------------------------------------------------------------------------------------------------


def test_the_first_world_waits_for_a_check_of_all_its_nodes() -> None:
    rule = Checked(NodeRange(1, 4))
    rule.join("a", "b", "c", "d")
    assert rule.state.record.phase is Phase.FORMING
    assert {node: [peer.node for peer in order.peers] for node, order in rule.orders.items()} == {
        "a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"],
    }  # fmt: skip
    assert rule.orders["a"].reason == "it is new"
    assert "checking the health of a, b, c, d" in rule.reason
    rule.probe()
    assert rule.members == "abcd"
    assert rule.notes == ["health check 1 (1 round): a, b, c, d passed"]


def test_a_node_with_wrong_numbers_is_kept_out() -> None:
    rule = Checked(NodeRange(1, 4))
    rule.join("a", "b", "c", "d")
    rule.probe({"b": "wrong numbers"})
    assert rule.notes[0] == "node b is kept out: wrong numbers"
    rule.wait(1.0)
    assert rule.members == "acd"
    (view,) = [one for one in job_status(rule.state, NodeId("a"), (), now_s=rule.now_s).health if one.node == "b"]
    assert (view.state, view.excluded, view.expires_s, view.host) == ("faulty", True, 86399.0, "b")


def test_suspects_meet_good_nodes_in_a_second_round() -> None:
    rule = Checked(NodeRange(1, 4))
    rule.join("a", "b", "c", "d")
    rule.probe(deaf="b")
    assert rule.state.record.phase is Phase.FORMING
    assert set(rule.orders) == {"a", "b", "c", "d"}
    assert {order.stage for order in rule.orders.values()} == {2}
    assert {peer.node for peer in rule.orders["b"].peers} == {"c", "d"}
    rule.probe(deaf="b")
    assert "exchange with a, c, d failed" in rule.notes[0]
    rule.wait(1.0)
    assert rule.members == "acd"


def test_a_silent_node_is_waited_for_twice_and_no_longer() -> None:
    rule = Checked(NodeRange(1, 4))
    rule.join("a", "b", "c", "d")
    rule.probe(dead="d")
    rule.wait(JOIN.timeout_s + MARGIN_S)
    rule.probe(dead="d")
    rule.wait(JOIN.timeout_s + MARGIN_S)
    assert rule.notes[0] == "node d is kept out: no answer to 2 probes"
    rule.wait(1.0)
    assert rule.members == "abc"


def test_a_node_that_is_gone_is_not_waited_for_in_a_second_round() -> None:
    rule = Checked(NodeRange(1, 3))
    rule.join("a", "b", "c")
    rule.probe({"a": "wrong numbers"}, dead="bc")
    for name in "bc":
        rule.lose(name)
    assert rule.notes == ["node a is kept out: wrong numbers"], "it ends with the last of them"


def test_nor_is_it_a_peer_of_others_in_it() -> None:
    rule = Checked(NodeRange(1, 4))
    rule.join("a", "b", "c", "d")
    rule.probe(deaf="a", dead="b")
    rule.lose("b")
    assert {node: [peer.node for peer in order.peers] for node, order in rule.orders.items()} == {
        "a": ["c", "d"], "c": ["a"], "d": ["a"],
    }  # fmt: skip


def test_nobody_is_blamed_if_two_nodes_cannot_talk() -> None:
    rule = Checked(NodeRange(1, 2))
    rule.join("a", "b")
    rule.probe(deaf="b")
    rule.probe(deaf="b")
    assert rule.members == "ab"
    assert rule.notes[0] == ("a and b cannot exchange data (timed out); which of them is faulty is unknown")


def test_a_job_that_cannot_go_on_without_a_faulty_node_waits_for_another() -> None:
    rule = Checked(NodeRange(2, 2))
    rule.join("a", "b")
    rule.probe({"b": "wrong numbers"})
    assert rule.state.record.phase is Phase.FORMING
    assert "b kept out by the health check" in rule.reason
    rule.join("c")
    assert set(rule.orders) == {"a", "c"}, "a is a witness for c"
    rule.probe()
    assert rule.members == "ac"


def test_a_new_node_is_checked_while_the_others_train() -> None:
    rule = Checked(NodeRange(1, 3))
    rule.join("a", "b")
    rule.wait(1.0)
    rule.probe()
    assert rule.members == "ab"
    rule.join("c")
    assert (rule.members, set(rule.orders)) == ("ab", {"c"})
    assert not rule.orders["c"].peers
    rule.probe()
    assert rule.state.record.phase is Phase.FORMING, "the world is replaced by a larger one"
    for name in "ab":
        rule.ready(name, seen=1)
    assert rule.members == "abc"


def test_a_faulty_new_node_disturbs_nobody() -> None:
    rule = Checked(NodeRange(1, 3))
    rule.join("a", "b")
    rule.wait(1.0)
    rule.probe()
    rule.join("c")
    rule.probe({"c": "wrong numbers"})
    rule.wait(100.0)
    assert (rule.members, rule.state.record.round) == ("ab", 1)


def test_a_new_node_does_not_hold_up_a_recovery() -> None:
    rule = Checked(NodeRange(1, 3))
    rule.join("a", "b")
    rule.wait(1.0)
    rule.probe()
    rule.lose("b")
    rule.join("c")
    rule.ready("a", seen=1)
    assert rule.members == "a"
    assert (rule.state.record.phase, set(rule.orders)) == (Phase.RUNNING, {"c"})


def test_a_recovery_that_needs_the_new_node_waits_for_its_check() -> None:
    rule = Checked(NodeRange(2, 2), level=FaultTolerance.RECOVER)
    rule.join("a", "b")
    rule.probe()
    rule.lose("b")
    rule.ready("a", seen=1)
    rule.join("c")
    assert set(rule.orders) == {"a", "c"}
    rule.probe()
    assert rule.members == "ac"


def test_a_restarted_launcher_is_checked_anew() -> None:
    rule = Checked(NodeRange(1, 2))
    rule.join("a", "b")
    rule.probe({"b": "wrong numbers"})
    rule.wait(1.0)
    assert rule.members == "a"
    rule.feed(ev.NodeRegistered(info("b", life=1)))
    rule.attach("b", life=1)
    rule.ready("b", life=1)
    (order,) = rule.orders.values()
    rule.say("b", HealthChecked(order.number, order.stage, "cpu", 1.0), life=1)
    assert rule.verdicts() == {"a": Fitness.GOOD, "b": Fitness.GOOD}
    assert rule.state.record.phase is Phase.FORMING, "it joins"


def test_nothing_is_checked_unless_asked_for() -> None:
    rule = Checked(NodeRange(1, 2), HealthRules())
    rule.join("a", "b")
    assert rule.members == "ab"
    rule.crash("b")
    for name in "ab":
        rule.ready(name, seen=1)
    assert (rule.members, rule.state.record.round, rule.state.record.health) == ("ab", 2, NO_HEALTH)


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "exception", "peer_loss", "suspected"),
    [
        (-11, "", False, True),
        (-7, "", False, True),
        (-4, "", False, True),
        (-9, "", False, False),
        (1, "ValueError: bad data", False, False),
        (1, "RuntimeError: CUDA error: an illegal memory access was encountered", False, True),
        (1, "RuntimeError: CUDA error: device-side assert triggered", False, False),
        (1, "torch.OutOfMemoryError: CUDA out of memory", False, False),
        (1, "RuntimeError: uncorrectable ECC error encountered", False, True),
        (1, "RuntimeError: NCCL error: ncclSystemError: peer is gone", True, False),
        (1, "RuntimeError: NCCL error: ncclSystemError: broken", False, True),
    ],
)
def test_only_failures_like_those_of_hardware_lead_to_a_check(
    exit_code: int, exception: str, peer_loss: bool, suspected: bool
) -> None:
    rule = Checked(NodeRange(1, 3), FAILURE)
    rule.join("a", "b", "c")
    assert rule.members == "abc"
    rule.crash("b", exit_code, exception, peer_loss=peer_loss)
    rule.wait(2.0)
    for name in "abc":
        rule.ready(name, seen=1)
    assert bool(rule.orders) is suspected
    if suspected:
        assert {peer.node for peer in rule.orders["b"].peers} == {"a", "c"}
        rule.probe()
    assert (rule.members, rule.state.record.round) == ("abc", 2)
    assert not rule.state.record.health.suspects


def test_a_node_that_fails_its_check_is_left_out_of_the_next_world() -> None:
    rule = Checked(NodeRange(1, 3), FAILURE)
    rule.join("a", "b", "c")
    rule.crash("b")
    for name in "abc":
        rule.ready(name, seen=1)
    rule.probe({"b": "wrong numbers"})
    assert (rule.members, rule.verdicts()) == ("ac", {"b": Fitness.FAULTY})


def test_a_node_that_went_silent_is_checked_when_it_is_back() -> None:
    rule = Checked(NodeRange(1, 2), FAILURE)
    rule.join("a", "b")
    rule.lose("b")
    rule.ready("a", seen=1)
    assert rule.members == "a"
    rule.feed(ev.NodeRegistered(info("b", life=1)))
    rule.attach("b", life=1)
    rule.ready("b", life=1)
    assert [order.reason for order in rule.orders.values()] == ["it went silent"]


def test_a_launcher_that_was_killed_is_no_suspect() -> None:
    rule = Checked(NodeRange(1, 2), FAILURE)
    rule.join("a", "b")
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    rule.feed(ev.NodeRefused(NodeId("b"), info("b").incarnation))
    assert not rule.state.record.health.suspects


def test_a_check_can_be_requested_even_if_checks_are_off() -> None:
    rule = Checked(NodeRange(1, 3), HealthRules())
    rule.join("a", "b", "c")
    turn = MasterTurn(rule.state, rule.now_s)
    request(turn, info("b"), "its steps take twice as long")
    rule.state = turn.decision().state
    assert rule.state.record.phase is Phase.RUNNING
    rule.fail("a")
    for name in "abc":
        rule.ready(name, seen=1)
    assert rule.orders["b"].reason == "its steps take twice as long"
    rule.probe({"b": "wrong numbers"})
    assert rule.members == "ac"


# --- Masters come and go ---------------------------------------------------------------------------------------------


def test_the_next_master_repeats_a_check_in_progress() -> None:
    rule = Checked(NodeRange(1, 2))
    rule.join("a", "b")
    first = rule.orders["a"]
    after = Checked(NodeRange(1, 2), record=rule.state.record, present="ab")
    for name in "ab":
        after.attach(name)
    after.ready("a")
    after.ready("b")
    orders = after.orders
    assert orders["a"].number > first.number
    after.say("a", HealthChecked(first.number, 1, error="wrong numbers"))
    after.say("b", HealthChecked(orders["b"].number, 1, "cpu", links=(LinkFinding(NodeId("a")),)))
    assert after.state.health.check is not None, "an answer to the earlier check is ignored"
    after.say("a", HealthChecked(orders["a"].number, 2))
    assert after.state.health.check is not None, "and so is one to another stage"
    after.say("a", HealthChecked(orders["a"].number, 1, "cpu", links=(LinkFinding(NodeId("b")),)))
    assert after.members == "ab"


def test_the_next_master_keeps_verdicts() -> None:
    rule = Checked(NodeRange(1, 2))
    rule.join("a", "b")
    rule.probe({"b": "wrong numbers"})
    decision = take_over(rule.spec, rule.state.record, [info("a"), info("b")], 500.0)
    assert decision.state.record.health == rule.state.record.health
    after = Checked(NodeRange(1, 2), record=rule.state.record, present="ab")
    after.attach("b")
    after.ready("b")
    assert not after.orders
    assert {one.node: one.state for one in job_status(after.state, NodeId("a"), ()).health}["b"] == "faulty"


def test_an_order_is_repeated_to_a_node_that_was_cut_off() -> None:
    rule = Checked(NodeRange(1, 2))
    rule.join("a", "b")
    order = rule.orders["b"]
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    rule.attach("b")
    rule.ready("b")
    assert rule.orders["b"] == order


def test_a_check_whose_nodes_are_gone_is_forgotten() -> None:
    rule = Checked(NodeRange(1, 2))
    rule.join("a", "b")
    rule.lose("a")
    assert rule.state.health.check is not None
    rule.lose("b")
    assert rule.state.health.check is None


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_verdict_expires_and_the_node_is_checked_again() -> None:
    rule = Checked(NodeRange(1, 2), dataclasses.replace(JOIN, expiry_s=50.0))
    rule.join("a", "b")
    rule.probe({"b": "wrong numbers"})
    rule.wait(49.0)
    assert not rule.orders
    rule.wait(1.0)
    assert set(rule.orders) == {"b"}
    assert rule.orders["b"].reason == "the time for which it was kept out is over"
    rule.probe()
    assert rule.verdicts()["b"] is Fitness.GOOD


def test_a_member_is_not_checked_again_when_its_verdict_expires() -> None:
    rule = Checked(NodeRange(1, 2), dataclasses.replace(JOIN, expiry_s=50.0))
    rule.join("a", "b")
    rule.probe()
    rule.wait(60.0)
    assert not rule.verdicts()
    rule.fail("b")
    for name in "ab":
        rule.ready(name, seen=1)
    assert (rule.members, rule.state.record.round) == ("ab", 2)


# --- slow nodes and slots --------------------------------------------------------------------------------------------


def test_a_slow_node_is_reported_and_takes_part() -> None:
    rule = Checked(NodeRange(1, 2))
    rule.join("a", "b")
    rule.probe(slow="b")
    rule.probe(slow="b")
    assert rule.members == "ab"
    assert rule.notes[0] == (
        "node b is slow (9.0 times as long for a matrix product as other nodes with cpu, 2 slots): it takes part"
    )


@pytest.mark.parametrize(("least", "members"), [(1, "a"), (2, "ab")])
def test_a_slow_node_is_excluded_on_request_if_the_job_can_do_without_it(least: int, members: str) -> None:
    rule = Checked(NodeRange(least, 2), dataclasses.replace(JOIN, slow=SlowNodes.EXCLUDE))
    rule.join("a", "b")
    rule.probe(slow="b")
    rule.probe(slow="b")
    rule.wait(1.0)
    assert (rule.members, rule.verdicts()["b"]) == (members, Fitness.SLOW)


def test_a_defective_slot_is_dropped_and_its_node_takes_part() -> None:
    rule = Checked(NodeRange(1, 1))
    rule.join("a")
    (order,) = rule.orders.values()
    rule.say("a", HealthChecked(order.number, 1, "cpu", 1.0, slots=(SlotFinding(1, "wrong numbers"),)))
    world = rule.state.record.world
    assert world is not None and world.members[0].used == (0,)
    assert rule.state.record.dropped[0].why == "found defective: wrong numbers"


def test_a_network_that_is_broken_for_all_does_not_flood_the_history() -> None:
    rule = Checked(NodeRange(1, 26))
    names = "abcdefghijklmnopqrstuvwxyz"
    rule.join(*names)
    rule.probe(deaf=names)
    rule.probe(deaf=names)
    assert len(rule.notes) == MOST_NOTED + 2
    assert rule.notes[-2] == "health check 1: 83 more pairs that cannot exchange data"
    assert rule.members == names, "nobody is blamed"


# --- the record ------------------------------------------------------------------------------------------------------


def verdict(number: int, *, excluded: bool = False) -> HealthVerdict:
    name = NodeId(f"n{number}")
    return HealthVerdict(name, name, Incarnation(number), Fitness.FAULTY, "why", excluded)


def test_verdicts_about_absent_nodes_are_limited_and_those_about_present_ones_are_not() -> None:
    found = [verdict(number) for number in range(1000)]
    record = with_verdicts(NO_HEALTH, found, {NodeId("n3"): found[3].incarnation})
    assert len(record.verdicts) == KEPT + 1
    assert record.verdicts[0].node == "n3" and record.verdicts[-1].node == "n999"


def test_suspects_are_limited() -> None:
    record = NO_HEALTH
    for number in range(KEPT + 5):
        record = with_suspect(record, dataclasses.replace(info("a"), node=NodeId(f"n{number}")), "why")
    assert len(record.suspects) == KEPT


def test_no_start_order_goes_to_a_node_that_must_be_checked() -> None:
    rule = Checked(NodeRange(1, 2), HealthRules(HealthMode.BOTH))
    rule.join("a", "b")
    assert not any(isinstance(message, StartRound) for message in rule.told().values())
    assert rule.state.record.round == Round(0)


@pytest.mark.parametrize("most", [1, 2])
def test_a_node_that_starts_its_workers_once_it_has_passed_is_not_used_before(most: int) -> None:
    """Copies would be given up at once, and sent again later; a change of the world would not find the node ready."""
    rule = Checked(NodeRange(1, most))
    for name in "ab":
        rule.feed(ev.NodeRegistered(info(name)))
        rule.feed(ev.NodeAttached(Attach(info(name), Round(0), Round(0), False)))
        rule.ready(name)
        if not rule.orders:
            rule.wait(1.0)  # the first world waits for others
        rule.probe()
        if name == "a":
            rule.say("a", Underway(Round(1), "in process"))
    told = [one for one in rule.effects if isinstance(one, ev.TellNode)]
    assert [(one.node, type(one.message)) for one in told] == [("b", Prestart)]
