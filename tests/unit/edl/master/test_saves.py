"""A job ends well once what its workers saved is written, or says what is missing."""

from __future__ import annotations

from edl.exit_codes import ExitCode
from edl.master.state import NodeStatus, Phase
from edl.master.view import job_status
from edl.types import NodeId, Round
from edl.wire.messages import Finish, Kept, Leaving, NotKept, NotLogged, StopRound, WorkersDone
from edl.wire.records import Version
from tests.unit.edl.master.test_machine import Rule, pair

LOST = "commit 9, the newest saved one, is not in the checkpoint directory: no space is left"


def ending() -> Rule:
    """All workers have ended well, and node a still writes."""
    rule = pair()
    rule.say("b", WorkersDone(Round(1)))
    rule.say("a", WorkersDone(Round(1), saving=True))
    assert rule.state.record.phase is Phase.RUNNING
    return rule


def test_the_job_ends_when_the_last_save_is_written() -> None:
    rule = ending()
    assert rule.reason == "all workers of node a have ended; it writes what they saved"
    rule.say("a", WorkersDone(Round(1)))
    assert rule.told()["b"] == Finish(0, "all 4 workers of round 1 ended with status 0")


def test_a_save_that_could_not_be_written_is_in_the_outcome() -> None:
    rule = ending()
    rule.say("a", WorkersDone(Round(1), unsaved=LOST))
    end = rule.told()["b"]
    assert isinstance(end, Finish)
    assert end.exit_code == ExitCode.INCOMPLETE
    assert LOST in end.reason and "node a" in end.reason


def test_a_node_that_is_lost_while_it_writes_is_missed() -> None:
    rule = ending()
    rule.lose("a")
    assert rule.state.record.phase is Phase.FORMING, "another node has the commit, and writes it in the next world"
    assert rule.told()["b"] == StopRound(Round(1), rule.state.record.reason)


def test_a_node_that_leaves_while_it_writes_is_missed() -> None:
    rule = ending()
    rule.say("a", Leaving("SIGTERM"))
    assert rule.state.record.phase is Phase.FORMING


def test_one_that_has_written_is_not_missed() -> None:
    rule = pair()
    rule.say("a", WorkersDone(Round(1), saving=True))
    rule.say("a", WorkersDone(Round(1)))
    rule.lose("a")
    rule.say("b", WorkersDone(Round(1)))
    assert rule.state.record.phase is Phase.ENDED


def test_the_next_master_waits_as_well() -> None:
    record = ending().state.record
    rule = Rule(pair().state.spec.nodes, record=record, present="ab")
    rule.attach("b", seen=1, running=1, done=True)
    assert rule.state.record.phase is Phase.RUNNING
    rule.attach("a", seen=1, running=1, done=True)
    assert rule.state.record.outcome is not None and rule.state.record.outcome.exit_code == 0


def test_what_was_missing_in_an_earlier_world_is_forgotten_with_the_next() -> None:
    rule = pair()
    rule.say("a", WorkersDone(Round(1), unsaved=LOST))
    rule.lose("b")
    rule.ready("a", seen=1)
    assert rule.state.record.round == 2 and not rule.state.record.flaws
    rule.say("a", WorkersDone(Round(2)))
    assert rule.state.record.outcome is not None and rule.state.record.outcome.exit_code == 0


def test_status_warns_while_a_node_leaves_its_logs_out() -> None:
    rule = pair()
    rule.say("b", NotLogged("the disk has 1 MiB left"))
    assert job_status(rule.state, NodeId("a"), ()).warnings == ("node b: the disk has 1 MiB left",)
    rule.say("b", NotLogged(""))
    assert job_status(rule.state, NodeId("a"), ()).warnings == ()


def test_status_warns_until_a_later_checkpoint_is_written() -> None:
    def warnings() -> tuple[str, ...]:
        return job_status(rule.state, NodeId("a"), ()).warnings

    rule = pair()
    assert warnings() == ()
    rule.say("a", Kept(Version(1, 5), "", "no space is left"))
    rule.say("b", NotKept("8.0 GiB are asked for, and the machine has 1.0 GiB left"))
    assert warnings() == (
        "commit 5 could not be written by node a: no space is left",
        "commits of node b are not kept in memory: 8.0 GiB are asked for, and the machine has 1.0 GiB left",
    )
    rule.say("b", Kept(Version(1, 4), "/there"))
    assert len(warnings()) == 2, "an earlier one, which was late"
    rule.say("a", Kept(Version(1, 6), "/there"))
    rule.say("b", NotKept(""))
    assert warnings() == ()
    rule.say("b", Kept(Version(1, 4), "", "the parts of other nodes are missing"))
    assert warnings() == (), "a later one is written"
    assert rule.state.nodes[NodeId("a")].status is NodeStatus.RUNNING


def test_nothing_is_missed_of_a_line_that_was_left() -> None:
    rule = pair()
    rule.say("a", Kept(Version(1, 9), "", "no space is left"))
    assert rule.state.unwritten[1]
    rule = pair()
    rule.lose("b")
    rule.ready("a", seen=1)
    world = rule.state.record.world
    assert world is not None and world.era == 2 and world.restore < Version(1, 9)
    rule.say("a", Kept(Version(1, 9), "", "the parts of other nodes are missing"))
    assert not rule.state.unwritten[1]
