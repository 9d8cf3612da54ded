"""Outer steps do what the papers' equations say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from edl.arithmetic.outer_step import OuterReport, OuterRule, buckets, equal, shares, weigh
from edl.errors import StateError


def report(**changes: Any) -> OuterReport:
    return OuterReport(**{"inner_steps": 8, "rule": (0.7, 0.9), "wire": "", "weight": 4.0, **changes})


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.0), (1.0, 0.5)])
def test_the_rule_is_nesterov_sgd(lr: float, momentum: float) -> None:
    """Against torch's formula written out: b = g at first, then mu b + g; x -= lr (g + mu b)."""
    random = np.random.default_rng(1)
    x = random.normal(size=50)
    expected, b = x.copy(), None
    velocity = np.zeros_like(x)
    rule = OuterRule(lr, momentum)
    for _ in range(20):
        g = random.normal(size=50)
        b = g.copy() if b is None else momentum * b + g
        expected = expected - lr * (g + momentum * b)
        rule.apply(x, velocity, g)
    np.testing.assert_allclose(x, expected, rtol=1e-13)


def test_the_rule_without_momentum_and_with_rate_1_gives_the_average() -> None:
    workers = [np.array([1.0, 2.0]), np.array([3.0, 6.0])]
    x = np.array([10.0, 10.0])
    gradient = sum(0.5 * (x - one) for one in workers)
    OuterRule(1.0, 0.0).apply(x, None, gradient)
    assert x.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("lr", [0, -1.0, math.inf, math.nan])
def test_an_impossible_rate_is_refused(lr: float) -> None:
    with pytest.raises(StateError, match=f"outer_lr={lr}"):
        OuterRule(lr, 0.0)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, math.nan])
def test_an_impossible_momentum_is_refused(momentum: float) -> None:
    with pytest.raises(StateError, match=f"outer_momentum={momentum}"):
        OuterRule(1.0, momentum)


def test_shares_follow_the_samples() -> None:
    assert shares([report(weight=6), report(weight=2)]) == [0.75, 0.25]
    assert shares([report(weight=0), report(weight=2)]) == [0.0, 1.0]
    assert shares([report(weight=0), report(weight=0)]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "value"), [("inner_steps", 9), ("rule", (0.7, 0.8)), ("rule", (1.0, 0.9)), ("wire", "bfloat16")]
)
def test_workers_at_different_outer_steps_are_refused(name: str, value: Any) -> None:
    other = OuterReport.decode(report(**{name: value}).encode())
    with pytest.raises(StateError, match=rf"{name} is .* on rank 1 and .* on rank 0: every worker must"):
        shares([report(), other])


def test_a_report_survives_its_encoding() -> None:
    assert OuterReport.decode(report().encode()) == report()


def test_a_share_of_0_hides_nan() -> None:
    array = np.array([math.nan, 1.0])
    weigh(array, 0.0)
    assert array.tolist() == [0.0, 0.0]
    array = np.array([2.0, 4.0])
    weigh(array, 0.25)
    assert array.tolist() == [0.5, 1.0]


def test_equal_means_every_value() -> None:
    one = [np.array([1.0, 2.0]), np.array(3.0)]
    assert equal(one, [array.copy() for array in one])
    assert not equal(one, [one[0], np.array(4.0)])
    assert not equal(one, one[:1])
    assert not equal([np.array(math.nan)], [np.array(math.nan)])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([5], [[0]]),
        ([20], [[0]]),
        ([4, 4, 4], [[0, 1], [2]]),
        ([20, 1, 1], [[0], [1, 2]]),
        ([1, 20, 1], [[0], [1], [2]]),
        ([10, 0, 0], [[0, 1, 2]]),
    ],
)
def test_buckets_hold_up_to_the_limit(sizes: list[int], expected: list[list[int]]) -> None:
    assert [list(group) for group in buckets(sizes, 10)] == expected
