"""Random schedules of jobs whose workers need no others: the world changes around them, and every job ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from edl.agent.machine import independent, rounds
from edl.agent.machine.events import FlushSaves
from edl.agent.machine.state import Worker
from edl.agent.machine.turn import AgentTurn
from edl.testing.sim.schedules import Schedule, play
from edl.types import Rank
from tests.sim.batches import play_all

BATCH = 100
BATCHES = 1
WITHIN = 100
"""Schedules in which a planted bug has to show."""


def test_known_seed() -> None:
    """All nodes asked for ever for a checkpoint that no plain script makes: the Master of a slow store fell behind."""
    assert not play(Schedule.independent(1673)).violation


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_schedules(batch: int) -> None:
    play_all(Schedule.independent, range(batch * BATCH, (batch + 1) * BATCH), worlds=3)


def _stops_all() -> Any:
    """A change of the world restarts everybody, as in a collective job."""
    return mock.patch.object(independent, "stop", rounds.stop)


def _starts_all() -> Any:
    """Living workers are started once more."""

    def take(turn: AgentTurn, world: Any, member: Any, local_rank: int) -> Any:
        return Worker(local_rank, Rank(member.first_rank + local_rank), born=world.round)

    return mock.patch.object(independent, "_take_place", take)


def _forgets_the_done() -> Any:
    """A node whose workers have all finished says so only in the world in which the last one did."""
    start = independent.start

    def quiet(turn: AgentTurn, world: Any, reason: str) -> None:
        do = turn.do

        def all_but_the_end(effect: Any) -> None:
            if not isinstance(effect, FlushSaves):
                do(effect)

        turn.do = all_but_the_end  # type: ignore[method-assign]
        start(turn, world, reason)
        turn.do = do  # type: ignore[method-assign]

    return mock.patch.object(independent, "start", quiet)


PLANTED: list[Callable[[], Any]] = [_stops_all, _starts_all, _forgets_the_done]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_bug_is_found(plant: Callable[[], Any]) -> None:
    with plant():
        found = next((v for s in range(WITHIN) if (v := play(Schedule.independent(s)).violation)), "")
    print(found.splitlines()[0] if found else "")
    assert found
