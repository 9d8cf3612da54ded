"""What an agent adds to its workers' windows."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Collection, Mapping

import pytest

from edl.agent.workers.hang import Watched
from edl.agent.workers.rank_paces import LONGEST_S, SHORTEST_S, RankPaces, RunShares, watch
from edl.ports import RunState
from edl.types import Round
from edl.wire.local import StepTimes
from edl.wire.rank_pace import RankPace

R1 = Round(1)


def times(round: int = 1) -> StepTimes:
    return StepTimes(round, 0.1, 0.2, 0.3, 0.05, 0.15, 0.25, 8.0)


def test_each_window_is_taken_once_in_the_order_of_the_ranks() -> None:
    waiting = {3: times(), 1: times(), 2: times(round=9)}
    paces = RankPaces(waiting)
    found = paces.take(R1, (3, 2, 1, 0))
    assert [one.slot for one in found] == [3, 1]
    assert found[0] == RankPace(3, 0.1, 0.2, 0.3, 0.05, 0.15, 0.0, 0.0, 0.25, 8.0)
    assert paces.take(R1, (3, 2, 1, 0)) == ()


def test_shares_of_time_that_a_process_does_not_run() -> None:
    shares = RunShares()
    for number, stopped in enumerate([False, True, True, False]):
        shares.look(0, 7, RunState(stopped, 100.0 + 0.5 * number), float(number))
    assert shares.take(0) == (0.5, 0.5)
    shares.look(0, 7, RunState(False, 101.5), 5.0)
    assert shares.take(0) == (0.0, 0.0)
    assert shares.take(1) == (0.0, 0.0)


def test_another_process_in_the_slot_begins_anew() -> None:
    shares = RunShares()
    shares.look(0, 7, RunState(True, 100.0), 0.0)
    shares.look(0, 8, RunState(False, 5.0), 1.0)
    shares.look(0, 8, RunState(False, 6.0), 3.0)
    assert shares.take(0) == (0.0, 0.5)
    shares.keep(())
    assert shares.take(0) == (0.0, 0.0)


class Cycle:
    """A process that is stopped for a part of each period, until a minute has passed."""

    def __init__(self, seed: int, period_s: float) -> None:
        rng = random.Random(seed)
        self.period_s, self.phase_s, self.duty = period_s, rng.random() * period_s, rng.choice([0.3, 0.6])
        self.now_s = 0.0

    def clock_s(self) -> float:
        return self.now_s

    async def pause(self, seconds: float) -> None:
        assert SHORTEST_S <= seconds <= LONGEST_S
        self.now_s += seconds
        if self.now_s > 60:
            raise InterruptedError

    def states(self, pids: Collection[int]) -> Mapping[int, RunState]:
        stopped = (self.now_s + self.phase_s) % self.period_s < self.duty * self.period_s
        return {pid: RunState(stopped, 0.0) for pid in pids}


@pytest.mark.parametrize("period_s", [0.1, 0.2, 0.25, 0.3, 0.5, 1.0])
def test_a_regular_duty_cycle_is_seen_as_it_is(period_s: float) -> None:
    """Whatever its period, and its phase: in a minute within a tenth."""
    for seed in range(20):
        cycle, shares = Cycle(seed, period_s), RunShares()
        looking = watch(shares, lambda: {0: Watched(7, 0)}, cycle.states, cycle.clock_s, cycle.pause)
        with contextlib.suppress(InterruptedError):
            asyncio.run(looking)
        assert shares.take(0)[0] == pytest.approx(cycle.duty, abs=0.1)
