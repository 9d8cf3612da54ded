"""Planned changes and the way to the next world, as the Master sees them."""

from __future__ import annotations

import dataclasses

import pytest

from edl.config import FaultTolerance, NodeRange
from edl.exit_codes import ExitCode
from edl.master import events as ev
from edl.master.state import NodeStatus, Phase
from edl.types import Incarnation, NodeId, Round
from edl.wire.messages import (
    Asked,
    Attach,
    Boundary,
    Dismissed,
    Finish,
    Hanging,
    Hold,
    KeepWith,
    Leaving,
    LoadState,
    Preparing,
    Prestart,
    Ready,
    StartRound,
    StopRound,
    Switch,
    Underway,
)
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, Holding, Version
from tests.unit.edl.master.test_machine import Rule, info


class Aware(Rule):
    """A Master whose workers use ``edl.run``."""

    def underway(self, *names: str) -> None:
        for name in names:
            self.say(name, Underway(self.state.record.round, "in process"))

    def parked(self, name: str, *held: tuple[int, int], stored: Version = NO_STATE, seen: int = -1) -> None:
        holdings = tuple(Holding(Version(era, commit)) for era, commit in held)
        number = self.state.record.round if seen < 0 else Round(seen)
        self.say(name, Ready(number, (9000 + ord(name) + 10 * number, 1, 2), True, holdings, stored))

    def answer(self, name: str, hold: int, commit: int) -> None:
        self.say(name, Boundary(self.state.record.round, hold, commit))

    @property
    def phase(self) -> Phase:
        return self.state.record.phase

    def sent(self, name: str) -> list[object]:
        return [e.message for e in self.effects if isinstance(e, ev.TellNode) and e.node == name]


def trained(names: str = "ab") -> Aware:
    rule = Aware(NodeRange(1, 3))
    rule.join(*names)
    if rule.phase is Phase.FORMING:
        rule.wait(1.0)
    rule.underway(*names)
    assert rule.members == names
    assert rule.state.record.rejoins
    return rule


def growing() -> Aware:
    rule = trained()
    rule.feed(ev.NodeRegistered(info("c")))
    rule.attach("c")
    rule.parked("c", seen=0)
    assert rule.told() == {name: Hold(Round(1), 1, binding=True) for name in "ab"}
    return rule


def test_newcomers_start_their_workers_before_the_world_is_changed() -> None:
    rule = trained()
    rule.feed(ev.NodeRegistered(info("c")))
    rule.attach("c")
    rule.ready("c")
    assert isinstance(rule.told()["c"], Prestart)
    rule.say("c", Preparing(Round(0), "starting"))
    assert rule.state.agreement is None
    rule.parked("c", seen=0)
    assert rule.state.agreement is not None


def test_all_go_on_to_one_beyond_the_highest_answer() -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    assert rule.state.agreement is not None
    rule.answer("b", 1, 8)
    order = rule.told()["a"]
    assert isinstance(order, Switch)
    assert (order.commit, order.purpose, rule.told()["b"]) == (9, Purpose.SWITCH, order)
    assert rule.phase is Phase.FORMING
    rule.parked("a", (1, 9))
    rule.parked("b", (1, 9))
    world = rule.state.record.world
    assert world is not None
    assert (rule.members, world.restore, world.era) == ("abc", Version(1, 9), 2)
    assert [source.node for source in world.sources] == ["a", "b"]


def test_a_worker_that_fails_on_its_way_to_the_boundary_is_charged() -> None:
    """Else a script that fails each time goes on for ever while a node waits to be taken in."""
    rule = growing()
    rule.answer("a", 1, 7)
    rule.answer("b", 1, 8)
    rule.fail("a")
    assert isinstance(rule.told()["b"], StopRound)
    assert rule.state.record.restarts == 1
    rule.fail("b")
    assert rule.state.record.restarts == 1, "one incident"


def test_a_worker_that_speaks_of_a_lost_peer_on_its_way_is_not_charged() -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    rule.answer("b", 1, 8)
    rule.fail("b", peer_loss=True)
    assert rule.state.record.restarts == 0


def test_answers_to_another_agreement_or_round_do_not_count() -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    rule.answer("b", 7, 8)
    rule.say("b", Boundary(Round(9), 1, 8))
    assert rule.state.agreement is not None


def test_an_agreement_that_does_not_come_about_interrupts() -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    rule.wait(60.0)
    assert isinstance(rule.told()["a"], StopRound)
    assert rule.state.record.reason.endswith("no answer from b within 60 s")


def test_a_member_that_was_away_is_asked_again_because_its_workers_have_gone_on() -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    rule.feed(ev.NodeDetached(NodeId("a"), info("a").incarnation))
    rule.feed(ev.NodeAttached(Attach(info("a"), Round(1), Round(1), False, underway=True)))
    assert Hold(Round(1), 2, binding=True) in rule.sent("a")
    assert rule.sent("b") == [Hold(Round(1), 2, binding=True)]
    rule.answer("b", 1, 7)
    rule.answer("a", 1, 7)  # was on the way when its workers were let go
    assert rule.state.agreement is not None
    rule.answer("b", 2, 7)
    rule.answer("a", 2, 8)
    assert rule.state.agreement is None


def passed_on(present: str = "abc") -> Aware:
    """A Master has agreed on commit 9 and died; the next one has nodes ``present``."""
    before = growing()
    before.answer("a", 1, 7)
    before.answer("b", 1, 8)
    return Aware(NodeRange(1, 3), record=before.state.record, present=present)


def reattached(name: str, *, underway: bool = False, unbroken: bool = False, in_doubt: bool = False) -> ev.NodeAttached:
    attach = Attach(info(name), Round(1), Round(1), False)
    return ev.NodeAttached(dataclasses.replace(attach, underway=underway, unbroken=unbroken, in_doubt=in_doubt))


def test_the_next_master_repeats_the_order_for_the_boundary_that_is_recorded() -> None:
    rule = passed_on()
    order = rule.state.record.switch
    assert order is not None
    assert (order.hold, order.commit, order.purpose) == (1, 9, Purpose.SWITCH)
    for name in "ab":
        rule.feed(reattached(name, unbroken=True))
        assert rule.sent(name) == [order]
    assert rule.state.planned
    rule.attach("c")
    rule.parked("c", seen=0)
    for name in "ab":
        rule.parked(name, (1, 9))
    world = rule.state.record.world
    assert world is not None
    assert (world.restore, rule.members, rule.state.record.switch) == (Version(1, 9), "abc", None)


def test_a_member_that_has_broken_its_round_off_ends_the_way_to_the_boundary_for_all() -> None:
    rule = passed_on()
    rule.feed(reattached("a", unbroken=True))
    rule.feed(reattached("b"))
    assert {name: type(message) for name, message in rule.told().items()} == {"a": StopRound, "b": StopRound}
    assert (rule.state.record.switch, rule.state.planned) == (None, False)


def test_a_boundary_is_given_up_if_a_member_is_lost_before_the_next_master_rules() -> None:
    rule = passed_on("ac")
    assert rule.state.record.switch is None
    rule.feed(reattached("a", unbroken=True))
    assert [type(message) for message in rule.sent("a")] == [StopRound]


@pytest.mark.parametrize(
    "last", [Ready(Round(1), (9097, 1, 2), stopped_itself=True), Preparing(Round(1), "?", (), True)]
)
def test_a_member_that_has_killed_its_workers_ends_the_way_to_the_boundary_for_all(last: Ready | Preparing) -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    rule.answer("b", 1, 8)
    rule.say("a", last)
    assert isinstance(rule.told()["b"], StopRound)


@pytest.mark.parametrize(
    "last", [Ready(Round(0), (9100, 1, 2), True, stopped_itself=True), Preparing(Round(0), "?", (), True)]
)
def test_a_spare_that_has_killed_its_workers_once_disturbs_no_boundary(last: Ready | Preparing) -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    rule.answer("b", 1, 8)
    rule.say("c", last)
    assert rule.state.record.switch is not None
    assert not [message for name in "ab" for message in rule.sent(name)]


def test_workers_in_doubt_about_an_agreement_that_came_to_nothing_train_on() -> None:
    rule = trained()
    rule.feed(ev.NodeDetached(NodeId("a"), info("a").incarnation))
    for in_doubt in (False, True):
        rule.feed(reattached("a", underway=True, unbroken=True, in_doubt=in_doubt))
        sent = [(order.hold, order.purpose) for order in rule.sent("a") if isinstance(order, Switch)]
        assert sent == ([(0, Purpose.SET)] if in_doubt else [])


def test_a_checkpoint_that_is_not_agreed_on_lets_all_go_on() -> None:
    rule = trained()
    rule.feed(ev.OperatorRequest(Asked(Purpose.SAVE, "me")))
    rule.answer("a", 1, 7)
    rule.wait(60.0)
    assert rule.told() == {name: Switch(Round(1), 1, 0, Purpose.SAVE, "checkpoint requested by me") for name in "ab"}
    assert rule.phase is Phase.RUNNING


def test_a_checkpoint_that_is_not_agreed_on_before_the_world_changes_is_owed_by_the_next() -> None:
    rule = trained()
    rule.feed(ev.OperatorRequest(Asked(Purpose.SAVE, "me")))
    rule.feed(ev.NodeExpired(NodeId("b"), info("b").incarnation))
    rule.parked("a", (1, 6))
    assert (rule.members, rule.phase) == ("a", Phase.RUNNING)
    rule.underway("a")
    assert Hold(Round(2), 2) in rule.sent("a")
    rule.answer("a", 2, 7)
    assert "boundary: checkpoint requested by me: saving commit 8" in notes(rule)
    rule.wait(1.0)
    assert rule.state.agreement is None, "one is enough"


def test_a_checkpoint_that_gives_way_to_a_change_of_the_world_is_owed_by_the_next() -> None:
    rule = trained()
    rule.feed(ev.OperatorRequest(Asked(Purpose.SAVE, "me")))
    rule.feed(ev.NodeRegistered(info("c")))
    rule.attach("c")
    rule.parked("c", seen=0)
    agreement = rule.state.agreement
    assert agreement is not None and agreement.purpose is Purpose.SAVE, "the newcomer waits for it"
    rule.say("a", Leaving("the host goes away", 30.0))
    agreement = rule.state.agreement
    assert agreement is not None and agreement.purpose is Purpose.SWITCH
    for name in "ab":
        rule.answer(name, agreement.number, 7)
    for name in "ab":
        rule.parked(name, (1, 8))
    assert rule.phase is Phase.RUNNING
    rule.underway(*rule.members)
    agreement = rule.state.agreement
    assert agreement is not None and agreement.purpose is Purpose.SAVE


def test_a_checkpoint_that_is_asked_for_too_early_is_written_once_the_world_trains() -> None:
    """A ``SAVE`` file asks when the workers of its own node train."""
    rule = Aware(NodeRange(1, 2))
    rule.join("a", "b")
    rule.underway("a")
    rule.say("a", Asked(Purpose.SAVE, "the file SAVE"))
    assert rule.state.agreement is None
    rule.underway("b")
    assert rule.state.agreement is not None
    assert rule.state.agreement.purpose is Purpose.SAVE
    for name in "ab":
        rule.answer(name, rule.state.agreement.number, 7)
    assert notes(rule) == ["boundary: checkpoint requested by the file SAVE: saving commit 8"]
    rule.wait(1.0)
    assert rule.state.agreement is None


def test_trouble_on_the_way_to_the_boundary_makes_it_an_interruption() -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    rule.answer("b", 1, 7)
    rule.lose("b")
    assert isinstance(rule.told()["a"], StopRound)
    rule.parked("a", (1, 7))
    assert rule.members == "ac"


def test_others_go_on_without_a_member_whose_worker_died() -> None:
    rule = trained()
    rule.fail("b")
    rule.say("b", Preparing(Round(1), "starting", (Holding(Version(1, 6)),)))
    rule.parked("a", (1, 5))
    world = rule.state.record.world
    assert world is not None
    assert (rule.members, world.restore) == ("a", Version(1, 6))


def test_where_all_start_again_all_are_waited_for() -> None:
    rule = trained()
    rule.fail("b")
    for name in "ab":
        rule.say(name, Preparing(Round(1), "starting"))
    rule.parked("a", (1, 5))
    assert rule.phase is Phase.FORMING
    rule.parked("b", (1, 5))
    assert rule.members == "ab"


def test_a_drained_node_goes_when_the_others_are_underway() -> None:
    rule = trained()
    rule.say("b", Leaving("SIGTERM", 5.0))
    rule.answer("a", 1, 7)
    rule.answer("b", 1, 7)
    rule.parked("b", (1, 8))
    rule.parked("a", (1, 8))
    assert rule.members == "a"
    assert not any(isinstance(message, Dismissed) for message in rule.sent("b")), "it may be the one with the state"
    rule.underway("a")
    assert any(isinstance(message, Dismissed) for message in rule.sent("b"))
    assert rule.state.nodes[NodeId("b")].status is NodeStatus.LEAVING


def test_the_kill_switch_outweighs_what_is_being_agreed_on() -> None:
    rule = growing()
    rule.say("a", Asked(Purpose.KILL, "the file KILL"))
    assert rule.told()["b"] == Hold(Round(1), 2, binding=True)
    rule.answer("a", 2, 7)
    rule.answer("b", 2, 7)
    order = rule.told()["a"]
    assert isinstance(order, Switch)
    assert order.purpose is Purpose.KILL
    rule.parked("a", (1, 8))
    rule.parked("b", (1, 8))
    assert rule.told()["a"] == Finish(ExitCode.KILLED, "stopped by the file KILL")


def notes(rule: Aware) -> list[str]:
    return [f"{effect.kind.value}: {effect.text}" for effect in rule.effects if isinstance(effect, ev.HistoryNote)]


def test_the_history_says_once_who_stops_the_job_and_where_it_ends() -> None:
    rule = trained()
    rule.say("a", Asked(Purpose.KILL, "kim"))
    assert notes(rule) == []
    assert rule.reason == "stop requested by kim; agreeing on a step boundary"
    rule.answer("a", 1, 7)
    rule.answer("b", 1, 8)
    text = "stop requested by kim: the job ends at commit 9"
    assert notes(rule) == [f"boundary: {text}"]
    assert rule.told()["b"] == Switch(Round(1), 1, 9, Purpose.KILL, text), "the other consoles show the same line"
    rule.parked("a", (1, 9))
    rule.parked("b", (1, 9))
    assert notes(rule) == ["job-ended: stopped by kim"]


def test_a_stop_without_a_boundary_says_that_there_is_no_new_checkpoint() -> None:
    rule = Aware(NodeRange(2, 2))
    rule.join("a", "b")
    rule.say("a", Asked(Purpose.KILL, "kim"))
    assert notes(rule) == ["world-stopped: stop requested by kim: the job ends without a new checkpoint"]
    rule = Aware(NodeRange(2, 2))
    rule.join("a", "b")
    rule.fail("a")
    rule.say("a", Asked(Purpose.KILL, "kim"))
    assert notes(rule) == ["boundary: stop requested by kim: the job ends once its workers have stopped"]


def test_a_hang_is_charged_once_and_stacks_are_written() -> None:
    rule = trained()
    rule.say("a", Hanging(Round(1), "no progress for 60 s"))
    assert rule.told()["b"] == StopRound(Round(1), "no progress for 60 s on a; restart 1 of 1", dump=True)
    rule.say("b", Hanging(Round(1), "no progress for 60 s"))
    assert rule.state.record.restarts == 1


def test_the_spare_of_a_single_node_is_asked_what_it_has_by_now() -> None:
    rule = Aware(NodeRange(1, 1))
    rule.join("a", "b")
    rule.underway("a")
    assert KeepWith(NodeId("b"), "b", 0) in rule.sent("a") or rule.state.nodes[NodeId("b")].orders.prestart
    rule.parked("b", seen=0)
    rule.lose("a")
    assert isinstance(rule.told()["b"], StopRound)
    rule.parked("b", (1, 6), seen=0)
    world = rule.state.record.world
    assert world is not None
    assert (rule.members, world.restore) == ("b", Version(1, 6))


def test_a_source_outside_the_world_that_dies_too_soon_is_planned_without() -> None:
    rule = Aware(NodeRange(1, 1))
    rule.join("a", "b")
    rule.parked("b", (1, 6), seen=0)
    rule.say("a", Ready(Round(1), (1, 2, 3), True))
    world = rule.state.record.world
    assert world is not None
    assert (rule.members, [source.node for source in world.sources]) == ("a", ["b"])
    rule.lose("b")
    assert rule.phase is Phase.FORMING
    assert rule.state.record.restarts == 0


def test_a_world_of_another_size_begins_from_a_sharded_state_in_memory() -> None:
    rule = growing()
    rule.answer("a", 1, 7)
    rule.answer("b", 1, 7)
    for first, name in ((0, "a"), (2, "b")):
        held = tuple(Holding(Version(1, 8), shard, 4) for shard in (first, first + 1))
        rule.say(name, Ready(Round(1), (9300 + first, 1, 2), True, held))
    world = rule.state.record.world
    assert world is not None
    assert (rule.members, world.restore, world.shards) == ("abc", Version(1, 8), 4)
    assert [(source.node, source.shard) for source in world.sources] == [("a", 0), ("a", 1), ("b", 2), ("b", 3)]


def test_the_checkpoint_is_read_by_one_node_before_the_world_forms() -> None:
    rule = Aware(NodeRange(1, 2))
    for name in "ab":
        rule.feed(ev.NodeRegistered(info(name)))
        rule.attach(name)
    for name in "ab":
        rule.parked(name, stored=Version(2, 30), seen=0)
    assert {name: type(message) for name, message in rule.told().items()} == {"a": LoadState}
    rule.parked("a", (2, 30), stored=Version(2, 30), seen=0)
    order = rule.told()["b"]
    assert isinstance(order, StartRound)
    assert (order.world.restore, order.world.era) == (Version(2, 30), 3)


def test_what_a_node_has_said_before_it_had_the_order_to_read_says_nothing_about_the_checkpoint() -> None:
    """It may report twice in a moment, such as when a copy arrives. The next world must not begin from scratch."""
    rule = Aware(NodeRange(1, 1))
    rule.feed(ev.NodeRegistered(info("a")))
    rule.attach("a")
    rule.parked("a", stored=Version(2, 30), seen=0)
    assert {name: type(message) for name, message in rule.told().items()} == {"a": LoadState}
    rule.parked("a", (2, 20), stored=Version(2, 30), seen=0)
    assert (rule.told(), rule.state.nodes[NodeId("a")].status) == ({}, NodeStatus.LOADING)
    rule.parked("a", (2, 30), stored=Version(2, 30), seen=0)
    order = rule.told()["a"]
    assert isinstance(order, StartRound)
    assert order.world.restore == Version(2, 30)


@pytest.mark.parametrize(("held", "stored", "begins"), [((2, 20), (2, 20), (2, 20)), ((2, 40), (2, 40), (2, 40))])
def test_what_a_node_could_read_is_what_the_world_begins_from(
    held: tuple[int, int], stored: tuple[int, int], begins: tuple[int, int]
) -> None:
    """The newest one may be corrupt, and another one may have come."""
    rule = Aware(NodeRange(1, 1))
    rule.feed(ev.NodeRegistered(info("a")))
    rule.attach("a")
    rule.parked("a", stored=Version(2, 30), seen=0)
    rule.parked("a", held, stored=Version(*stored), seen=0)
    order = rule.told()["a"]
    assert isinstance(order, StartRound)
    assert order.world.restore == Version(*begins)


def test_a_node_that_reads_for_longer_than_it_may_is_replaced_by_another() -> None:
    rule = Aware(NodeRange(1, 2))
    for name in "ab":
        rule.feed(ev.NodeRegistered(info(name)))
        rule.attach(name)
    for name in "ab":
        rule.parked(name, stored=Version(2, 30), seen=0)
    rule.wait(89.0)
    assert rule.reason == "waiting for the first nodes; waiting for a"
    rule.wait(1.0)  # --loading-timeout
    rule.wait(1.0)  # --join-grace
    assert {name: type(message) for name, message in rule.told().items()} == {"b": LoadState}


@pytest.mark.parametrize("level", FaultTolerance)
def test_a_plain_script_is_never_asked_to_hold(level: FaultTolerance) -> None:
    rule = Aware(NodeRange(1, 3), level)
    rule.join("a")
    rule.wait(1.0)
    rule.join("b")
    assert not any(isinstance(message, Hold | Prestart) for message in rule.told().values())
    assert Incarnation(2) not in rule.state.dead
