"""From one world to the next on one node, with workers that keep their process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edl.agent.machine import events as ev
from edl.agent.machine.state import AgentPhase, AgentState, WorkerStatus
from edl.types import Round
from edl.wire import local
from edl.wire.messages import (
    Boundary,
    Dismissed,
    Hold,
    Leaving,
    Prestart,
    StartRound,
    StopRound,
    Switch,
    Underway,
    WorkersDone,
)
from edl.wire.process_events import ForkServerLost
from edl.wire.purpose import Purpose
from edl.wire.records import NO_SETTINGS, Settings
from tests.unit.edl.agent.machine.test_machine import SIGKILL, SIGTERM, Node, ended, idle, running, world


def entered(local_rank: int, rejoins: bool = True, born: int = 1) -> ev.WorkerEntered:
    return ev.WorkerEntered(Round(born), local_rank, rejoins)


def parked(local_rank: int, left: int = 0, born: int = 1) -> ev.WorkerParked:
    return ev.WorkerParked(Round(born), local_rank, Round(left))


def underway(local_rank: int, joined: int = 1, born: int = 1) -> ev.WorkerUnderway:
    return ev.WorkerUnderway(Round(born), local_rank, Round(joined))


def training(rejoins: bool = True) -> Node:
    node = running()
    for rank in (0, 1):
        node.feed(entered(rank, rejoins))
        if rejoins:
            node.feed(parked(rank))
        assert node.did(ev.GivePlace) == [ev.GivePlace(world(1), (rank,))]
    node.feed(underway(0))
    assert node.said() == []
    node.feed(underway(1))
    assert node.state.underway
    return node


def phase(node: Node) -> AgentPhase:
    return node.state.phase


def told(node: Node) -> list[local.ToWorker]:
    return [effect.message for effect in node.did(ev.TellWorkers)]


def test_workers_that_rejoin_break_and_park_and_are_handed_the_next_world() -> None:
    node = training().hear(StopRound(Round(1), "node z lost"))
    assert node.did(ev.TellWorkers) == [ev.TellWorkers(local.Break(1, "node z lost"), (0, 1))]
    assert not node.did(ev.SignalWorkers)
    node.feed(parked(0, left=1), parked(1, left=1))
    assert phase(node) is AgentPhase.IDLE
    assert node.did(ev.Announce)
    node.hear(StartRound(world(2), "next"))
    assert node.did(ev.GivePlace) == [ev.GivePlace(world(2), (0, 1))]
    assert not node.did(ev.Start)
    assert {worker.how for worker in node.state.workers} == {"in process"}


def test_a_worker_that_does_not_park_is_ended_and_replaced_ahead() -> None:
    node = training().hear(StopRound(Round(1), "node z lost")).feed(parked(0, left=1))
    node.wait(10.0)
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (1,))]
    node.feed(parked(1, left=1))
    assert phase(node) is AgentPhase.STOPPING, "it has been sent a signal that it will not survive"
    node.feed(ended(1, -SIGTERM))
    assert node.did(ev.StartAhead) == [ev.StartAhead((1,), Round(1))]
    assert phase(node) is AgentPhase.PREPARING
    node.feed(parked(1, left=1))
    assert phase(node) is AgentPhase.PREPARING, "the last word of the process that has ended, not of the new one"
    node.feed(entered(1), parked(1))
    assert phase(node) is AgentPhase.IDLE


def test_a_worker_that_has_not_said_that_it_rejoins_is_ended_and_what_it_says_then_is_too_late() -> None:
    node = running().feed(entered(0)).hear(StopRound(Round(1), "node z lost"))
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (1,))]
    node.feed(entered(1, rejoins=False), entered(1), parked(1), parked(0, left=1))
    assert not node.did(ev.GivePlace)
    assert phase(node) is AgentPhase.STOPPING
    node.feed(ended(1, -SIGTERM))
    assert phase(node) is AgentPhase.PREPARING


def test_a_waiting_worker_that_dies_while_another_starts_is_replaced_too() -> None:
    node = training().feed(ended(0, 1)).hear(StopRound(Round(1), "worker 2 failed")).feed(parked(1, left=1))
    assert node.did(ev.StartAhead) == [ev.StartAhead((0,), Round(1))]
    node.feed(ended(1, -SIGKILL))
    assert phase(node) is AgentPhase.PREPARING
    node.feed(entered(0), parked(0))
    assert node.did(ev.StartAhead) == [ev.StartAhead((1,), Round(1))]
    node.feed(entered(1), parked(1))
    assert phase(node) is AgentPhase.IDLE


def test_a_node_that_leaves_is_not_ready_while_a_worker_starts_ahead() -> None:
    """The fork server died meanwhile, and the next one is ready before the end of the start is known."""
    node = (
        idle().hear(Prestart("rejoin")).feed(ForkServerLost("killed by SIGKILL"), ev.Interrupted(SIGTERM, again=False))
    )
    node.feed(ev.ForkServerReady())
    assert phase(node) is AgentPhase.PREPARING
    assert not node.did(ev.Announce)
    node.feed(ended(0, -SIGKILL, round=0), ended(1, -SIGKILL, round=0))
    assert phase(node) is not AgentPhase.PREPARING


def test_workers_that_cannot_be_started_ahead_are_started_with_the_world() -> None:
    node = idle().hear(Prestart("rejoin"))
    assert node.did(ev.StartAhead) == [ev.StartAhead((0, 1), Round(0))]
    node.feed(ended(0, 3, round=0), entered(1, born=0), parked(1, born=0))
    assert phase(node) is AgentPhase.IDLE
    assert node.did(ev.Announce)
    node.hear(StartRound(world(1), "go"))
    assert node.did(ev.GivePlace) == [ev.GivePlace(world(1), (1,))]
    assert node.did(ev.Start) == [ev.Start(world(1), (0,))]


def test_the_highest_answer_is_told_once_all_have_answered() -> None:
    node = training().hear(Hold(Round(1), 4))
    assert told(node) == [local.HoldAtBoundary(1, 4)]
    assert node.feed(ev.WorkerHere(Round(1), 0, 4, 8), ev.WorkerHere(Round(1), 1, 3, 99)).said() == []
    assert node.feed(ev.WorkerHere(Round(1), 1, 4, 7)).said() == [Boundary(Round(1), 4, 8)]


def test_workers_leave_at_the_boundary_and_are_interrupted_when_none_comes() -> None:
    node = training().hear(Hold(Round(1), 4)).hear(Switch(Round(1), 4, 9, Purpose.SWITCH, "c joined"))
    assert told(node) == [local.Target(4, 9, "switch", "c joined")]
    assert phase(node) is AgentPhase.STOPPING
    assert node.did(ev.Log) == [ev.Log("c joined")], "the text of the Master's history, which the console shows once"
    node.feed(parked(0, left=1)).wait(60.0)
    assert node.did(ev.TellWorkers) == [ev.TellWorkers(local.Break(1, node.state.reason), (1,))]


def test_a_checkpoint_on_the_way_stops_nobody() -> None:
    node = training().hear(Hold(Round(1), 4)).hear(Switch(Round(1), 4, 9, Purpose.SAVE, "asked for"))
    assert told(node) == [local.Target(4, 9, "save", "asked for")]
    assert phase(node) is AgentPhase.RUNNING


def test_workers_go_on_when_nothing_comes_of_it_or_the_master_is_gone() -> None:
    node = training().hear(Hold(Round(1), 4)).hear(Switch(Round(1), 4, 0, Purpose.SAVE, "asked for"))
    assert told(node) == [local.Release(4)]
    node.hear(Hold(Round(1), 5)).feed(ev.Disconnected())
    assert told(node) == [local.Release(5)]
    assert node.feed(ev.Connected()).hear(Switch(Round(1), 5, 9, Purpose.SWITCH, "late")).did(ev.TellWorkers) == []


def test_a_node_that_wants_to_leave_trains_on_until_it_is_dismissed() -> None:
    node = training().feed(ev.Interrupted(SIGTERM, again=False))
    assert node.said() == [Leaving("SIGTERM", 5.0)]
    assert phase(node) is AgentPhase.RUNNING
    node.hear(Dismissed("the others go on"))
    assert phase(node) is AgentPhase.LEAVING


def test_a_node_that_nobody_dismisses_leaves_in_time() -> None:
    node = training().feed(ev.Interrupted(SIGTERM, again=False)).wait(5.0)
    assert phase(node) is AgentPhase.LEAVING
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]


def test_workers_that_use_edl_and_cannot_rejoin_get_their_place_and_are_ended_with_the_round() -> None:
    node = training(rejoins=False).hear(StopRound(Round(1), "node z lost"))
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGTERM, (0, 1))]
    assert {worker.status for worker in node.state.workers} == {WorkerStatus.ALIVE}


def test_a_round_begins_with_nothing_left_of_the_one_before() -> None:
    node = training().hear(StopRound(Round(1), "node z lost")).feed(parked(0, left=1), parked(1, left=1))
    left: dict[str, Any] = {
        "hold": 4, "park_by_s": 1000.0, "kill_at_s": 1000.0, "doubt_by_s": 1000.0, "binding": True, "killed": True,
        "idling": True,
        "flushed": True, "unsaved": "a commit", "stopped_itself": True, "ahead_failed": "died",
    }  # fmt: skip
    node.state = dataclasses.replace(node.state, **left)
    node.hear(StartRound(world(2), "next"))
    fresh = AgentState(node.state.info, node.state.timeouts, contact_s=50.0)
    assert phase(node) is AgentPhase.RUNNING
    assert {name: getattr(node.state, name) for name in left} == {name: getattr(fresh, name) for name in left}


def test_a_new_process_says_how_the_one_before_it_ended() -> None:
    node = running().feed(ended(1, 3)).hear(StopRound(Round(1), "worker 3 failed")).feed(ended(0, -SIGTERM))
    node.hear(StartRound(world(2), "next"))
    assert [worker.how for worker in node.state.workers] == [
        "restarted (was killed by SIGTERM)", "restarted (ended with exit status 3)"
    ]  # fmt: skip


def test_the_end_of_an_earlier_round_and_a_second_word_of_this_ones_end_are_ignored() -> None:
    node = training().hear(StopRound(Round(1), "z lost")).feed(parked(0, left=1), parked(1, left=1))
    node.hear(StartRound(world(2), "next")).hear(StopRound(Round(1), "late"))
    assert phase(node) is AgentPhase.RUNNING and not node.did(ev.TellWorkers)
    node.hear(StopRound(Round(2), "over"))
    assert told(node) == [local.Break(2, "over")]
    assert not node.hear(StopRound(Round(2), "over")).did(ev.TellWorkers)


@pytest.mark.parametrize("dump", [True, False])
def test_stacks_are_dumped_before_workers_are_stopped_if_the_master_asks_for_it(dump: bool) -> None:
    node = running().hear(StopRound(Round(1), "hangs", dump))
    assert [type(one) for one in node.effects if isinstance(one, ev.DumpStacks | ev.SignalWorkers)] == (
        [ev.DumpStacks] * dump + [ev.SignalWorkers]
    )


def test_a_frozen_worker_is_not_waited_for_at_the_end_of_its_round() -> None:
    node = training().feed(ev.WorkerFroze(Round(1), 1)).hear(StopRound(Round(1), "z lost"))
    assert node.did(ev.TellWorkers) == [ev.TellWorkers(local.Break(1, "z lost"), (0,))]
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(SIGKILL, (1,))]


def test_that_workers_are_done_is_said_once_when_their_saves_are_written() -> None:
    node = running()
    node.saves_at_once = False
    assert not node.feed(ended(0, 0), ended(1, 0)).said()
    assert node.feed(ev.SavesFlushed(Round(1), pending=True)).said() == [WorkersDone(Round(1), True)]
    node.feed(ev.SavesFlushed(Round(1), unsaved="commit 7 was lost"))
    assert node.said() == [WorkersDone(Round(1), False, "commit 7 was lost")]
    assert not node.feed(ev.SavesFlushed(Round(1))).said()


def test_that_all_workers_train_is_said_once_with_how_and_with_the_slowest_times() -> None:
    node = training().hear(StopRound(Round(1), "z lost")).feed(parked(0, left=1), ended(1, 3))
    node.feed(entered(1), parked(1)).hear(StartRound(world(2), "next"))
    late, other = underway(0, joined=1), dataclasses.replace(underway(0, joined=2), connect_s=3.0, restore_s=1.0)
    assert not node.feed(late, other).said(), "the last word of the round before says nothing of this one"
    node.feed(dataclasses.replace(underway(1, joined=2), connect_s=2.0, restore_s=4.0))
    how = "1 in process, 1 restarted (ended with exit status 3)"
    assert node.said() == [Underway(Round(2), how, 3.0, 4.0)]


def test_answers_to_an_earlier_hold_are_none_to_a_later_one() -> None:
    node = training().hear(Hold(Round(1), 4))
    node.feed(ev.WorkerHere(Round(1), 0, 4, 8), ev.WorkerHere(Round(1), 1, 4, 7)).hear(Hold(Round(1), 5))
    assert not node.feed(ev.WorkerHere(Round(1), 0, 5, 9)).said()
    assert node.feed(ev.WorkerHere(Round(1), 1, 5, 9)).said() == [Boundary(Round(1), 5, 9)]


@pytest.mark.parametrize("order", [Hold(Round(0), 4), Switch(Round(0), 0, 9, Purpose.SET, "late", NO_SETTINGS)])
def test_orders_about_an_earlier_round_are_ignored(order: Hold | Switch) -> None:
    assert not training().hear(order).did(ev.TellWorkers)


def test_workers_that_do_not_train_yet_are_not_held() -> None:
    node = running().feed(entered(0), parked(0), entered(1), parked(1), underway(0))
    assert not node.hear(Hold(Round(1), 4)).did(ev.TellWorkers)


def test_settings_are_told_to_workers_that_train_on() -> None:
    order = Switch(Round(1), 4, 9, Purpose.SET, "lr", Settings(number=2))
    node = training().hear(Hold(Round(1), 4)).hear(order)
    assert told(node) == [local.Target(4, 9, "set", "lr", Settings(number=2))]
    assert (phase(node), node.state.hold) == (AgentPhase.RUNNING, 0)


def test_a_worker_that_must_be_restarted_says_why_once() -> None:
    node = running()
    for _ in range(2):
        node.feed(ev.WorkerEntered(Round(1), 0, False, "no store"))
    assert node.state.workers[0].how == "started with the world [no store]"


def test_a_worker_that_parks_while_the_launcher_leaves_is_told_to_end() -> None:
    node = training().hear(StopRound(Round(1), "z lost")).feed(ev.Interrupted(SIGTERM, again=False))
    assert told(node.feed(parked(0, left=1))) == [local.Stop("the launcher leaves")]
