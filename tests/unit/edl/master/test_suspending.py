"""A suspended job, as the Master sees it: where its state lies, what it is called, and what it takes to go on."""

from __future__ import annotations

from edl.config import NodeRange
from edl.master import events as ev
from edl.master.machine import take_over
from edl.master.state import Phase
from edl.master.view import job_status
from edl.types import NodeId, Round
from edl.wire.messages import Attach, Depart, Dismissed, Idle, Kept, Leaving, Ready, StopRound, WorkersDone
from edl.wire.records import Holding, Version
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Suspend, Verdict
from tests.unit.edl.master.test_machine import info
from tests.unit.edl.master.test_resizing import Resizable, training


def held(rule: Resizable, name: str, *parts: int, shards: int = 1, commit: int = 9) -> None:
    """A node says that it is free, and what it has in memory."""
    found = tuple(Holding(Version(1, commit), shard, shards) for shard in parts)
    rule.say(name, Ready(Round(1), (1, 2, 3), False, found))


def interrupted(names: str = "ab") -> Resizable:
    """Suspended while the workers are being stopped because one of them failed."""
    rule = training(names)
    rule.fail("a")
    assert isinstance(rule.told()["b"], StopRound)
    assert rule.submit(Suspend(True, "me")) is Verdict.ACCEPTED
    return rule


def asked(rule: Resizable) -> dict[str, int]:
    """Nodes that this step suspends, each with the commit to write, or 0."""
    tells = [effect for effect in rule.effects if isinstance(effect, ev.TellNode)]
    return {tell.node: tell.message.save.commit for tell in tells if isinstance(tell.message, Idle)}


class TestState:
    def test_a_commit_that_is_only_in_memory_is_written_by_one_node(self) -> None:
        rule = interrupted()
        held(rule, "a", 0)
        held(rule, "b", 0)
        assert asked(rule) == {"a": 9, "b": 0}
        rule.wait(1.0)
        assert asked(rule) == {}
        assert rule.reason == "suspended by me; commit 9 is only in the memory of launchers"
        rule.say("a", Kept(Version(1, 9), "dir"))
        rule.wait(1.0)
        assert (rule.reason, asked(rule)) == ("suspended by me", {})

    def test_the_one_with_the_newest_writes(self) -> None:
        rule = interrupted()
        held(rule, "a", 0, commit=8)
        held(rule, "b", 0)
        assert asked(rule) == {"a": 0, "b": 9}

    def test_another_one_does_if_it_goes(self) -> None:
        rule = interrupted()
        held(rule, "a", 0)
        held(rule, "b", 0)
        rule.lose("a")
        assert asked(rule) == {"b": 9}

    def test_it_is_asked_again_on_the_next_stream(self) -> None:
        rule = interrupted()
        held(rule, "a", 0)
        held(rule, "b", 0)
        for name in "ab":
            rule.feed(ev.NodeDetached(NodeId(name), info(name).incarnation))
        for name in "ab":
            rule.feed(ev.NodeAttached(Attach(info(name), Round(1), Round(0), False)))
            held(rule, name, 0)
        assert asked(rule) == {"a": 9, "b": 0}

    def test_it_is_written_again_after_a_pause_if_that_failed(self) -> None:
        rule = interrupted()
        held(rule, "a", 0)
        held(rule, "b", 0)
        for attempt, (writer, pause_s) in enumerate((("a", 10.0), ("b", 20.0), ("a", 40.0)), 1):
            rule.say(writer, Kept(Version(1, 9), "", "no space left"))
            notes = [one for one in rule.effects if isinstance(one, ev.HistoryNote)]
            assert len(notes) == (attempt == 1), "the history gets one line, however long the job is suspended"
            status = job_status(rule.state, NodeId("a"), ())
            assert status.reason == (
                f"suspended by me; commit 9 is only in the memory of launchers: attempt {attempt} to write it failed, "
                f"the next one follows within {pause_s:g} s"
            )
            assert status.warnings == (f"commit 9 could not be written by node {writer}: no space left",)
            assert asked(rule) == {}
            assert ev.WakeAt(rule.now_s + pause_s) in rule.effects
            rule.wait(pause_s - 1.0)
            assert asked(rule) == {}
            rule.wait(1.0)
            assert asked(rule) == {"b" if writer == "a" else "a": 9}
        rule.say("b", Kept(Version(1, 9), "dir"))
        rule.wait(1000.0)
        assert (rule.reason, asked(rule)) == ("suspended by me", {})

    def test_of_a_sharded_one_all_parts_are_written_again(self) -> None:
        """The node that failed may have deleted the others' parts, since they took space."""
        rule = interrupted()
        held(rule, "a", 0, shards=2)
        held(rule, "b", 1, shards=2)
        for pause_s in (10.0, 20.0):
            rule.say("a", Kept(Version(1, 9), "", "no space left"))
            rule.wait(1.0)
            rule.say("b", Kept(Version(1, 9), "", "no space left"))
            rule.wait(pause_s - 1.0)
            assert asked(rule) == {"a": 9, "b": 9}

    def test_of_a_sharded_one_each_part_is_written_by_one_that_has_it(self) -> None:
        rule = interrupted("abc")
        held(rule, "a", 0, 1, shards=3)
        held(rule, "b", 1, 2, shards=3)
        held(rule, "c", 2, shards=3)
        assert asked(rule) == {"a": 9, "b": 9, "c": 0}

    def test_of_several_the_newest_that_is_complete(self) -> None:
        rule = interrupted()
        for name, part in (("a", 0), ("b", 1)):
            parts = (Holding(Version(1, 9), part, 2), *([Holding(Version(1, 10), 1, 2)] if part else []))
            rule.say(name, Ready(Round(1), (1, 2, 3), False, parts))
        assert asked(rule) == {"a": 9, "b": 9}

    def test_one_that_can_never_be_complete_keeps_no_node(self) -> None:
        rule = interrupted()
        for name, part in (("a", 0), ("b", 1)):
            parts = (Holding(Version(1, 8), part, 2), *([Holding(Version(1, 9), 0, 2)] if name == "a" else []))
            rule.say(name, Ready(Round(1), (1, 2, 3), False, parts))
        rule.say("a", Kept(Version(1, 8), "dir"))
        rule.submit(Drain(("a",), "me", mode=DrainMode.MUST))
        assert [type(message) for message in rule.sent("a")] == [Depart, Dismissed]

    def test_a_part_of_one_is_kept_while_another_node_may_have_the_rest(self) -> None:
        rule = interrupted()
        rule.state = take_over(rule.spec, rule.state.record, [info(name) for name in "ab"], rule.now_s).state
        for name, part in (("a", 0), ("b", 1)):
            rule.feed(ev.NodeAttached(Attach(info(name), Round(1), Round(0), False)))
            held(rule, name, part, shards=2)
            if name == "a":
                rule.say("a", Leaving("SIGTERM", 30.0))
            assert not any(isinstance(message, Dismissed) for message in rule.sent("a"))

    def test_what_lies_in_the_directory_is_not_written_again(self) -> None:
        rule = interrupted()
        rule.say("b", Kept(Version(1, 9), "dir"))
        held(rule, "a", 0)
        held(rule, "b", 0)
        assert asked(rule) == {"a": 0, "b": 0}
        assert "memory" not in rule.reason

    def test_a_plain_script_has_none(self) -> None:
        rule = Resizable(NodeRange(1, 2))
        rule.join("a", "b")
        rule.submit(Suspend(True, "me"))
        for name in "ab":
            rule.ready(name, 1)
        assert asked(rule) == {"a": 0, "b": 0}


def test_a_new_master_does_not_take_it_for_suspended_before_it_has_heard_of_its_workers() -> None:
    rule = training("ab")
    rule.submit(Suspend(True, "me"))
    rule.boundary()
    rule.state = take_over(rule.spec, rule.state.record, [info(name) for name in "ab"], rule.now_s).state
    assert (rule.scale.observed, rule.scale.waiting) == (0, "workers of a, b are being stopped")
    for name in "ab":
        assert rule.scale.observed == 0
        rule.feed(ev.NodeAttached(Attach(info(name), Round(1), Round(0), False)))
        held(rule, name, 0)
    assert (rule.scale.observed, rule.scale.waiting) == (1, "")


def test_a_node_that_stays_away_does_not_hold_up_the_suspension() -> None:
    rule = training("ab")
    rule.submit(Suspend(True, "me"))
    rule.boundary()
    rule.state = take_over(rule.spec, rule.state.record, [info(name) for name in "ab"], rule.now_s).state
    rule.feed(ev.NodeAttached(Attach(info("a"), Round(1), Round(0), False)))
    held(rule, "a", 0)
    rule.wait(100.0)
    assert (rule.scale.observed, rule.scale.waiting) == (1, "")


def test_its_phase_is_called_so_while_no_world_is_meant_to_run() -> None:
    def phase() -> str:
        return job_status(rule.state, NodeId("a"), ()).phase

    rule = training("ab")
    rule.submit(Suspend(True, "me"))
    assert phase() == "running"
    rule.boundary()
    assert (rule.phase, phase()) == (Phase.FORMING, "suspended")
    rule.feed(ev.Failed("no more"))
    assert phase() == "ended"


def test_who_resumes_is_told_how_many_nodes_it_waits_for() -> None:
    rule = training("abc", NodeRange(3, 4))
    rule.submit(Suspend(True, "me"))
    rule.boundary()
    for name in "abc":
        held(rule, name, 0)
    rule.submit(Cordon("b", True, "me"))
    rule.lose("c")
    rule.feed(ev.ScaleRequested(Suspend(False, "me")))
    (grant,) = [effect for effect in rule.effects if isinstance(effect, ev.Grant)]
    assert grant.text == "job resumed: it waits for 2 more nodes, 1 of at least 3 are there"
    assert rule.notes == ["job resumed by me"]


def test_a_job_that_finishes_says_why_it_is_not_stopped() -> None:
    rule = training("ab")
    rule.say("a", WorkersDone(Round(1)))
    assert rule.submit(Suspend(True, "me")) is Verdict.ACCEPTED
    assert (rule.phase, rule.scale.waiting) == (Phase.RUNNING, "the workers finish")
