"""What a request may rely on: the order of saves and departures, what counts as able, and what is answered."""

from __future__ import annotations

import dataclasses

import pytest

from edl.config import FaultTolerance, NodeRange
from edl.master import events as ev
from edl.master.state import NodeStatus, Phase
from edl.types import NodeId, Round
from edl.wire.messages import Asked, Depart, Dismissed, Kept, Leaving, Ready, WorkersDone
from edl.wire.purpose import Purpose
from edl.wire.records import Holding, Version
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Resize, ScaleRequest, SetBounds, Suspend, Verdict
from tests.unit.edl.master.test_autoscaling import EXTERNAL, MASTER, go_on, scaling
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_resizing import Resizable, training

CAREFUL = DrainMode.MUST


def ordered(rule: Resizable) -> str:
    """Nodes that this step orders to leave."""
    tells = [effect for effect in rule.effects if isinstance(effect, ev.TellNode)]
    return "".join(tell.node for tell in tells if isinstance(tell.message, Depart))


def agreed(rule: Resizable) -> Purpose | None:
    return rule.state.agreement.purpose if rule.state.agreement is not None else None


def free(rule: Resizable, name: str, commit: int = 9) -> None:
    """A node whose workers have ended, with this commit in memory."""
    rule.say(name, Ready(Round(1), (1, 2, 3), False, (Holding(Version(1, commit)),)))


def answer(rule: Resizable) -> str:
    (grant,) = [effect for effect in rule.effects if isinstance(effect, ev.Grant)]
    return grant.text


class TestRecord:
    def test_a_request_that_changes_nothing_writes_nothing(self) -> None:
        """The record keeps its revision, so another client's request for the revision that it has read is not stale."""
        rule = training("ab")
        rule.submit(Resize(2, "me"))
        before = rule.state.record
        assert rule.submit(Resize(2, "you")) is Verdict.KNOWN
        assert rule.submit(Resize(99, "you")) is Verdict.REFUSED
        assert rule.state.record is before

    def test_the_answer_that_nothing_changes_is_repeated_for_its_key_as_well(self) -> None:
        rule = training("abc")
        rule.submit(Resize(3, "me"))
        assert rule.submit(Resize(3, "me", key="once")) is Verdict.KNOWN
        rule.submit(Resize(2, "you"))
        assert rule.submit(Resize(3, "me", key="once")) is Verdict.KNOWN
        assert rule.state.record.sizing.desired == 2

    def test_nothing_is_accepted_once_the_job_is_being_stopped(self) -> None:
        rule = training("ab")
        rule.feed(ev.OperatorRequest(Asked(Purpose.KILL, "me")))
        assert rule.phase is not Phase.ENDED
        assert rule.submit(Resize(1, "you")) is Verdict.REFUSED
        assert answer(rule) == "the job is being stopped by me"


class TestSavesAndDepartures:
    def test_the_others_agree_on_a_boundary_before_the_node_answers(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me"))
        assert (ordered(rule), agreed(rule)) == ("c", Purpose.SWITCH)

    def test_workers_that_cannot_be_held_are_not_asked_to_agree(self) -> None:
        rule = Resizable(NodeRange(1, 3))
        rule.join("a", "b", "c")
        rule.submit(Drain(("c",), "me"))
        assert ("c" in ordered(rule), agreed(rule)) == (True, None)

    def test_a_checkpoint_from_before_the_request_is_not_enough(self) -> None:
        """The workers have trained on since then."""
        rule = training("abc")
        rule.say("a", Kept(Version(1, 5), "dir"))
        rule.submit(Drain(("c",), "me", mode=CAREFUL))
        assert (ordered(rule), agreed(rule)) == ("", Purpose.SAVE)

    def test_nor_if_nodes_have_said_of_no_newer_commit(self) -> None:
        rule = training("abc")
        rule.say("a", Kept(Version(1, 5), "dir"))
        entries = {node: entry._replace(holdings=(Holding(Version(1, 5)),)) for node, entry in rule.state.nodes.items()}
        rule.state = dataclasses.replace(rule.state, nodes=entries)
        rule.submit(Drain(("c",), "me", mode=CAREFUL))
        assert (ordered(rule), agreed(rule)) == ("", Purpose.SAVE)

    def test_one_checkpoint_is_enough_for_a_request_and_its_repetition(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me", deadline_s=60.0, mode=CAREFUL))
        assert rule.boundary(9) is Purpose.SAVE
        rule.wait(0.1)
        assert agreed(rule) is None
        rule.submit(Drain(("c",), "me", deadline_s=5.0, mode=CAREFUL))
        assert (ordered(rule), agreed(rule)) == ("", None)
        rule.say("a", Kept(Version(1, 9), "dir", took_s=2.0))
        assert rule.sent("c")[0] == Depart("me", 5.0, CAREFUL)

    def test_a_node_named_while_one_is_written_gets_one_of_its_own(self) -> None:
        rule = training("abcd")
        rule.submit(Drain(("d",), "me", mode=CAREFUL))
        assert rule.boundary(9) is Purpose.SAVE
        rule.submit(Drain(("c",), "me", mode=CAREFUL))
        assert agreed(rule) is Purpose.SAVE
        assert rule.boundary(12) is Purpose.SAVE
        rule.say("a", Kept(Version(1, 9), "dir", took_s=2.0))
        assert ordered(rule) == "d"
        rule.wait(0.1)
        assert ordered(rule) == ""
        rule.say("a", Kept(Version(1, 12), "dir", took_s=2.0))
        assert ordered(rule) == "c"

    def test_a_suspended_job_waits_for_the_newest_that_any_node_has(self) -> None:
        rule = training("abc")
        rule.submit(Suspend(True, "me"))
        rule.boundary()
        rule.park("abc")
        rule.say("a", Kept(Version(1, 8), "dir"))
        free(rule, "a", 8)
        free(rule, "b", 9)
        free(rule, "c", 8)
        rule.submit(Drain(("c",), "me", mode=CAREFUL))
        assert ordered(rule) == ""
        rule.say("b", Kept(Version(1, 9), "dir"))
        assert ordered(rule) == "c"

    def test_a_job_that_is_about_to_be_suspended_has_not_come_to_rest(self) -> None:
        rule = training("abc")
        rule.say("a", Kept(Version(1, 5), "dir"))
        rule.submit(Suspend(True, "me"))
        assert rule.phase is Phase.RUNNING
        rule.submit(Drain(("c",), "me", mode=CAREFUL))
        assert ordered(rule) == ""

    def test_a_node_that_already_leaves_gets_no_order(self) -> None:
        rule = Resizable(NodeRange(1, 2))
        rule.join("a", "b")
        rule.say("b", Leaving("SIGTERM"))
        assert rule.state.nodes[NodeId("b")].status is NodeStatus.LEAVING
        rule.submit(Drain(("b",), "me"))
        assert ordered(rule) == ""

    def test_what_was_asked_about_a_node_that_is_gone_is_forgotten(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me"))
        rule.lose("c")
        rule.wait(0.1)
        assert rule.state.record.departing == ()


class TestAble:
    """Who could be in a world, when a request would take a node out."""

    def refused(self, rule: Resizable, name: str) -> bool:
        return rule.submit(Drain((name,), "me")) is Verdict.REFUSED

    def test_a_node_that_leaves_does_not_count(self) -> None:
        rule = training("abc", NodeRange(2, 4))
        assert not self.refused(rule, "b")
        rule = training("abc", NodeRange(2, 4))
        rule.say("c", Leaving("SIGTERM", 10.0))
        assert self.refused(rule, "b")

    def test_nor_one_that_was_drained(self) -> None:
        rule = training("abc", NodeRange(2, 4))
        rule.submit(Drain(("c",), "me"))
        assert self.refused(rule, "b")

    def test_with_level_recover_no_fewer_than_train_now(self) -> None:
        rule = training("abc", level=FaultTolerance.RECOVER)
        assert self.refused(rule, "c")
        assert "at least 3 needed" in answer(rule)
        rule.arrive("d")
        assert not self.refused(rule, "c")

    def test_a_store_keeps_more_than_half_of_its_members(self) -> None:
        rule = Resizable(NodeRange(1, 4))
        for name in "abcd":
            who = dataclasses.replace(info(name), members=0 if name == "d" else 3)
            rule.feed(ev.NodeRegistered(who))
            rule.attach(name)
        for name in "abcd":
            rule.ready(name)
        assert rule.submit(Drain(("a", "b"), "me")) is Verdict.REFUSED
        assert "2 of 3 are needed" in answer(rule)
        assert rule.submit(Drain(("a", "d"), "me")) is Verdict.ACCEPTED

    @pytest.mark.parametrize("members", range(1, 8))
    def test_as_etcd_counts_them(self, members: int) -> None:
        """A cluster of n members works while fewer than n / 2 are gone."""
        names = "abcdefgh"
        for gone in range(1, members + 1):
            rule = Resizable(NodeRange(1, 8))
            for number, name in enumerate(names):
                rule.feed(ev.NodeRegistered(dataclasses.replace(info(name), members=members * (number < members))))
            verdict = rule.submit(Drain(tuple(names[:gone]), "me"))
            assert (verdict is Verdict.ACCEPTED) == (gone < members / 2)


class TestOwner:
    def test_only_the_scheduler_that_owns_the_size_changes_it(self) -> None:
        rule = training("abc", scheduler=EXTERNAL)
        assert rule.submit(Resize(2, "me")) is Verdict.REFUSED
        assert "the size belongs to statefulset/train" in answer(rule)
        assert rule.submit(Resize(2, "statefulset/train", external=True)) is Verdict.ACCEPTED

    def test_of_a_scheduler_of_ours_the_master_owns_it(self) -> None:
        assert training("abc", scheduler=MASTER).submit(Resize(2, "me")) is Verdict.ACCEPTED


class TestJoining:
    """Nodes that come within ``--join-grace`` of each other join in one change."""

    def warming(self, rule: Resizable, name: str) -> None:
        rule.feed(ev.NodeRegistered(info(name)))
        rule.attach(name)

    def coming(self) -> Resizable:
        rule = training("ab", NodeRange(1, 8))
        self.warming(rule, "d")
        rule.arrive("c")
        return rule

    def test_who_is_ready_waits_for_who_warms_up(self) -> None:
        rule = self.coming()
        assert agreed(rule) is None
        assert ev.WakeAt(rule.now_s + 1.0) in rule.effects
        rule.parked("d", seen=0)
        rule.change()
        assert (set(rule.members), rule.state.record.round) == (set("abcd"), 2)

    def test_no_longer_than_that_and_the_next_ones_get_as_long(self) -> None:
        rule = self.coming()
        rule.wait(0.9)
        assert agreed(rule) is None
        rule.wait(0.1)
        rule.change()
        assert rule.members == "abc"
        rule.parked("d", seen=0)
        rule.change(19)
        self.warming(rule, "f")
        rule.arrive("e")
        assert agreed(rule) is None
        rule.wait(0.9)
        assert agreed(rule) is None
        rule.wait(0.1)
        assert agreed(rule) is Purpose.SWITCH

    def test_one_that_is_lost_again_uses_up_nobodys_time(self) -> None:
        rule = self.coming()
        rule.wait(0.5)
        rule.lose("c")
        rule.wait(5.0)
        rule.arrive("e")
        assert agreed(rule) is None
        rule.wait(0.9)
        assert agreed(rule) is None
        rule.wait(0.1)
        assert agreed(rule) is Purpose.SWITCH

    def test_a_node_without_a_stream_is_not_waited_for(self) -> None:
        rule = training("ab", NodeRange(1, 8))
        self.warming(rule, "d")
        rule.feed(ev.NodeDetached(NodeId("d"), info("d").incarnation))
        rule.arrive("c")
        assert agreed(rule) is Purpose.SWITCH

    def test_nor_is_any_once_enough_for_the_requested_size_are_there(self) -> None:
        rule = training("ab", NodeRange(1, 8))
        rule.submit(Resize(3, "me"))
        self.warming(rule, "d")
        rule.arrive("c")
        assert agreed(rule) is Purpose.SWITCH

    def test_nor_does_a_cordon_wait_for_them(self) -> None:
        rule = training("abc", NodeRange(1, 8))
        self.warming(rule, "d")
        rule.submit(Cordon("b", True, "me"))
        assert agreed(rule) is Purpose.SWITCH


class TestStarting:
    """A world whose workers still start gets some time before it is changed."""

    def starting(self) -> Resizable:
        """The second world, of ``a`` and ``b``; ``c`` is a spare."""
        rule = training("abc", NodeRange(2, 4))
        rule.submit(Resize(2, "me"))
        rule.boundary()
        rule.park("abc")
        assert (rule.members, rule.phase) == ("ab", Phase.RUNNING)
        return rule

    def test_a_cordoned_member_stays_if_the_only_one_for_its_place_is_lost(self) -> None:
        rule = self.starting()
        assert rule.submit(Cordon("b", True, "me")) is Verdict.ACCEPTED
        rule.lose("c")
        rule.underway("a", "b")
        assert (rule.members, rule.phase, agreed(rule)) == ("ab", Phase.RUNNING, None)
        assert rule.scale.observed < rule.scale.generation
        assert (
            rule.scale.waiting
            == "b cordoned, and still part of the world: too few others are there for a world without it"
        )
        rule.arrive("d")
        rule.change(19)
        assert (rule.members, rule.scale.observed) == ("ad", rule.scale.generation)

    def test_a_suspension_lets_them_begin_and_save(self) -> None:
        rule = self.starting()
        rule.submit(Suspend(True, "me"))
        assert (rule.phase, agreed(rule)) == (Phase.RUNNING, None)
        rule.underway("a", "b")
        assert agreed(rule) is Purpose.KILL

    def test_a_save_that_the_world_before_agreed_on_is_agreed_on_again(self) -> None:
        rule = training("abc")
        rule.submit(Drain(("c",), "me", mode=CAREFUL))
        assert rule.boundary(9) is Purpose.SAVE
        rule.fail("a")
        rule.park("abc")
        assert rule.members == "ab", "the failed world is replaced by one without the node"
        rule.underway("a", "b")
        assert (ordered(rule), agreed(rule)) == ("", Purpose.SAVE)


class TestProgress:
    def test_a_fulfilled_request_is_told_once(self) -> None:
        rule = training("ab")
        rule.submit(Resize(2, "me"))
        assert rule.notes == ["2 nodes requested by me", "2 nodes in round 1, as requested by me"]
        rule.wait(1.0)
        assert rule.notes == []

    def test_workers_that_have_finished_are_not_stopped_for_a_suspension(self) -> None:
        """They would repeat their work."""
        rule = training("ab")
        rule.say("a", WorkersDone(Round(1)))
        rule.submit(Suspend(True, "me"))
        assert (rule.phase, agreed(rule)) == (Phase.RUNNING, None)

    def test_a_suspension_waits_no_longer_for_a_node_without_a_stream_than_until_it_is_lost(self) -> None:
        rule = training("ab")
        rule.submit(Suspend(True, "me"))
        rule.boundary()
        rule.park("ab")
        free(rule, "a")
        assert rule.scale.observed == 0
        rule.feed(ev.NodeDetached(NodeId("b"), info("b").incarnation))
        assert rule.scale.observed == 0, "its workers may still run"
        rule.wait(100.0)
        assert rule.scale.observed == 1

    @pytest.mark.parametrize(
        ("request_", "more", "reason"),
        [
            (Resize(2, "me"), "", "shrinking from 3 to 2 nodes, as requested by me"),
            (Cordon("b", True, "me"), "", "b cordoned: shrinking from 3 to 2 nodes"),
            (Cordon("b", True, "me"), "d", "b cordoned"),
            (SetBounds(1, 4, "me"), "d", "d joined: growing from 3 to 4 nodes"),
        ],
        ids=["smaller", "cordon", "replaced", "larger"],
    )
    def test_why_the_world_is_replaced(self, request_: ScaleRequest, more: str, reason: str) -> None:
        rule = training("abc", NodeRange(1, 3))
        rule.arrive(more)
        rule.submit(request_)
        assert rule.state.agreement is not None
        assert rule.state.agreement.reason == reason


class TestCooling:
    def cool(self) -> Resizable:
        rule = training("abcd", cooldown_s=30.0)
        rule.submit(Resize(3, "me"))
        assert rule.scale.waiting == "changing from 4 to 3 nodes"
        rule.change()
        return rule

    def test_a_cordon_does_not_wait_even_if_a_size_does(self) -> None:
        rule = self.cool()
        rule.submit(Resize(2, "me"))
        assert agreed(rule) is None
        rule.submit(Cordon("a", True, "me"))
        rule.change(19)
        assert rule.members == "bc"

    def test_nor_does_a_node_that_has_to_leave(self) -> None:
        rule = self.cool()
        rule.submit(Resize(2, "me"))
        rule.submit(Drain(("a",), "me"))
        assert (ordered(rule), agreed(rule)) == ("a", Purpose.SWITCH)

    def test_a_cordon_begins_none(self) -> None:
        rule = training("abcd", cooldown_s=30.0)
        rule.submit(Cordon("a", True, "me"))
        rule.change()
        rule.submit(Resize(2, "me"))
        assert agreed(rule) is Purpose.SWITCH

    def test_a_size_that_the_policy_chose_begins_one(self) -> None:
        rule = scaling("abc", cooldown_s=30.0)
        go_on(rule, 300)
        rule.change()
        assert rule.members == "ab"
        rule.submit(Resize(1, "me"))
        assert agreed(rule) is None
        assert "--scale-cooldown=30" in rule.scale.waiting


class TestMissed:
    """Whether a node that leaves is told that no world can form without it."""

    def suspended(self) -> Resizable:
        rule = training("ab", NodeRange(2, 4))
        rule.submit(Suspend(True, "me"))
        rule.boundary()
        rule.park("ab")
        for name in "ab":
            free(rule, name)
        return rule

    def test_of_a_suspended_job_only_the_last_is(self) -> None:
        rule = self.suspended()
        rule.say("b", Leaving("SIGTERM"))
        assert rule.told()["b"] == Dismissed("nothing to wait for")
        rule.lose("b")
        rule.say("a", Leaving("SIGTERM"))
        assert rule.told()["a"] == Dismissed("nothing to wait for", needed=True)

    def test_of_a_running_one_each_without_which_too_few_are_left(self) -> None:
        rule = Resizable(NodeRange(2, 3))
        rule.join("a", "b", "c")
        rule.say("c", Leaving("SIGTERM"))
        assert rule.told()["c"] == Dismissed("nothing to wait for")
        rule.say("b", Leaving("SIGTERM"))
        assert rule.told()["b"] == Dismissed("nothing to wait for", needed=True)


def test_who_resumes_a_job_has_the_whole_time_to_bring_nodes() -> None:
    rule = training("ab", NodeRange(2, 4))
    rule.submit(Suspend(True, "me"))
    rule.boundary()
    rule.park("ab")
    for name in "ab":
        free(rule, name)
    rule.lose("b")
    rule.wait(1000.0)
    rule.submit(Suspend(False, "me"))
    rule.wait(rule.spec.timeouts.recover_s - 1.0)
    assert rule.state.record.outcome is None
    rule.wait(1.0)
    assert rule.state.record.outcome is not None
