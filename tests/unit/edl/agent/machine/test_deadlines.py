"""What an agent does when something does not come in time, and that it does it once."""

from __future__ import annotations

import pytest

from edl.agent.machine import events as ev
from edl.agent.machine.state import AgentPhase
from edl.types import Round
from edl.wire import local
from edl.wire.messages import Attach, Hold, StartRound, StopRound, Switch, UseSlots, WorkerFailed
from edl.wire.purpose import Purpose
from edl.wire.records import NO_SETTINGS
from tests.unit.edl.agent.machine.test_machine import SIGKILL, SIGTERM, Node, ended, running, world
from tests.unit.edl.agent.machine.test_rounds import entered, parked, phase, told, training


def test_who_does_not_stop_is_killed_once() -> None:
    node = running(shutdown_s=10.0).hear(StopRound(Round(1), "over")).wait(10.0)
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (0, 1))]
    assert node.wait(1.0).did(ev.SignalWorkers) == []


def test_who_does_not_park_is_ended_once_and_restarted_for_that() -> None:
    node = training().hear(StopRound(Round(1), "node z lost")).feed(parked(0, left=1)).wait(10.0)
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (1,))]
    assert [one.text for one in node.did(ev.Log)] == [
        "worker 3 did not leave its round within 10 s: restarting instead"
    ]
    assert node.wait(1.0).did(ev.SignalWorkers) == []
    node.feed(ended(1, -SIGTERM))
    assert [worker.how for worker in node.state.workers if worker.slot == 1] == [
        "restarted (did not leave its round within 10 s)"
    ]


def test_workers_that_have_all_parked_are_not_late_if_another_does_not_end() -> None:
    """One that does not use edl, and ignores SIGTERM."""
    node = running().feed(entered(0), parked(0)).hear(StopRound(Round(1), "node z lost")).feed(parked(0, left=1))
    node.wait(node.state.timeouts.rejoin_s)
    assert not [one.text for one in node.did(ev.Log) if "did not leave" in one.text]


def in_doubt() -> Node:
    """All workers have answered a Master that is lost: it may have agreed on a boundary with the others."""
    node = training().hear(Hold(Round(1), 4, binding=True))
    node.feed(ev.WorkerHere(Round(1), 0, 4, 8), ev.WorkerHere(Round(1), 1, 4, 7)).feed(ev.Disconnected())
    assert not node.did(ev.TellWorkers), "they hold"
    return node.feed(ev.Connected())


def test_workers_in_doubt_are_interrupted_when_no_master_says_what_was_agreed() -> None:
    node = in_doubt().wait(59.0)
    assert phase(node) is AgentPhase.RUNNING and not node.did(ev.TellWorkers)
    node.wait(1.0)
    assert phase(node) is AgentPhase.STOPPING and isinstance(told(node)[0], local.Break)


@pytest.mark.parametrize("answered", [True, False])
def test_the_next_master_ends_the_doubt(answered: bool) -> None:
    node = in_doubt()
    if answered:
        node.hear(Switch(Round(1), 0, 9, Purpose.SET, "settings", NO_SETTINGS))
        assert [type(one) for one in told(node)] == [local.Target]
    else:
        node.hear(Hold(Round(1), 5))
    assert phase(node.wait(100.0)) is AgentPhase.RUNNING


def test_a_doubt_that_ends_with_a_boundary_does_not_interrupt_the_next_round() -> None:
    node = in_doubt().hear(Switch(Round(1), 4, 9, Purpose.SWITCH, "n2 to leave"))
    assert phase(node) is AgentPhase.STOPPING
    node.feed(parked(0, left=1), parked(1, left=1)).hear(StartRound(world(2), "next"))
    assert not node.wait(1000.0).did(ev.TellWorkers)
    assert phase(node) is AgentPhase.RUNNING


def test_a_node_whose_workers_have_succeeded_is_in_no_doubt() -> None:
    node = in_doubt().feed(ended(0, 0), ended(1, 0))
    assert not node.state.in_doubt
    assert phase(node.wait(1000.0)) is AgentPhase.RUNNING, "it waits for the others"


def test_a_node_whose_workers_have_succeeded_has_nothing_to_wait_for_at_a_boundary() -> None:
    node = training().hear(Hold(Round(1), 4, binding=True))
    node.feed(ev.WorkerHere(Round(1), 0, 4, 8), ev.WorkerHere(Round(1), 1, 4, 8), ended(0, 0), ended(1, 0))
    node.hear(Switch(Round(1), 4, 9, Purpose.SWITCH, "n2 to leave"))
    assert phase(node) in (AgentPhase.IDLE, AgentPhase.PREPARING)


def test_a_failure_on_the_way_to_a_boundary_is_repeated_to_the_next_master() -> None:
    node = in_doubt().hear(Switch(Round(1), 4, 9, Purpose.SWITCH, "n2 to leave")).feed(ev.Disconnected())
    node.feed(ended(0, -11))
    assert [log.text for log in node.did(ev.Log)] == ["worker 2 (local rank 0) was killed by SIGSEGV"]
    said = node.feed(ev.Connected()).said()
    assert [type(message) for message in said[:2]] == [Attach, WorkerFailed]


def test_a_node_on_its_way_to_a_boundary_waits_for_it_when_it_gets_sigterm_without_a_master() -> None:
    node = in_doubt().hear(Switch(Round(1), 4, 9, Purpose.SWITCH, "n2 to leave")).feed(ev.Disconnected())
    node.feed(ev.Interrupted(SIGTERM, again=False))
    assert phase(node) is AgentPhase.STOPPING
    assert not node.did(ev.SignalWorkers)


def test_workers_of_which_one_has_not_answered_are_in_no_doubt() -> None:
    node = training().hear(Hold(Round(1), 4, binding=True)).feed(ev.WorkerHere(Round(1), 0, 4, 8))
    assert told(node.feed(ev.Disconnected())) == [local.Release(4)]


def test_a_worker_in_a_slot_that_is_not_used_is_killed_once_if_it_does_not_end() -> None:
    node = training().hear(UseSlots((0,), "slot 1 is dropped")).hear(StopRound(Round(1), "changes"))
    node.feed(parked(0, left=1), parked(1, left=1))
    assert not node.did(ev.SignalWorkers), "it is told to end"
    assert node.wait(10.0).did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (1,))]
    assert node.wait(1.0).did(ev.SignalWorkers) == []


def test_no_deadline_of_a_round_is_left_in_the_next_one() -> None:
    node = training().hear(StopRound(Round(1), "node z lost")).feed(parked(0, left=1), parked(1, left=1))
    node.hear(StartRound(world(2), "next")).wait(1000.0)
    assert phase(node) is AgentPhase.RUNNING and not node.did(ev.SignalWorkers) and not node.did(ev.TellWorkers)
