"""From a request to a world that conforms to it, as the Master sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edl.config import FaultTolerance, NodeRange
from edl.exit_codes import ExitCode
from edl.master import events as ev
from edl.master.machine import take_over
from edl.master.state import NodeStatus, Phase
from edl.master.view import job_status
from edl.types import Incarnation, NodeId, Round
from edl.wire import plain
from edl.wire.messages import (
    Asked,
    Attach,
    Depart,
    Dismissed,
    Hold,
    Idle,
    Kept,
    Leaving,
    Pace,
    Prestart,
    Ready,
    StartRound,
    StopRound,
    Switch,
    Underway,
)
from edl.wire.purpose import Purpose
from edl.wire.records import Holding, Version
from edl.wire.scale_requests import (
    Cordon,
    Drain,
    DrainMode,
    Resize,
    ScaleRequest,
    ScaleView,
    SetBounds,
    Suspend,
    Verdict,
)
from tests.unit.edl.master.test_machine import Rule, info
from tests.unit.edl.master.test_planning import Aware

UP_TO_FOUR = NodeRange(1, 4)


class Resizable(Aware):
    """A Master that people ask for sizes."""

    def submit(self, request: ScaleRequest, **facts: Any) -> Verdict:
        self.feed(ev.ScaleRequested(request, **facts))
        (grant,) = [effect for effect in self.effects if isinstance(effect, ev.Grant)]
        return grant.verdict

    def arrive(self, names: str, index: bool = False) -> None:
        """Nodes register, attach, and have workers that wait."""
        for name in names:
            who = dataclasses.replace(info(name), index=ord(name) - 97) if index else info(name)
            self.feed(ev.NodeRegistered(who))
            self.feed(ev.NodeAttached(Attach(who, Round(0), Round(0), False)))
        for name in names:
            self.parked(name, seen=0)

    def boundary(self, commit: int = 9) -> Purpose:
        """All members answer; returns for what."""
        assert self.state.agreement is not None
        number = self.state.agreement.number
        for name in self.members:
            self.answer(name, number, commit - 1)
        order = next(m for m in self.told().values() if isinstance(m, Switch))
        return order.purpose

    def park(self, names: str, commit: int = 9) -> None:
        for name in names:
            self.parked(name, (1, commit))

    def change(self, commit: int = 9) -> None:
        """The agreed change comes about, and the next world is underway."""
        members = self.members
        assert self.boundary(commit) is Purpose.SWITCH
        self.park("".join(name for name in members if NodeId(name) in self.state.nodes), commit)
        self.underway(*self.members)

    @property
    def scale(self) -> ScaleView:
        return job_status(self.state, NodeId("a"), (), now_s=self.now_s).scale

    @property
    def notes(self) -> list[str]:
        return [e.text for e in self.effects if isinstance(e, ev.HistoryNote) and e.kind is ev.Kind.SCALE]


def training(
    names: str = "abc", bounds: NodeRange = UP_TO_FOUR, level: FaultTolerance = FaultTolerance.ELASTIC, **more: Any
) -> Resizable:
    rule = Resizable(bounds, level)
    if more:
        rule.spec = dataclasses.replace(rule.spec, **more)
        rule.state = dataclasses.replace(rule.state, spec=rule.spec)
    rule.arrive(names, index=bool(more.get("scheduler")))
    if rule.phase is Phase.FORMING:
        rule.wait(1.0)
    rule.underway(*names)
    assert rule.members == names
    return rule


def test_a_request_that_is_repeated_with_its_key_begins_nothing() -> None:
    rule = training("abc", cooldown_s=30.0)
    assert rule.submit(Resize(2, "me", key="k")) is Verdict.ACCEPTED
    rule.change()
    assert (rule.members, rule.state.resizing) == ("ab", False)
    assert rule.submit(Resize(2, "me", key="k")) is Verdict.ACCEPTED
    assert not rule.state.resizing, "or nodes that come now would wait for the cool-down"


class TestSize:
    def test_fewer_at_one_boundary_whoever_came_last_goes_first(self) -> None:
        rule = training("abcd")
        assert rule.submit(Resize(2, "me", "quiet")) is Verdict.ACCEPTED
        assert rule.notes == ["2 nodes requested by me: quiet"]
        assert {type(m) for m in rule.told().values()} == {Hold}
        rule.change()
        assert (rule.members, rule.scale.observed, rule.scale.waiting) == ("ab", 1, "")
        assert rule.notes == ["2 nodes in round 2, as requested by me"]
        world = rule.state.record.world
        assert world is not None
        assert world.restore == Version(1, 9)
        spares = [n.node for n in job_status(rule.state, NodeId("a"), ()).nodes if n.state == "spare"]
        assert spares == ["c", "d"]

    def test_more_when_somebody_asks_takes_spares_in(self) -> None:
        rule = training("abcd")
        rule.submit(Resize(2, "me"))
        rule.change()
        rule.submit(Resize(4, "me"))
        rule.change(19)
        assert (rule.members, rule.scale.observed) == ("abcd", 2)

    def test_fewer_than_are_wanted_train_until_others_come(self) -> None:
        rule = training("ab")
        rule.submit(Resize(4, "me"))
        assert rule.state.agreement is None
        assert (rule.scale.observed, rule.scale.waiting) == (1, "2 more nodes to come: 2 of 4 train")
        rule.arrive("c")
        rule.change()
        assert (rule.members, rule.scale.waiting) == ("abc", "1 more node to come: 3 of 4 train")

    def test_fewer_than_the_least_train_on_until_others_come(self) -> None:
        rule = training("ab")
        rule.submit(SetBounds(3, 4, "me"))
        assert (rule.phase, rule.state.agreement) == (Phase.RUNNING, None)
        assert (rule.scale.observed, rule.scale.waiting) == (1, "1 more node to come: 2 of 3 train")

    def test_who_comes_beyond_what_is_wanted_is_a_spare(self) -> None:
        rule = training("ab")
        rule.submit(Resize(2, "me"))
        rule.arrive("c")
        assert (rule.state.agreement, rule.phase, rule.members) == (None, Phase.RUNNING, "ab")

    def test_the_newest_request_wins_while_a_change_is_under_way(self) -> None:
        rule = training("abcd")
        rule.submit(Resize(2, "me"))
        assert rule.boundary() is Purpose.SWITCH
        rule.submit(Resize(3, "me"))
        rule.submit(Resize(1, "me"))
        rule.park("abcd")
        rule.underway(*rule.members)
        assert (rule.members, rule.scale.observed, rule.state.record.round) == ("a", 3, 2)

    def test_a_plain_script_is_interrupted(self) -> None:
        rule = Resizable(NodeRange(1, 3))
        rule.join("a", "b", "c")
        rule.submit(Resize(1, "me"))
        assert {type(m) for m in rule.told().values()} == {StopRound}
        for name in "abc":
            rule.ready(name, 1)
        assert (rule.members, rule.scale.observed) == ("a", 1)

    def test_the_first_world_keeps_to_it(self) -> None:
        rule = Resizable(NodeRange(1, 4))
        rule.submit(Resize(2, "me"))
        rule.join("a", "b")
        assert rule.members == "ab"

    def test_the_scheduler_takes_the_highest_indexes(self) -> None:
        rule = Resizable(NodeRange(1, 4))
        for name, index in (("a", 3), ("b", 0), ("c", 1), ("d", 2)):
            who = dataclasses.replace(info(name), index=index)
            rule.feed(ev.NodeRegistered(who))
            rule.feed(ev.NodeAttached(Attach(who, Round(0), Round(0), False)))
            rule.parked(name, seen=0)
        rule.underway(*"abcd")
        rule.submit(Resize(2, "me"))
        rule.change()
        assert rule.members == "bc"

    def test_what_is_done_stays_done(self) -> None:
        rule = training("ab")
        rule.attach("a", seen=1, running=1, done=True)
        rule.submit(Resize(1, "me"))
        assert (rule.phase, rule.state.agreement) == (Phase.RUNNING, None)
        assert rule.scale.waiting == "the workers finish"

    def test_a_sharded_state_that_is_only_in_memory_lets_the_size_change(self) -> None:
        rule = training("ab")
        nodes = {n: e._replace(holdings=(Holding(Version(1, 5), 0, 4),)) for n, e in rule.state.nodes.items()}
        rule.state = dataclasses.replace(rule.state, nodes=nodes)
        assert rule.submit(Resize(1, "me"), saves=False) is Verdict.ACCEPTED
        assert rule.state.agreement is not None


class TestLevels:
    def test_recover_goes_on_with_fewer_when_asked_to(self) -> None:
        rule = training("abc", level=FaultTolerance.RECOVER)
        rule.submit(Resize(2, "me"))
        rule.change()
        assert rule.members == "ab"

    def test_recover_keeps_the_size_until_there_are_as_many_as_are_requested(self) -> None:
        rule = training("ab", level=FaultTolerance.RECOVER)
        rule.submit(Resize(4, "me"))
        rule.arrive("c")
        assert rule.state.agreement is None
        rule.arrive("d")
        rule.change()
        assert rule.members == "abcd"

    def test_shrink_grows_to_what_is_requested_and_no_further(self) -> None:
        rule = training("ab", level=FaultTolerance.SHRINK)
        rule.arrive("c")
        rule.arrive("d")
        assert rule.state.agreement is None
        rule.submit(Resize(3, "me"))
        rule.change()
        assert rule.members == "abc"


class TestBounds:
    def test_they_hold_from_then_on(self) -> None:
        rule = training("abc")
        assert rule.submit(SetBounds(1, 2, "me")) is Verdict.ACCEPTED
        rule.change()
        assert (rule.members, rule.scale.maximum) == ("ab", 2)
        rule.submit(SetBounds(1, 8, "me"))
        rule.change(19)
        assert rule.members == "abc"

    def test_a_world_below_them_is_left_alone(self) -> None:
        rule = training("ab")
        rule.submit(SetBounds(3, 4, "me"))
        assert (rule.phase, rule.state.agreement) == (Phase.RUNNING, None)
        rule.arrive("c")
        rule.change()
        assert rule.members == "abc"

    def test_the_next_master_goes_by_them(self) -> None:
        rule = training("ab")
        rule.submit(SetBounds(3, 4, "me"))
        decision = take_over(rule.spec, rule.state.record, [info("a"), info("b")], 0.0)
        assert decision.state.record.sizing.bounds(rule.spec.nodes) == NodeRange(3, 4)


class TestCooling:
    def test_the_next_resize_waits_and_says_until_when(self) -> None:
        rule = training("abc", cooldown_s=30.0)
        rule.submit(Resize(2, "me"))
        rule.change()
        rule.wait(10.0)
        rule.submit(Resize(1, "me"))
        assert (rule.state.agreement, rule.scale.observed) == (None, 1)
        assert rule.scale.waiting.startswith("1 nodes in 20 s: --scale-cooldown=30")
        assert ev.WakeAt(rule.now_s + 20.0) in rule.effects
        rule.wait(20.0)
        rule.change(19)
        assert rule.members == "a"

    def test_a_cordon_does_not_wait(self) -> None:
        rule = training("abc", cooldown_s=30.0)
        rule.submit(Resize(2, "me"))
        rule.change()
        rule.submit(Cordon("b", True, "me"))
        rule.change(19)
        assert rule.members == "ac"

    def test_who_joins_what_was_requested_before_does_not_wait(self) -> None:
        rule = training("ab", cooldown_s=30.0)
        rule.submit(Resize(4, "me"))
        rule.arrive("c")
        rule.change()
        rule.arrive("d")
        rule.change(19)
        assert rule.members == "abcd"


class TestCordon:
    def test_a_member_goes_at_a_boundary_and_its_launcher_stays(self) -> None:
        rule = training("abc")
        rule.submit(Cordon("b", True, "me", "hot"))
        rule.change()
        assert (rule.members, rule.scale.cordoned, rule.scale.observed) == ("ac", ("b",), 1)
        states = {n.node: n.state for n in job_status(rule.state, NodeId("a"), ()).nodes}
        assert states == {"a": "running", "c": "running", "b": "cordoned"}

    def test_who_waits_for_more_nodes_is_shown_the_one_that_is_kept_out(self) -> None:
        rule = training("abc")
        rule.submit(Cordon("b", True, "me", "hot"))
        rule.change()
        rule.submit(SetBounds(3, 4, "me"))
        assert rule.scale.waiting == "1 more node to come: 2 of 3 train, b cordoned (edl uncordon)"

    def test_together_with_a_smaller_size_it_is_one_boundary(self) -> None:
        rule = training("abcd")
        rule.submit(Cordon("a", True, "me"))
        rule.submit(Resize(2, "me"))
        rule.change()
        assert (rule.members, rule.state.record.round, rule.scale.observed) == ("bc", 2, 2)

    def test_one_that_comes_back_under_its_name_takes_no_part_either(self) -> None:
        rule = training("ab")
        rule.submit(Cordon("b", True, "me"))
        rule.change()
        rule.lose("b")
        rule.feed(ev.NodeRegistered(info("b", 1)))
        rule.attach("b", life=1)
        rule.say("b", Ready(Round(0), (1, 2, 3), True), life=1)
        assert rule.state.agreement is None
        rule.submit(Cordon("b", False, "me"))
        assert rule.state.agreement is not None

    def test_a_member_without_which_there_is_no_world_stays_until_there_are_others(self) -> None:
        rule = training("abc", NodeRange(2, 4))
        rule.submit(Cordon("c", True, "me"))
        rule.lose("b")
        rule.park("ac")
        assert rule.phase is Phase.FORMING
        assert "1 node ready, at least 2 needed" in rule.reason


class TestDrain:
    def test_several_leave_at_one_boundary_and_are_dismissed(self) -> None:
        rule = training("abcd")
        assert rule.submit(Drain(("c", "d"), "me", "spot", 20.0)) is Verdict.ACCEPTED
        told = [m for name in "cd" for m in rule.sent(name) if isinstance(m, Depart)]
        assert told == [Depart("me: spot", 20.0, DrainMode.TRY)] * 2
        for name in "cd":
            rule.say(name, Leaving("me: spot", 10.0))
        assert rule.boundary() is Purpose.SWITCH
        rule.park("abcd")
        assert rule.members == "ab"
        rule.underway("a")
        rule.feed(ev.NodeSaid(NodeId("b"), info("b").incarnation, _underway(rule)))
        assert {n: m for n, m in rule.told().items() if n in ("c", "d")} == {
            n: Dismissed("the others continue without this node") for n in ("c", "d")
        }
        assert rule.scale.observed == 0
        for name in "cd":
            rule.feed(ev.NodeDetached(NodeId(name), info(name).incarnation))
            assert rule.scale.observed == 0
            rule.lose(name)
        assert (rule.scale.observed, rule.state.record.departing) == (1, ())

    def test_a_spare_goes_at_once(self) -> None:
        rule = training("ab", NodeRange(1, 2))
        rule.arrive("c")
        rule.submit(Drain(("c",), "me"))
        assert isinstance(rule.told()["c"], Depart)
        assert rule.state.agreement is None
        rule.say("c", Leaving("me", 5.0))
        assert rule.told()["c"] == Dismissed("nothing to wait for")

    def test_one_that_is_away_is_told_when_it_attaches_and_again_on_each_new_stream(self) -> None:
        rule = training("abc")
        rule.feed(ev.NodeDetached(NodeId("c"), info("c").incarnation))
        rule.submit(Drain(("c",), "me"))
        assert "c" not in rule.told()
        rule.feed(ev.NodeAttached(Attach(info("c"), Round(1), Round(1), False, underway=True)))
        assert isinstance(rule.sent("c")[0], Depart)
        rule.wait(0.1)
        assert not rule.sent("c")

    def test_the_next_master_has_it_leave_as_well(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me"))
        rule.state = take_over(rule.spec, rule.state.record, [info(n) for n in "abc"], rule.now_s).state
        rule.feed(ev.NodeAttached(Attach(info("c"), Round(1), Round(1), False, underway=True)))
        assert isinstance(rule.sent("c")[0], Depart)

    def test_a_launcher_that_comes_back_under_the_name_is_another_one(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me"))
        rule.feed(ev.NodeRegistered(info("c", 1)))
        rule.attach("c", life=1)
        rule.say("c", Ready(Round(0), (1, 2, 3), True), life=1)
        assert rule.state.record.departing == ()
        assert not any(isinstance(m, Depart) for m in rule.sent("c"))

    def test_with_care_a_checkpoint_comes_first(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me", mode=DrainMode.MUST))
        assert rule.boundary(9) is Purpose.SAVE
        assert not any(isinstance(m, Depart) for m in rule.sent("c"))
        rule.say("a", Kept(Version(1, 8), "dir"))
        assert not rule.sent("c")
        rule.say("a", Kept(Version(1, 9), "dir", took_s=2.0))
        assert isinstance(rule.sent("c")[0], Depart)
        assert rule.state.agreement is not None

    def test_the_newest_request_about_a_node_counts(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me", deadline_s=60.0, mode=DrainMode.MUST))
        rule.submit(Drain(("c",), "me", "the host\n burns", 5.0, DrainMode.NO))
        assert rule.sent("c")[0] == Depart("me: the host burns", 5.0, DrainMode.NO)
        rule.submit(Drain(("c",), "you", deadline_s=1.0))
        assert rule.sent("c")[0] == Depart("you", 1.0, DrainMode.TRY)
        assert [one.node for one in rule.state.record.departing] == ["c"]

    def test_a_node_that_the_job_waits_for_is_told_so(self) -> None:
        rule = training("ab", NodeRange(2, 4))
        rule.say("b", Leaving("SIGTERM", 10.0))
        rule.boundary()
        rule.park("ab")
        assert rule.told()["b"] == Dismissed("too few nodes are left for a world without this one", needed=True)

    def test_so_is_one_of_a_plain_script(self) -> None:
        rule = Resizable(NodeRange(1, 2))
        rule.join("a", "b")
        rule.say("b", Leaving("SIGTERM"))
        assert rule.sent("b") == [Dismissed("nothing to wait for")]
        rule.say("a", Leaving("SIGTERM"))
        assert rule.sent("a") == [Dismissed("nothing to wait for", needed=True)]


class TestSuspend:
    def suspended(self) -> Resizable:
        rule = training("ab")
        rule.submit(Suspend(True, "me"))
        assert rule.boundary() is Purpose.KILL
        rule.park("ab")
        return rule

    def test_all_commit_at_a_boundary_and_no_worker_stays(self) -> None:
        rule = self.suspended()
        assert (rule.phase, rule.members, rule.scale.observed) == (Phase.FORMING, "ab", 0)
        assert isinstance(rule.sent("b")[0], Idle)
        for name in "ab":
            rule.say(name, Ready(Round(1), (1, 2, 3), False, (Holding(Version(1, 9)),)))
        assert (rule.scale.observed, rule.scale.suspended, rule.scale.waiting) == (1, True, "")
        assert rule.reason.startswith("the job is suspended")

    def test_with_a_checkpoint_even_if_another_size_is_being_agreed_on(self) -> None:
        rule = training("ab")
        rule.submit(Resize(1, "me"))
        rule.submit(Suspend(True, "me"))
        assert rule.boundary() is Purpose.KILL

    def test_who_waits_for_nodes_is_told_of_those_that_are_kept_out(self) -> None:
        rule = training("ab", NodeRange(2, 4))
        rule.submit(Suspend(True, "me"))
        rule.boundary()
        rule.park("ab")
        for name in "ab":
            rule.say(name, Ready(Round(1), (1, 2, 3), False, (Holding(Version(1, 9)),)))
        assert rule.submit(Cordon("b", True, "me")) is Verdict.ACCEPTED
        rule.submit(Suspend(False, "me"))
        assert "at least 2 needed (--nnodes=2:4), b cordoned (edl uncordon)" in rule.scale.waiting

    def test_nobody_gives_up_and_nodes_come_and_go(self) -> None:
        rule = self.suspended()
        for _ in range(3):
            rule.wait(100.0)
        rule.feed(ev.NodeRegistered(info("c")))
        rule.attach("c")
        rule.ready("c")
        assert {type(m) for m in rule.sent("c")} == {Idle}
        rule.lose("c")
        assert rule.phase is Phase.FORMING

    def test_it_goes_on_from_the_state_in_memory(self) -> None:
        rule = self.suspended()
        for name in "ab":
            rule.say(name, Ready(Round(1), (1, 2, 3), False, (Holding(Version(1, 9)),)))
        rule.wait(1000.0)
        rule.submit(Suspend(False, "me"))
        world = rule.state.record.world
        assert world is not None
        assert (rule.phase, rule.members, world.restore) == (Phase.RUNNING, "ab", Version(1, 9))
        assert all(isinstance(m, StartRound) for m in rule.told().values())

    def test_spares_start_workers_ahead_again(self) -> None:
        rule = self.suspended()
        rule.submit(Resize(1, "me"))
        for name in "ab":
            rule.say(name, Ready(Round(1), (1, 2, 3), False, (Holding(Version(1, 9)),)))
        rule.submit(Suspend(False, "me"))
        assert (rule.members, type(rule.told()["b"])) == ("a", Prestart)

    def test_a_plain_script_is_stopped(self) -> None:
        rule = Resizable(NodeRange(1, 2))
        rule.join("a", "b")
        rule.submit(Suspend(True, "me"))
        assert {type(m) for m in rule.told().values()} == {StopRound}
        for name in "ab":
            rule.ready(name, 1)
        assert rule.scale.observed == 1
        rule.submit(Suspend(False, "me"))
        assert rule.members == "ab"

    def test_the_next_master_forms_no_world_either(self) -> None:
        rule = self.suspended()
        rule.state = take_over(rule.spec, rule.state.record, [info("a"), info("b")], rule.now_s).state
        for name in "ab":
            rule.attach(name, seen=1)
            rule.parked(name, (1, 9))
        assert (rule.phase, type(rule.sent("b")[0])) == (Phase.FORMING, Idle)

    def test_the_kill_switch_still_ends_it(self) -> None:
        rule = self.suspended()
        for name in "ab":
            rule.say(name, Ready(Round(1), (1, 2, 3), False, (Holding(Version(1, 9)),)))
        rule.feed(ev.OperatorRequest(Asked(Purpose.KILL, "me")))
        assert rule.state.record.outcome is not None
        assert rule.state.record.outcome.exit_code == ExitCode.KILLED
        assert rule.submit(Suspend(False, "me")) is Verdict.REFUSED

    def test_a_drain_with_care_goes_once_what_is_in_memory_is_written(self) -> None:
        rule = self.suspended()
        for name in "ab":
            rule.say(name, Ready(Round(1), (1, 2, 3), False, (Holding(Version(1, 9)),)))
        rule.submit(Drain(("b",), "me", mode=DrainMode.MUST))
        assert not rule.sent("b")
        rule.say("a", Kept(Version(1, 9), "dir"))
        assert isinstance(rule.sent("b")[0], Depart)


class TestView:
    def test_need_is_a_step_and_twice_a_checkpoint(self) -> None:
        rule = training("ab")
        rule.say("a", Pace(Round(1), 5, 0.5))
        rule.say("b", Pace(Round(1), 5, 0.75))
        rule.say("a", Kept(Version(1, 5), "dir", took_s=2.0))
        assert rule.scale.need_s == 4.75

    def test_nobody_has_asked(self) -> None:
        scale = training("ab").scale
        assert (scale.desired, scale.asked, scale.nodes, scale.generation, scale.waiting) == (4, 0, 2, 0, "")

    def test_an_ended_job_waits_for_nothing(self) -> None:
        rule = training("ab")
        rule.submit(Resize(1, "me"))
        rule.feed(ev.Failed("no more"))
        assert (rule.scale.nodes, rule.scale.waiting) == (0, "")
        assert rule.submit(Resize(2, "me")) is Verdict.REFUSED


def _underway(rule: Rule) -> Any:
    return Underway(rule.state.record.round, "in process")


def test_a_request_for_a_node_that_left_changes_nothing_else() -> None:
    rule = training("ab")
    assert rule.submit(Drain(("x",), "me")) is Verdict.UNKNOWN
    assert rule.submit(Cordon("x", True, "me")) is Verdict.UNKNOWN
    assert rule.state.record.sizing.generation == 0
    assert rule.state.nodes[NodeId("a")].status is NodeStatus.RUNNING
    assert Incarnation(1) == rule.state.nodes[NodeId("a")].info.incarnation


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_size_that_holds_is_conformed_to_at_once(nodes: int) -> None:
    rule = training("abc"[:nodes])
    rule.submit(Resize(nodes, "me"))
    assert (rule.scale.observed, rule.state.agreement) == (1, None)


@pytest.mark.parametrize(
    "request_of", [lambda name, text: Drain((name,), text, text), lambda name, text: Cordon(name, True, text, text)]
)
def test_long_words_do_not_make_the_record_too_large_for_the_store(request_of: Any) -> None:
    """A Master whose record the store does not take waits for ever. The reason may be the output of a program."""
    rule = training("abcd", NodeRange(1, 4))
    for name in "abc":
        assert rule.submit(request_of(name, "why\n" * 15_000)) is Verdict.ACCEPTED
    assert len(plain.dumps(rule.state.record)) < 20_000
    assert rule.submit(Resize(2, "me", key="k" * 201)) is Verdict.REFUSED
    assert rule.submit(Resize(2, "me", key="k" * 200)) is Verdict.ACCEPTED
