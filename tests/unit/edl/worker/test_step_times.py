"""Windows of a worker's steps."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from edl.wire.local import StepTimes
from edl.wire.rank_pace import UNKNOWN
from edl.worker.step_times import StepMeter, Totals

WINDOW_S = 5.0


def totals(
    peers_s: float = 0.0, committing_s: float = 0.0, waiting_s: float = 0.0, idle_s: float = 0.0, samples: int = 0
) -> Callable[[], Totals]:
    return lambda: Totals(peers_s, committing_s, waiting_s, idle_s, samples)


def test_a_window_ends_with_the_first_step_after_its_time() -> None:
    meter = StepMeter(WINDOW_S)
    assert meter.passed(1, 10.0, totals(1.0, 1.0, 1.0, 1.0, 100)) is None
    assert meter.passed(1, 11.0, totals()) is None
    assert meter.passed(1, 14.0, totals()) is None
    found = meter.passed(1, 20.0, totals(3.0, 2.0, 6.0, 2.5, 130))
    assert found == StepTimes(1, 3.0, 6.0, 0.2, 0.1, 0.5, 0.15, 10.0)
    assert meter.passed(1, 21.0, totals()) is None


def test_windows_do_not_span_rounds() -> None:
    meter = StepMeter(WINDOW_S)
    meter.passed(1, 0.0, totals())
    assert meter.passed(2, 100.0, totals()) is None
    assert meter.passed(2, 101.0, totals()) is None
    found = meter.passed(2, 106.0, totals())
    assert found is not None and (found.round, found.slowest_s) == (2, 5.0)


@pytest.mark.parametrize(("before_s", "now_s"), [(UNKNOWN, 1.0), (1.0, UNKNOWN), (3.0, 1.0)])
def test_waits_that_are_not_known_at_both_ends_are_unknown(before_s: float, now_s: float) -> None:
    meter = StepMeter(WINDOW_S)
    meter.passed(1, 0.0, totals(before_s))
    found = meter.passed(1, 10.0, totals(now_s))
    assert found is not None and found.peers_share == UNKNOWN


def test_totals_are_read_only_at_the_ends_of_windows() -> None:
    read: list[float] = []
    meter = StepMeter(WINDOW_S)

    def reading() -> Totals:
        read.append(now_s)
        return Totals(0, 0, 0, 0)

    now_s = 0.0
    for number in range(1001):
        now_s = number * 0.01
        meter.passed(1, now_s, reading)
    assert read == [0.0, 5.0, 10.0]


def test_it_agrees_with_a_plain_sum() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        meter, now_s, spent = StepMeter(WINDOW_S), 0.0, (0.0, 0.0, 0.0, 0.0)
        meter.passed(1, now_s, totals(*spent))
        times: list[float] = []
        began_s, before = 0.0, spent
        for _ in range(200):
            step_s = rng.expovariate(2.0)
            times.append(step_s)
            now_s += step_s
            a, b, c, d = (one + step_s * rng.random() / 4 for one in spent)
            spent = (a, b, c, d)
            found = meter.passed(1, now_s, totals(*spent))
            assert (found is not None) == (now_s - began_s >= WINDOW_S)
            if found is not None:
                took_s = now_s - began_s
                shares = [(now - was) / took_s for now, was in zip(spent, before, strict=True)]
                assert [found.peers_share, found.commit_share, found.data_share, found.idle_share] == pytest.approx(
                    shares
                )
                assert (found.step_s, found.slowest_s) == pytest.approx((statistics.median(times), max(times)))
                began_s, before, times = now_s, spent, []
