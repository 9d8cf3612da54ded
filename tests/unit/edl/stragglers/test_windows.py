"""Comparing the ranks of a world in one window."""

from __future__ import annotations

import random
import statistics

import pytest

from edl.stragglers.windows import Cause, Excess, Others, compare
from edl.wire.rank_pace import UNKNOWN, RankPace

LIMIT = 0.2


def window(
    peers: float = 0.5, data: float = 0.0, stopped: float = 0.0, starved: float = 0.0, **more: float
) -> RankPace:
    return RankPace(
        slot=0, step_s=0.1, slowest_s=0.2, peers_share=peers, data_share=data, stopped_share=stopped,
        starved_share=starved, **more,
    )  # fmt: skip


def of(*windows: RankPace) -> dict[int, Excess]:
    return compare(dict(enumerate(windows)), LIMIT)


def slow(found: dict[int, Excess]) -> list[int]:
    return [rank for rank, one in found.items() if one.slow]


def test_the_median_of_the_others_is_that_of_a_list_without_one_value() -> None:
    for seed in range(3000):
        rng = random.Random(seed)
        values = [rng.choice([0.0, 0.5, rng.random()]) for _ in range(rng.randrange(1, 12))]
        others = Others(values)
        for index, value in enumerate(values):
            rest = [*values[:index], *values[index + 1 :]]
            expected = statistics.median(rest) if rest else value
            assert others.median(value) == pytest.approx(expected)


def test_the_rank_that_waits_least_is_the_slow_one() -> None:
    found = of(window(peers=0.1), window(peers=0.5))
    assert slow(found) == [0]
    assert found[0].share == pytest.approx(0.4)
    assert found[0].cause is Cause.COMPUTE
    assert found[0].evidence.text == "computes 90% of the time, the others 50%"
    assert found[1].share == pytest.approx(-0.4) or found[1].share <= 0


@pytest.mark.parametrize(("peers", "is_slow"), [(0.301, False), (0.299, True)])
def test_the_limit_is_a_share_of_the_step(peers: float, is_slow: bool) -> None:
    assert bool(slow(of(window(peers=peers), window()))) is is_slow


def test_causes() -> None:
    healthy = window()
    assert of(window(peers=0.1, data=0.35), healthy)[0].cause is Cause.DATA
    assert of(window(peers=0.1, data=0.1), healthy)[0].cause is Cause.COMPUTE
    assert of(window(peers=0.1, stopped=0.3), healthy)[0].cause is Cause.STOPPED
    starved = of(window(peers=0.1, starved=0.4, idle_share=0.4), healthy)[0]
    assert (starved.cause, starved.slow, starved.doubtful) == (Cause.STOPPED, True, True)
    assert starved.evidence.text == "has no CPU 40% of the time, the others 0%"


def test_a_stopped_process_needs_no_other_evidence() -> None:
    """If collectives take most of the time, a stopped rank mostly stops in one, where all ranks wait alike."""
    found = of(window(peers=0.9, stopped=0.6), window(peers=0.9), window(peers=0.9))
    assert slow(found) == [0]
    assert found[0].evidence.text == "is stopped 60% of the time, the others 0%"
    assert slow(of(window(peers=UNKNOWN, stopped=0.6), window(peers=UNKNOWN))) == [0]


def test_what_all_ranks_have_is_no_reason() -> None:
    assert not slow(of(*[window(peers=0.1, data=0.5, stopped=0.5, starved=0.5)] * 3))


def test_more_waiting_for_data_without_more_own_time_is_no_reason() -> None:
    """Such as a loader that is overlapped with what the others need for something else."""
    assert not slow(of(window(peers=0.5, data=0.4), window(peers=0.5)))


def test_unknown_waits_accuse_nobody() -> None:
    assert not slow(of(window(peers=UNKNOWN), window(peers=0.9)))


def test_a_lack_of_cpus_that_others_share_is_chance() -> None:
    mine, others = window(peers=0.1, starved=0.7, idle_share=0.7), window(peers=0.5, starved=0.2, idle_share=0.2)
    assert not slow(of(mine, others))


@pytest.mark.parametrize(("others", "is_slow"), [(0.05, True), (0.09, True), (0.11, False)])
def test_where_the_others_hardly_lack_cpus_it_is_not(others: float, is_slow: bool) -> None:
    mine, other = (window(peers=peers, starved=lack, idle_share=lack) for peers, lack in ((0.1, 0.6), (0.6, others)))
    found = of(mine, other)
    assert bool(slow(found)) is is_slow
    assert not is_slow or found[0].doubtful


def test_waiting_for_a_cpu_in_a_collective_is_not_own_time() -> None:
    """Such a rank used its CPU all the time outside collectives, so nothing is subtracted from its own time."""
    assert slow(of(window(peers=0.1, starved=0.5, idle_share=0.0), window(peers=0.5, starved=0.5, idle_share=0.0))) == [
        0
    ]


def test_commits_are_not_own_time() -> None:
    """edl copies the state on one rank of each node."""
    assert not slow(of(window(peers=0.2, commit_share=0.3), window(peers=0.5)))


def test_ranks_that_usually_differ_are_compared_by_their_difference() -> None:
    peers = [0.1, 0.3, 0.5, 0.7, 0.9]
    assert not slow(of(*(window(peers=one) for one in peers)))
    assert slow(of(*(window(peers=one) for one in (0.1, 0.6, 0.6, 0.61, 0.6)))) == [0]


def test_alone_nobody_is_slow() -> None:
    assert of(window(peers=0.0)) == {}
    assert of() == {}


def test_a_limit_of_nothing_is_a_small_one() -> None:
    found = compare({0: window(peers=0.495), 1: window(peers=0.5)}, 0.0)
    assert not slow(found)
    assert slow(compare({0: window(peers=0.48), 1: window(peers=0.5)}, 0.0)) == [0]
