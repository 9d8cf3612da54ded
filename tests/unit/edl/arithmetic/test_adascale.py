"""AdaScale's estimates against gradients whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.arithmetic.adascale import AdaScale

DIMENSION = 400


def gradients(rng: np.random.Generator, sizes: list[int], signal: float, noise: float) -> list[np.ndarray]:
    """Mean gradients of parts: the true one has the square norm ``signal``, a sample's the variance ``noise``."""
    true = np.full(DIMENSION, math.sqrt(signal / DIMENSION))
    return [true + rng.normal(0, math.sqrt(noise / DIMENSION / size), DIMENSION) for size in sizes]


def step(known: AdaScale, rng: np.random.Generator, sizes: list[int], signal: float, noise: float) -> None:
    total = sum(sizes)
    parts = gradients(rng, sizes, signal, noise)
    mean = sum(size / total * part for size, part in zip(sizes, parts, strict=True))
    squares = sum(size / total * float(part @ part) for size, part in zip(sizes, parts, strict=True))
    known.measured(len(sizes), total, squares, float(np.dot(mean, mean)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[8, 8], [8, 8, 8, 8], [16, 1], [13, 7, 5, 1, 3], [4] * 32])
@pytest.mark.parametrize(("signal", "noise"), [(1.0, 50.0), (2.0, 1.0), (0.1, 200.0)])
def test_the_estimates_are_those_of_the_gradients(sizes: list[int], signal: float, noise: float) -> None:
    rng = np.random.default_rng([len(sizes), int(noise)])
    known = AdaScale()
    for _ in range(3000):
        step(known, rng, sizes, signal, noise)
    total = sum(sizes)
    assert known.variance == pytest.approx(noise, rel=0.1)
    # What is left of the noise in the mean bounds how well the signal can be seen.
    assert known.square == pytest.approx(signal, abs=0.1 * signal + 0.05 * noise / total)


def test_equal_parts_give_the_papers_formula() -> None:
    """σ² = Σ|gᵢ|²/(S-1) - S/(S-1)·|ḡ|², μ² = |ḡ|² - σ²/S, r = (σ²+μ²)/(σ²/S+μ²)."""
    rng = np.random.default_rng(1)
    each, count = 8, 5
    parts = gradients(rng, [each] * count, 1.0, 30.0)
    mean = sum(parts) / count
    squares = [float(part @ part) for part in parts]
    mean_square = float(np.dot(mean, mean))
    sigma2 = sum(squares) / (count - 1) - count / (count - 1) * mean_square
    mu2 = mean_square - sigma2 / count
    known = AdaScale()
    known.measured(count, each * count, sum(squares) / count, mean_square)
    assert known.gain_at(each * count, count) == pytest.approx((sigma2 + mu2) / (sigma2 / count + mu2), rel=1e-12)


@pytest.mark.parametrize(("signal", "noise", "expected"), [(1.0, 0.0, 1.0), (0.0, 1.0, 4.0), (1.0, 64.0, 5 / 2)])
def test_the_gain_at_four_times_the_batch(signal: float, noise: float, expected: float) -> None:
    """All signal: no gain. All noise: as much as the batch. Between: σ² = 64/16 = 4 at the reference of 16 samples."""
    known = AdaScale()
    samples = 64
    known.measured(2, samples, signal + noise * 2 / samples, signal + noise / samples)
    assert known.gain_at(samples, 4.0) == pytest.approx(expected)


def test_a_job_that_has_measured_nothing_can_be_saved() -> None:
    other = AdaScale()
    other.load_state_dict(AdaScale().state_dict())
    assert (other.gain, other.progress, other.variance, other.square, other.known) == (1.0, 0.0, 0.0, 0.0, False)


def test_one_part_tells_nothing() -> None:
    known = AdaScale()
    known.measured(1, 8, 3.0, 3.0)
    assert not known.known
    assert known.advance(8, 5.0) == 1.0
    assert known.progress == 1.0


def test_what_is_not_finite_is_not_taken_in() -> None:
    known = AdaScale()
    known.measured(2, 8, math.inf, 1.0)
    known.measured(2, 8, 1.0, math.nan)
    assert not known.known


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=20),
    st.integers(2, 2000),
    st.floats(0.01, 100),
)
def test_the_gain_lies_between_nothing_and_the_scale(
    steps: list[tuple[float, float]], parts: int, scale: float
) -> None:
    known = AdaScale()
    for squares, mean in steps:
        known.measured(parts, parts * 4, squares, mean)
    gain = known.advance(parts * 4, scale)
    assert min(1.0, scale) * (1 - 1e-9) <= gain <= max(1.0, scale) * (1 + 1e-9)


def test_it_goes_on_where_it_was() -> None:
    rng = np.random.default_rng(5)
    one, other = AdaScale(), AdaScale()
    for _ in range(20):
        step(one, rng, [4, 4, 4], 1.0, 20.0)
        one.advance(12, 3.0)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert other.gain_at(12, 3.0) == one.gain_at(12, 3.0) and other.gain == one.gain
    assert 1.0 < one.gain < 3.0
    assert one.progress > 20.0


def test_what_was_learnt_holds_at_another_size() -> None:
    """Gains at other sizes, from measurements at one."""
    rng = np.random.default_rng(6)
    known = AdaScale()
    for _ in range(5000):
        step(known, rng, [16, 16], 1.0, 40.0)
    for workers in (1, 3, 8):
        samples = 16 * workers
        sigma2 = 40.0 / 16
        expected = (sigma2 + 1.0) / (sigma2 / workers + 1.0)
        assert known.gain_at(samples, workers) == pytest.approx(expected, rel=0.1)
