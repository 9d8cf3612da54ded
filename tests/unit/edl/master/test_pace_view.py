"""Step times of nodes, from ``Pace`` to the status."""

from __future__ import annotations

from edl.master.view import job_status
from edl.types import NodeId, Round
from edl.wire import codec
from edl.wire.messages import Pace
from edl.wire.status import JobStatus
from tests.unit.edl.master.test_resizing import Resizable, training


def shown(rule: Resizable) -> tuple[dict[str, float], int]:
    status = job_status(rule.state, NodeId("a"), ())
    assert codec.decode(JobStatus, codec.encode(status)) == status
    return {node.node: node.step_s for node in status.nodes}, status.commit


def test_step_times_and_the_newest_commit_are_shown() -> None:
    rule = training("ab")
    assert shown(rule) == ({"a": 0.0, "b": 0.0}, 0)
    rule.say("a", Pace(Round(1), 7, 0.5, holders=3))
    rule.say("b", Pace(Round(1), 5, 0.75, holders=2))
    assert shown(rule) == ({"a": 0.5, "b": 0.75}, 7)
    assert job_status(rule.state, NodeId("a"), ()).holders == 2


def test_those_of_an_earlier_round_are_not() -> None:
    """In a world of another size a step takes another time."""
    rule = training("ab")
    rule.say("a", Pace(Round(0), 7, 0.5, holders=1))
    assert shown(rule) == ({"a": 0.0, "b": 0.0}, 0)
    assert job_status(rule.state, NodeId("a"), ()).holders == 0


def test_a_world_that_does_not_run_has_neither_workers_nor_a_pace() -> None:
    rule = training("ab")
    rule.say("a", Pace(Round(1), 7, 0.5, holders=2))
    rule.say("b", Pace(Round(1), 7, 0.5, holders=2))
    rule.lose("b")
    status = job_status(rule.state, NodeId("a"), ())
    assert (status.phase, status.world_size, status.scale.nodes) == ("forming", 0, 0)
    assert shown(rule) == ({"a": 0.0}, 7)
    assert status.holders == 0, "b was one of the holders that a had counted"
