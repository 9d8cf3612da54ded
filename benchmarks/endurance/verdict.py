"""Decides whether a figure grows, and whether each step was made on the state of the previous step. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

CHAIN_FACTOR = 6_364_136_223_846_793_005
CHAIN_MODULUS = 1 << 61
SIGMAS = 2.0
LEAST_SAMPLES = 3
"""A line through fewer samples has no error, and decides nothing."""


def chained(chain: int, step: int) -> int:
    """The checksum after a step: only this order of steps leads to this number."""
    return (chain * CHAIN_FACTOR + step) % CHAIN_MODULUS


@dataclass(frozen=True, slots=True)
class Fit:
    """A least-squares line through the second half of a series. ``growth`` is over that half, with two standard errors
    as ``error``."""

    samples: int
    mean: float
    growth: float
    error: float

    def flat(self, allowed: float) -> bool:
        """Whether the growth is within the allowed limit, or not significantly different from zero."""
        return self.growth <= allowed or self.growth <= self.error


def fit_second_half(series: Sequence[tuple[float, float]]) -> Fit:
    """Fit a line. ``series``: time and value, in order of time."""
    middle = (series[0][0] + series[-1][0]) / 2 if series else 0.0
    half = [(t, value) for t, value in series if t >= middle]
    count = len(half)
    if count < LEAST_SAMPLES:
        return Fit(count, sum(value for _, value in half) / max(1, count), 0.0, math.inf)
    mean_t = sum(t for t, _ in half) / count
    mean = sum(value for _, value in half) / count
    spread = sum((t - mean_t) ** 2 for t, _ in half)
    slope = sum((t - mean_t) * (value - mean) for t, value in half) / spread
    residual = sum((value - mean - slope * (t - mean_t)) ** 2 for t, value in half)
    span = half[-1][0] - half[0][0]
    return Fit(count, mean, slope * span, SIGMAS * span * math.sqrt(residual / (count - 2) / spread))


@dataclass(slots=True)
class Steps:
    """Follows the steps that workers report."""

    last: int = 0
    """The last step made by any worker."""
    made: int = 0
    """Number of steps made by rank 0, including repeated ones."""
    redone: int = 0
    wrong: list[str] = field(default_factory=list)
    """Steps that were left out, or made on a state other than that of the previous step."""
    _last_of_first: int = 0
    """The last step written by rank 0."""
    _chains: list[int] = field(default_factory=lambda: [0])

    def take(self, rank: int, step: int, chain: int) -> None:
        """Process one line of one worker. Lines of different workers may come in any order, those of one worker in
        order."""
        while len(self._chains) <= step:
            self._chains.append(chained(self._chains[-1], len(self._chains)))
        if self._chains[step] != chain:
            self.wrong.append(f"step {step} of rank {rank} was made on another state than that of step {step - 1}")
        if step > self.last + 1:
            self.wrong.append(f"step {step} came after step {self.last}")
        self.last = max(self.last, step)
        if rank:
            return  # rank 0 may have made this step as well, but was killed before it reported it
        self.made += 1
        if step <= self._last_of_first:
            self.redone += 1
        self._last_of_first = max(self._last_of_first, step)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the verdict."""

    what: str
    good: bool
    figures: str


def growth(what: str, series: Sequence[tuple[float, float]], allowed: float, unit: str) -> Finding:
    """Whether one figure stays constant. Too few samples are a failure: nothing was measured."""
    fit = fit_second_half(series)
    if fit.samples < LEAST_SAMPLES:
        text = f"too few samples: {fit.samples} in the second half, at least {LEAST_SAMPLES} are needed; run for longer"
        return Finding(what, False, text)
    peak = max((value for _, value in series), default=0.0)
    text = (
        f"mean {fit.mean:.1f}{unit}, peak {peak:.1f}{unit}; growth over the second half {fit.growth:+.2f}{unit} "
        f"± {fit.error:.2f} (allowed {allowed:g})"
    )
    return Finding(what, fit.flat(allowed), text)


def report(findings: Iterable[Finding]) -> list[str]:
    """The report as lines of text."""
    return [f"{'ok  ' if one.good else 'FAIL'} {one.what}: {one.figures}" for one in findings]
