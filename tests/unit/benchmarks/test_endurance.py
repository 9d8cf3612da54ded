"""The verdict of the endurance benchmark: what it calls flat, and which steps it calls wrong."""

from __future__ import annotations

import random

import pytest

from benchmarks.endurance.verdict import Steps, chained, fit_second_half, growth


def series(slope: float, noise: float, count: int = 360) -> list[tuple[float, float]]:
    draw = random.Random(1)
    return [(10.0 * number, 70 + slope * number + draw.uniform(-noise, noise)) for number in range(count)]


def test_a_leak_is_seen_in_noise_larger_than_its_steps() -> None:
    assert not growth("memory", series(0.1, 5), 10, " MB").good
    assert growth("memory", series(0.0, 5), 10, " MB").good


def test_a_small_growth_is_let_pass_and_a_line_is_found_exactly() -> None:
    found = fit_second_half(series(0.05, 0))
    assert abs(found.growth - 0.05 * 179) < 1e-6 and found.error < 1e-6
    assert found.flat(10) and not found.flat(8)


def test_what_rises_before_the_second_half_is_the_beginning() -> None:
    rising = [(float(number), float(min(number, 50))) for number in range(100)]
    assert abs(fit_second_half(rising).growth) < 1e-9


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_too_few_samples_are_a_failure(count: int) -> None:
    found = growth("memory", series(0.0, 5, count), 10, " MB")
    assert not found.good
    assert found.figures.startswith("too few samples")


def test_the_fewest_samples_that_decide() -> None:
    assert growth("memory", series(0.0, 0, 5), 10, " MB").good


def fed(*numbers: int) -> Steps:
    steps, chains = Steps(), [0]
    for number in range(1, 10):
        chains.append(chained(chains[-1], number))
    for number in numbers:
        steps.take(0, number, chains[number])
    return steps


def test_steps_in_order_are_right_and_repeated_ones_are_counted() -> None:
    steps = fed(1, 2, 3, 3, 4)
    assert (steps.last, steps.made, steps.redone, steps.wrong) == (4, 5, 1, [])


def test_a_step_that_is_left_out_is_wrong() -> None:
    assert fed(1, 2, 4).wrong == ["step 4 came after step 2"]


def test_a_step_that_rank_0_could_not_write_down_counts_if_another_rank_did() -> None:
    steps = fed(1, 2)
    steps.take(1, 3, chained(chained(chained(0, 1), 2), 3))
    steps.take(0, 4, chained(chained(chained(chained(0, 1), 2), 3), 4))
    assert (steps.last, steps.redone, steps.wrong) == (4, 0, [])


def test_a_step_on_another_state_is_wrong_on_any_rank() -> None:
    steps = fed(1, 2)
    steps.take(1, 3, chained(chained(0, 1), 3))
    assert steps.wrong == ["step 3 of rank 1 was made on another state than that of step 2"]
