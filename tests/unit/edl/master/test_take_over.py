"""Changes of the world across a change of the Master, and nodes that leave meanwhile."""

from __future__ import annotations

import dataclasses

import pytest

from edl.config import NodeRange
from edl.job_records import Training
from edl.master import events as ev
from edl.master.machine import take_over
from edl.master.state import Phase
from edl.types import NodeId, Round
from edl.wire.messages import (
    Asked,
    Attach,
    Depart,
    Dismissed,
    Hold,
    Kept,
    Leaving,
    Pace,
    Ready,
    StartRound,
    StopRound,
    Switch,
    Underway,
)
from edl.wire.purpose import Purpose
from edl.wire.records import Version
from edl.wire.scale_requests import Drain, Resize
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_resizing import Resizable, training


def succeed(rule: Resizable, names: str) -> None:
    """Another Master takes over; it finds the nodes' keys, and no stream is open yet."""
    rule.state = take_over(rule.spec, rule.state.record, [info(name) for name in names], rule.now_s).state


def attach(rule: Resizable, name: str, *, underway: bool = True) -> None:
    """A node of the running world is on the line again."""
    number = rule.state.record.round
    rule.feed(ev.NodeAttached(Attach(info(name), number, number, False, underway=underway)))


def held(rule: Resizable) -> str:
    """Nodes that were asked to hold."""
    return "".join(sorted(e.node for e in rule.effects if isinstance(e, ev.TellNode) and isinstance(e.message, Hold)))


class TestRunningWorld:
    @pytest.mark.parametrize("purpose", [Purpose.KILL, Purpose.SAVE])
    def test_the_next_master_does_what_the_last_one_was_asked_for(self, purpose: Purpose) -> None:
        rule = training("ab")
        rule.feed(ev.OperatorRequest(Asked(purpose, "kim")))
        assert held(rule) == "ab"
        succeed(rule, "ab")
        attach(rule, "a")
        assert (rule.phase, held(rule)) == (Phase.RUNNING, "")
        attach(rule, "b")
        assert held(rule) == "ab"
        assert rule.state.agreement is not None
        assert rule.state.agreement.purpose is purpose

    def test_a_smaller_size_waits_until_all_have_said_that_they_are_underway(self) -> None:
        rule = training("abc")
        rule.submit(Resize(2, "me"))
        succeed(rule, "abc")
        for name in "ab":
            attach(rule, name)
            assert (rule.phase, rule.state.agreement) == (Phase.RUNNING, None)
        attach(rule, "c")
        assert held(rule) == "abc"

    def test_it_does_not_wait_for_ever(self) -> None:
        rule = training("abc")
        rule.submit(Resize(2, "me"))
        succeed(rule, "abc")
        for name in "ab":
            attach(rule, name)
        attach(rule, "c", underway=False)
        assert (rule.phase, rule.state.agreement) == (Phase.RUNNING, None)
        rule.wait(rule.spec.timeouts.boundary_s)
        assert (rule.phase, rule.state.agreement) == (Phase.FORMING, None)
        assert isinstance(rule.told()["a"], StopRound)


class TestLeaving:
    @pytest.mark.parametrize("spares", ["", "d"])
    def test_a_member_to_leave_goes_at_a_boundary_of_the_next_master(self, spares: str) -> None:
        """Also when a spare makes good for it, so that the size stays as it is."""
        rule = training("abc", NodeRange(1, 3))
        rule.arrive(spares)
        rule.submit(Drain(("c",), "me", deadline_s=60.0))
        succeed(rule, "abc" + spares)
        attach(rule, "c")
        assert isinstance(rule.sent("c")[0], Depart)
        rule.say("c", Leaving("me", 30.0))
        rule.arrive(spares)
        attach(rule, "a")
        assert rule.state.agreement is None
        attach(rule, "b")
        assert held(rule) == "abc"
        assert rule.boundary() is Purpose.SWITCH

    def test_so_does_one_that_leaves_on_a_signal(self) -> None:
        rule = training("abc")
        succeed(rule, "abc")
        attach(rule, "c")
        rule.say("c", Leaving("SIGTERM", 30.0))
        assert rule.phase is Phase.RUNNING
        attach(rule, "a")
        attach(rule, "b")
        assert held(rule) == "abc"

    def test_where_the_others_do_not_get_underway_it_interrupts(self) -> None:
        rule = training("abc")
        succeed(rule, "abc")
        attach(rule, "c")
        rule.say("c", Leaving("SIGTERM", 30.0))
        attach(rule, "a", underway=False)
        rule.wait(rule.spec.timeouts.boundary_s)
        assert (rule.phase, rule.state.record.reason) == (Phase.FORMING, "c to leave")

    def test_an_agreement_is_made_once(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me", deadline_s=60.0))
        number = rule.state.agreements
        rule.say("c", Leaving("me", 30.0))
        rule.wait(0.1)
        assert rule.state.agreements == number
        assert rule.boundary() is Purpose.SWITCH
        assert isinstance(rule.told()["a"], Switch)

    def test_a_spare_goes_at_once_although_a_boundary_is_agreed_on(self) -> None:
        """It may be the Master's node: its successor finds the boundary in the record."""
        rule = training("abc", NodeRange(1, 3))
        rule.arrive("d")
        rule.submit(Drain(("c", "d"), "me", deadline_s=60.0))
        rule.say("c", Leaving("me", 30.0))
        assert rule.boundary() is Purpose.SWITCH
        rule.say("d", Leaving("me", 30.0))
        assert rule.sent("d") == [Dismissed("nothing to wait for")]
        assert not rule.sent("c")
        rule.park("abc")
        rule.underway("a", "b")
        assert rule.told()["c"] == Dismissed("the others continue without this node")

    def test_while_a_checkpoint_is_agreed_on_it_may_go(self) -> None:
        rule = training("ab", NodeRange(1, 2))
        rule.arrive("c")
        rule.feed(ev.OperatorRequest(Asked(Purpose.SAVE, "me")))
        rule.say("c", Leaving("SIGTERM", 30.0))
        assert isinstance(rule.sent("c")[0], Dismissed)

    def test_the_next_master_does_not_wait_for_one_that_has_left_and_still_has_its_lease(self) -> None:
        """Its launcher takes its time, as one does whose pservers hand over what they have."""
        rule = training("abc")
        rule.say("c", Leaving("SIGTERM"))
        assert rule.phase is Phase.FORMING
        succeed(rule, "abc")
        for name in "ab":
            rule.feed(ev.NodeAttached(Attach(info(name), Round(1), Round(0), False)))
        rule.park("ab")
        assert (rule.phase, rule.members) == (Phase.RUNNING, "ab")


class TestCooling:
    def test_it_starts_over_since_nobody_knows_how_much_of_it_has_passed(self) -> None:
        rule = training("abc", cooldown_s=30.0)
        rule.submit(Resize(2, "me"))
        rule.change()
        rule.wait(10.0)
        rule.submit(Resize(1, "me"))
        succeed(rule, "abc")
        for name in "ab":
            attach(rule, name)
        assert rule.state.agreement is None
        assert rule.scale.waiting.startswith("1 nodes in 30 s: --scale-cooldown=30")
        rule.wait(30.0)
        assert held(rule) == "ab"

    def test_not_where_no_request_has_come_true(self) -> None:
        rule = training("abc", cooldown_s=30.0)
        rule.submit(Resize(2, "me"))
        succeed(rule, "abc")
        for name in "abc":
            attach(rule, name)
        assert held(rule) == "abc"


class TestDismissed:
    """A node that may go, and whose stream ends before it has heard so."""

    def dismissed(self) -> Resizable:
        rule = training("ab", NodeRange(1, 2))
        rule.arrive("c")
        rule.submit(Drain(("c",), "me"))
        rule.say("c", Leaving("me", 5.0))
        assert rule.sent("c") == [Dismissed("nothing to wait for")]
        rule.feed(ev.NodeDetached(NodeId("c"), info("c").incarnation))
        return rule

    def test_it_counts_as_gone_when_its_lease_has_ended(self) -> None:
        rule = self.dismissed()
        assert ev.Probe(info("c")) in rule.effects
        assert [one.node for one in rule.state.record.departing] == ["c"]
        assert rule.scale.waiting == "c to leave"
        rule.lose("c")
        assert (rule.state.record.departing, rule.scale.waiting) == ((), "")

    def test_it_is_told_again_when_it_comes_back(self) -> None:
        rule = self.dismissed()
        rule.feed(ev.NodeAttached(Attach(info("c"), Round(0), Round(0), False)))
        assert rule.sent("c") == [Depart("me", 0.0)]
        rule.say("c", Leaving("me", 5.0))
        assert rule.sent("c") == [Dismissed("nothing to wait for")]

    def test_one_that_left_by_itself_says_so_again(self) -> None:
        rule = training("abc")
        rule.say("c", Leaving("SIGTERM"))
        rule.feed(ev.NodeDetached(NodeId("c"), info("c").incarnation))
        rule.feed(ev.NodeAttached(Attach(info("c"), Round(1), Round(0), False)))
        rule.say("c", Leaving("SIGTERM"))
        rule.park("ab")
        assert rule.members == "ab"
        rule.lose("c")
        assert rule.phase is Phase.RUNNING

    def test_at_the_end_nobody_waits_for_its_lease(self) -> None:
        rule = self.dismissed()
        rule.feed(ev.Failed("no more"))
        for name in "ab":
            rule.feed(ev.NodeDetached(NodeId(name), info(name).incarnation))
        assert set(rule.state.nodes) <= {NodeId("c")}
        rule.wait(10.0)
        assert ev.Conclude() in rule.effects


def test_a_checkpoint_that_is_owed_is_written_under_the_next_master() -> None:
    """The Master was on the node that has left in a hurry."""
    rule = training("ab", NodeRange(1, 2))
    for name in "ab":
        rule.say(name, Pace(Round(1), 5, 1.0))
    rule.say("a", Kept(Version(1, 5), "dir", took_s=4.0))
    rule.say("b", Leaving("spot", 0.5))
    assert rule.boundary() is Purpose.SWITCH
    rule.park("ab")
    rule.underway("a")
    assert rule.state.record.owed == "node b left without time for a checkpoint"
    succeed(rule, "a")
    attach(rule, "a")
    assert rule.state.agreement is not None and rule.state.agreement.purpose is Purpose.SAVE
    assert rule.boundary(20) is Purpose.SAVE
    assert rule.state.record.owed == ""
    assert rule.state.agreement is None


def test_the_reason_of_a_stop_names_all_that_leave() -> None:
    rule = training("abcd")
    rule.submit(Drain(("c", "d"), "me", deadline_s=60.0))
    rule.state = dataclasses.replace(rule.state, agreement=None)
    rule.wait(0.1)
    assert rule.state.agreement is not None
    assert rule.state.agreement.reason == "c, d to leave"


def test_a_source_that_went_with_the_last_master_is_planned_without() -> None:
    """The world was recorded, and nobody has been told to begin it."""
    rule = Resizable(NodeRange(1, 1))
    rule.join("a", "b")
    rule.parked("b", (1, 6), seen=0)
    rule.say("a", Ready(Round(1), (1, 2, 3), True))
    world = rule.state.record.world
    assert world is not None
    assert (rule.members, [source.node for source in world.sources]) == ("a", ["b"])
    succeed(rule, "a")
    assert (rule.phase, rule.members) == (Phase.RUNNING, "a")
    rule.feed(ev.NodeAttached(Attach(info("a"), Round(0), Round(0), False)))
    assert (rule.phase, rule.members) == (Phase.FORMING, "a")
    assert {type(message) for message in rule.sent("a")} == {StopRound}


def test_a_source_that_is_gone_is_not_missed_where_another_has_the_same() -> None:
    """Four had the state, the one that trains on among them; the Master was one of those that have left."""
    rule = Resizable(NodeRange(1, 1))
    rule.join("a", "b")
    rule.parked("b", (1, 6), seen=0)
    rule.parked("a", (1, 6), seen=1)
    world = rule.state.record.world
    assert world is not None
    assert (rule.members, sorted(source.node for source in world.sources)) == ("a", ["a", "b"])
    succeed(rule, "a")
    rule.feed(ev.NodeAttached(Attach(info("a"), world.round, world.round, False)))
    assert (rule.phase, rule.members) == (Phase.RUNNING, "a")


def test_where_no_survivor_has_its_state_yet_spares_are_asked_for_it() -> None:
    rule = training("ab", NodeRange(1, 2))
    rule.arrive("c")
    rule.lose("b")
    assert not rule.sent("c"), "a has the state"
    rule.parked("a", (1, 9))
    assert set(rule.members) == {"a", "c"}
    rule.arrive("d")
    rule.say("a", Underway(Round(2), "in process"))
    rule.lose("a")
    assert isinstance(rule.told()["d"], StopRound)
    assert rule.phase is Phase.FORMING


def test_a_node_of_independent_workers_that_missed_a_world_hears_that_it_has_no_part() -> None:
    """They train on while it is away, and nobody has stopped them."""
    rule = Resizable(NodeRange(1, 2))
    rule.spec = dataclasses.replace(rule.spec, servers=Training())
    rule.state = dataclasses.replace(rule.state, spec=rule.spec)
    rule.join("a", "b", "c")
    assert rule.members == "ab"
    rule.fail("a")
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    rule.ready("a", 1)
    rule.wait(20.0)
    assert rule.members == "ac"
    rule.feed(ev.NodeAttached(Attach(info("b"), Round(1), Round(1), False)))
    assert [type(message) for message in rule.sent("b")] == [StopRound, StartRound]
    rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
    rule.feed(ev.NodeAttached(Attach(info("b"), Round(0), Round(0), False)))
    assert not rule.sent("b"), "it is new here"


def test_the_last_of_all_that_leave_is_told_that_the_job_is_not_done() -> None:
    """The Master's own node was dismissed because others stayed. Its launcher exits before the last one is answered."""
    rule = Resizable(NodeRange(1, 3))
    rule.join("a", "b", "c")
    for name in "ab":
        rule.say(name, Leaving("SIGTERM", 0.0))
        assert rule.sent(name) == [Dismissed("nothing to wait for")]
    succeed(rule, "abc")  # the leases of a and b still run
    rule.attach("b", seen=1, running=1)
    rule.attach("c", seen=1, running=1)
    rule.say("c", Leaving("SIGTERM", 0.0))
    assert rule.sent("c")[-1:] == [Dismissed("nothing to wait for", needed=True)]


class TestSpareWithTheOnlyCopy:
    """The world has one node, and a spare holds copies of its commits; another spare knows nothing of them."""

    def job(self) -> Resizable:
        rule = Resizable(NodeRange(1, 1))
        rule.join("a", "b", "c")
        rule.underway("a")
        return rule

    @pytest.mark.parametrize("present", ["bc", "abc"])
    def test_it_is_waited_for_until_its_first_report(self, present: str) -> None:
        rule = self.job()
        succeed(rule, present)
        if "a" in present:
            rule.feed(ev.NodeRefused(NodeId("a"), info("a").incarnation))
        rule.attach("c")
        rule.parked("c", seen=0)
        assert (rule.phase, rule.reason.endswith("waiting for b")) == (Phase.FORMING, True)
        rule.attach("b")
        assert rule.phase is Phase.FORMING
        rule.parked("b", (1, 6), seen=0)
        world = rule.state.record.world
        assert world is not None
        assert (rule.phase, world.round, world.restore) == (Phase.RUNNING, 2, Version(1, 6))

    @pytest.mark.parametrize("attaches", [False, True])
    def test_it_is_not_waited_for_longer_than_it_may_be_absent(self, attaches: bool) -> None:
        """Perhaps it is still importing its framework, and has nothing."""
        rule = self.job()
        succeed(rule, "bc")
        rule.attach("c")
        rule.parked("c", seen=0)
        if attaches:
            rule.attach("b")
        wakes = [effect.at_s for effect in rule.effects if isinstance(effect, ev.WakeAt)]
        rule.wait(min(wakes) - rule.now_s)
        assert (rule.phase, rule.members) == (Phase.RUNNING, "c")

    def test_where_the_member_itself_reports_its_state_nobody_else_is_waited_for(self) -> None:
        rule = self.job()
        rule.fail("a")
        succeed(rule, "abc")
        rule.attach("a", seen=1)
        rule.parked("a", (1, 6))
        assert (rule.phase, rule.members, rule.state.record.round) == (Phase.RUNNING, "a", 2)


def test_a_restart_stays_charged_if_the_member_that_is_missing_had_left_before() -> None:
    rule = Resizable(NodeRange(2, 2))
    rule.join("a", "b")
    rule.fail("a")
    rule.ready("b", 1)
    rule.say("b", Leaving("SIGTERM"))
    record = rule.state.record
    assert record.restarts == 1
    succeed(rule, "a")
    assert (rule.state.record.restarts, rule.state.record.reason) == (1, record.reason)
