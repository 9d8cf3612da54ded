"""Random schedules in which people ask for other sizes: what was granted holds, and the world comes to conform."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from edl.agent.machine import leaving, rounds
from edl.agent.machine.turn import AgentTurn as AgentTurn
from edl.master import forming, machine, planning, resizing, resting, shell, sizing
from edl.master.events import Grant
from edl.master.turn import MasterTurn
from edl.testing.sim.faults import SIZES
from edl.testing.sim.schedules import Schedule, play
from edl.wire.scale_requests import Granted
from tests.sim.batches import play_all

BATCH = 100
BATCHES = 1
BATCHES_OF_SOAK = 100
WITHIN = 200
"""Schedules in which a planted bug has to show."""
KNOWN = (
    *(0, 23, 232, 1298, 2233, 2397, 2462, 2865, 3706, 4005, 4230, 4536, 5077, 5625, 6479, 8345, 9771),
    *(2088, 2273, 11190, 13524, 13737, 14579, 20313, 23245, 23813),
)
"""Schedules that have found something before."""


@pytest.mark.parametrize("seed", KNOWN)
def test_known_seed(seed: int) -> None:
    assert not play(Schedule.resized(seed)).violation


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch", [pytest.param(n, marks=() if n < BATCHES else pytest.mark.soak) for n in range(BATCHES_OF_SOAK)]
)
def test_schedules(batch: int) -> None:
    play_all(Schedule.resized, range(batch * BATCH, (batch + 1) * BATCH), worlds=2)


def test_schedules_meet_every_request() -> None:
    kinds = {fault.kind for seed in range(100) for fault in Schedule.resized(seed).plan.faults}
    assert set(SIZES) <= kinds


def _size_is_answered_before_it_is_stored() -> Any:
    """Somebody is told while the write is on its way, and the Master dies."""
    carry_out = shell.MasterShell._carry_out

    async def hasty(self: Any, events: Any, decision: Any) -> None:
        asking = self._asking
        grants = [effect for effect in decision.effects if isinstance(effect, Grant)]
        if asking is not None and grants:
            generation = decision.state.record.sizing.generation
            asking.settle(Granted(grants[0].verdict, grants[0].text, self._scaled, generation))
            self._asking = None
        await carry_out(self, events, decision)

    return mock.patch.object(shell.MasterShell, "_carry_out", hasty)


def _stale_requests_are_taken() -> Any:
    """The revision is not looked at."""
    judge = sizing.judge

    def careless(now: Any, request: Any, facts: Any) -> Any:
        return judge(now, request, dataclasses.replace(facts, held=getattr(request, "revision", 0)))

    return mock.patch.object(resizing, "judge", careless)


def _repeated_requests_count_again() -> Any:
    """The key of a request is not looked at."""
    return mock.patch.object(resizing, "remember", lambda seen, request, judged: ())


def _cordoned_nodes_are_taken_in() -> Any:
    """Whoever stands ready has a part in the next world."""
    return mock.patch.object(MasterTurn, "excluded", lambda self, entry: False)


def _suspended_jobs_form_worlds() -> Any:
    """The next world forms as soon as all have stopped."""

    def rest(turn: MasterTurn) -> None:
        ready, world = turn.ready(), turn.record.world
        size = turn.next_size(len(ready))
        if size.nodes:
            forming._form_with_state(turn, ready, [one.node for one in world.members] if world else [], size)

    return mock.patch.object(forming, "rest", rest)


def _size_is_forgotten_by_the_next_master() -> Any:
    """What is wanted is not part of the record."""
    take_over = machine.take_over

    def forgetful(spec: Any, record: Any, nodes: Any, now_s: float) -> Any:
        record = dataclasses.replace(record, sizing=sizing.NO_SIZING, observed=0) if record is not None else None
        return take_over(spec, record, nodes, now_s)

    return mock.patch.object(shell, "take_over", forgetful)


def _nothing_shrinks() -> Any:
    """A world that is larger than what is wanted goes on."""
    consider = resizing.consider_size

    def only_up(turn: MasterTurn) -> None:
        world = turn.record.world
        if world is not None and resizing.fit(turn).nodes >= len(world.members):
            consider(turn)

    return mock.patch.object(resizing, "consider_size", only_up)


def _resizes_interrupt() -> Any:
    """Worlds are changed without waiting for a boundary."""

    def change(turn: MasterTurn, reason: str) -> None:
        forming.stop_world(turn, reason)
        forming.try_to_form(turn)

    return mock.patch.object(planning, "change", change)


def _idle_nodes_start_workers() -> Any:
    """A node whose workers end because there is no world for a while starts others."""

    def idle(turn: AgentTurn) -> None:
        turn.end_workers(turn.state.alive, 15, "there is no world")

    return mock.patch.object(rounds, "idle", idle)


def _those_that_leave_stay() -> Any:
    """Who has been sent away is not told again by the next Master, nor on the next stream."""
    depart = resizing.depart

    def once(turn: MasterTurn) -> None:
        gone = [entry for entry in turn.nodes.values() if turn.excluded(entry) and not entry.attached]
        for entry in gone:
            turn.ordered(entry, depart=True)
        with mock.patch.object(MasterTurn, "tell", lambda self, entry, message: None):
            depart(turn)

    return mock.patch.object(resizing, "depart", once)


def _told_twice_to_leave_does_so_at_once() -> Any:
    """A node that waits for the others, and hears again that it has to leave, waits no more."""
    depart = leaving.depart

    def hasty(turn: AgentTurn, order: Any) -> None:
        if turn.state.draining is not None:
            turn.set(drain_by_s=turn.now_s)
        depart(turn, order)

    return mock.patch.object(leaving, "depart", hasty)


def _a_suspended_state_stays_in_memory() -> Any:
    """What an interrupted world leaves is not written while the job rests."""
    return mock.patch.object(resting, "_writers", lambda turn, newest: [])


FIRST = {
    "_repeated_requests_count_again": 11,
    "_cordoned_nodes_are_taken_in": 1,
    "_suspended_jobs_form_worlds": 3,
    "_nothing_shrinks": 30,
    "_resizes_interrupt": 133,
    "_idle_nodes_start_workers": 11,
    "_those_that_leave_stay": 1,
    "_a_suspended_state_stays_in_memory": 3021,
}
"""Schedules known to find a bug. When one does not any more, the search goes on behind it: enter the one it prints."""
PLANTED: list[Callable[[], Any]] = [
    _size_is_answered_before_it_is_stored,
    _stale_requests_are_taken,
    _repeated_requests_count_again,
    _cordoned_nodes_are_taken_in,
    _suspended_jobs_form_worlds,
    _size_is_forgotten_by_the_next_master,
    _nothing_shrinks,
    _resizes_interrupt,
    _idle_nodes_start_workers,
    _those_that_leave_stay,
    _told_twice_to_leave_does_so_at_once,
    _a_suspended_state_stays_in_memory,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_bug_is_found(plant: Callable[[], Any]) -> None:
    found = ""
    with plant():
        first = FIRST.get(plant.__name__, 0)
        for seed in range(first, first + WITHIN):
            found = play(Schedule.resized(seed)).violation
            if found:
                print(f"found by schedule {seed}: {found.splitlines()[0]}")
                break
    assert found
