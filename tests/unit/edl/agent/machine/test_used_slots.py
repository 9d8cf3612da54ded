"""Slots that are used, dropped or spare: what becomes of the workers on a node."""

from __future__ import annotations

import dataclasses

from edl.agent.machine import events as ev
from edl.agent.machine.state import AgentPhase, AgentState, WorkerStatus
from edl.config import Timeouts
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire import local
from edl.wire.messages import StartRound, StopRound, UseSlots, WorkerFailed
from edl.wire.records import Member, NodeInfo, World
from tests.unit.edl.agent.machine.test_machine import Node
from tests.unit.edl.agent.machine.test_rounds import entered, parked, underway


def world_of(round: int, *used: int) -> World:
    places = () if used == tuple(range(len(used))) else used
    me = Member(NodeId("a"), Incarnation(1), "a", len(used), Rank(0), tuple(range(1, 6)), places)
    return World(Round(round), (me,), 0)


def agent(*, by_device: bool = False, independent: bool = False) -> Node:
    node = Node()
    node.state = AgentState(
        NodeInfo(NodeId("a"), Incarnation(1), "a", 1, 3, spare_slots=1),
        Timeouts(shutdown_s=10.0),
        contact_s=50.0,
        by_device=by_device,
    )
    node.state = dataclasses.replace(node.state, independent=independent)
    node.feed(ev.Connected(), ev.ForkServerReady())
    return node.hear(StartRound(world_of(1, 0, 1, 2), "go"))


def aware(*, by_device: bool = False) -> Node:
    node = agent(by_device=by_device)
    for slot in (0, 1, 2):
        node.feed(entered(slot), parked(slot), underway(slot))
    return node


def parks(node: Node, left: int = 1) -> Node:
    node.hear(StopRound(Round(left), "changes"))
    effects: tuple[ev.Effect, ...] = ()
    for slot in (0, 1, 2):
        effects += node.feed(parked(slot, left=left)).effects
    node.effects = effects
    return node


def test_survivors_keep_their_processes_under_other_local_ranks() -> None:
    node = aware().hear(UseSlots((0, 2), "slot 1 is dropped"))
    assert not node.did(ev.SignalWorkers) and node.state.underway, "what runs is left alone"
    parks(node)
    assert (node.state.phase, node.state.parked) == (AgentPhase.IDLE, True)
    (stop,) = node.did(ev.TellWorkers)
    assert stop == ev.TellWorkers(local.Stop("the next world does not use this worker"), (1,))
    node.hear(StartRound(world_of(2, 0, 2), "go"))
    assert node.did(ev.GivePlace) == [ev.GivePlace(world_of(2, 0, 2), (0, 2))] and not node.did(ev.Start)
    places = {worker.slot: (worker.local_rank, worker.rank, worker.how) for worker in node.state.in_world}
    assert places == {0: (0, 0, "in process"), 2: (1, 1, "in process")}
    node.feed(ev.WorkerEnded(Round(1), 1, 0))
    assert [worker.slot for worker in node.state.workers] == [0, 2]
    assert not node.said()


def test_a_drop_that_comes_with_the_world() -> None:
    node = parks(aware()).hear(StartRound(world_of(2, 0, 2, 3), "go"))
    assert node.did(ev.GivePlace) == [ev.GivePlace(world_of(2, 0, 2, 3), (0, 2))]
    assert node.did(ev.Start) == [ev.Start(world_of(2, 0, 2, 3), (3,))]
    assert [one.slots for one in node.did(ev.TellWorkers)] == [(1,)]
    node.wait(11.0)
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(9, (1,))], "after the grace, in whatever phase"


def test_spare_slots_warm_nothing_until_they_are_needed() -> None:
    node = aware()
    assert {worker.slot for worker in node.state.workers} == {0, 1, 2}
    node.hear(UseSlots((0, 2, 3), "slot 1 is dropped"))
    parks(node)
    assert node.state.phase is AgentPhase.PREPARING
    assert node.did(ev.StartAhead) == [ev.StartAhead((3,), Round(1))]


def test_where_there_are_devices_other_numbers_mean_other_processes() -> None:
    node = aware(by_device=True).hear(UseSlots((0, 2), "slot 1 is dropped"))
    parks(node)
    assert [one.slots for one in node.did(ev.TellWorkers)] == [(1, 2)]
    assert node.state.phase is AgentPhase.PREPARING
    node.feed(ev.WorkerEnded(Round(1), 2, 0))
    assert node.did(ev.StartAhead) == [ev.StartAhead((2,), Round(1))]
    node.feed(entered(2), parked(2))
    node.hear(StartRound(world_of(2, 0, 2), "go"))
    assert node.did(ev.GivePlace) == [ev.GivePlace(world_of(2, 0, 2), (0, 2))]


def test_also_where_only_the_world_says_so() -> None:
    node = parks(aware(by_device=True)).hear(StartRound(world_of(2, 0, 2), "go"))
    assert node.did(ev.GivePlace) == [ev.GivePlace(world_of(2, 0, 2), (0,))] and not node.did(ev.Start)
    assert ev.SignalWorkers(9, (2,)) in node.did(ev.SignalWorkers)
    node.feed(parked(2, left=1))
    assert not node.did(ev.GivePlace), "it has nothing to say any more"
    node.feed(ev.WorkerEnded(Round(1), 2, -9))
    assert node.did(ev.Start) == [ev.Start(world_of(2, 0, 2), (2,))] and not node.said()
    (how,) = [worker.how for worker in node.state.in_world if worker.slot == 2]
    assert how == "restarted (its device has another number: local rank 2 became 1)"


def test_a_failure_names_the_slot() -> None:
    node = agent().hear(StopRound(Round(1), "changes"))
    node.feed(*(ev.WorkerEnded(Round(1), slot, -15) for slot in (0, 1, 2)))
    node.hear(StartRound(world_of(2, 0, 2), "go"))
    node.feed(ev.WorkerEnded(Round(2), 2, 3))
    (said,) = node.said()
    assert isinstance(said, WorkerFailed)
    assert (said.failure.slot, said.failure.local_rank, said.failure.rank) == (2, 1, 1)


def test_independent_workers_go_on_but_for_the_one_in_a_dropped_slot() -> None:
    node = agent(independent=True)
    node.hear(StopRound(Round(1), "changes")).hear(StartRound(world_of(2, 0, 2), "go"))
    assert node.did(ev.SignalWorkers) == [ev.SignalWorkers(15, (1,))]
    assert node.did(ev.GivePlace) == [ev.GivePlace(world_of(2, 0, 2), (0, 2))]
    node.feed(ev.WorkerEnded(Round(1), 1, -15))
    assert not node.said() and {worker.status for worker in node.state.workers} == {WorkerStatus.ALIVE}
    node.feed(ev.WorkerEnded(Round(1), 0, 0), ev.WorkerEnded(Round(1), 2, 0))
    assert len(node.said()) == 1, "the others are all that have to be done"
