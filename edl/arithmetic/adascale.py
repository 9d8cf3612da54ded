"""AdaScale: how far the learning rate may grow with the batch size, estimated from gradient noise. Pure.

Johnson, Agrawal, Gu, Guestrin: AdaScale SGD, ICML 2020 (arXiv:2007.05105). With S times the reference batch the
gradient's variance falls to 1/S, so a step is worth

    r = (σ² + μ²) / (σ²/S + μ²)        between 1 (no noise) and S (only noise)

reference steps, and the learning rate is multiplied by r. σ² is the variance of the reference gradient, μ² the squared
norm of the true gradient. Section 4 of the paper estimates both from norms that data parallelism has at hand: those of
the parts' gradients and that of their average. Here parts may differ in size, so the estimate is of v, the variance of
one sample's gradient:

    E Σ wᵢ|gᵢ|² = μ² + v·k/n     E|ḡ|² = μ² + v/n     for k parts of n samples together, wᵢ = nᵢ/n, ḡ = Σ wᵢ gᵢ

so v = n·(Σ wᵢ|gᵢ|² - |ḡ|²)/(k - 1), which for equal parts is the paper's formula. v and μ² do not depend on the size
of the world, so the estimates remain valid when it changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_SMOOTHED_OVER = 1000
"""The paper's smoothing: at each step the running average keeps a share of ``1 - parts/1000``."""


class AdaScale:
    """Running estimates of gradient noise, equal on all workers. ``State(noise=AdaScale(), …)`` keeps them in the job's
    state."""

    def __init__(self) -> None:
        self.gain = 1.0
        """The factor by which the rule multiplied the learning rate of the last step."""
        self.progress = 0.0
        """Number of reference steps that the training so far is worth: the sum of all gains."""
        self._variance = 0.0
        self._square = 0.0
        self._weight = 0.0

    @property
    def known(self) -> bool:
        """Whether there is an estimate; it takes at least one step with two or more parts."""
        return self._weight > 0.0

    @property
    def variance(self) -> float:
        """Estimate of v, the variance of one sample's gradient; 0 without an estimate."""
        return max(self._variance / self._weight, 0.0) if self.known else 0.0

    @property
    def square(self) -> float:
        """Estimate of μ², the squared norm of the true gradient; 0 without an estimate."""
        return max(self._square / self._weight, 0.0) if self.known else 0.0

    def measured(self, parts: int, samples: int, mean_of_squares: float, square_of_mean: float) -> None:
        """Add one step's gradients: the number of parts that had samples, the number of samples, ``Σ wᵢ|gᵢ|²`` and
        ``|ḡ|²``.
        Steps with a single part, or with a value that is not finite, are ignored."""
        if parts < 2 or not math.isfinite(mean_of_squares) or not math.isfinite(square_of_mean):
            return
        spread = (mean_of_squares - square_of_mean) / (parts - 1)
        stays = max(1.0 - parts / _SMOOTHED_OVER, 0.0)
        # Single estimates may be negative; clipping them would bias the average upwards.
        self._variance = stays * self._variance + (1.0 - stays) * spread * samples
        self._square = stays * self._square + (1.0 - stays) * (square_of_mean - spread)
        self._weight = stays * self._weight + (1.0 - stays)

    def gain_at(self, samples: int, scale: float) -> float:
        """Gain of a step of ``samples`` samples, ``scale`` times the reference batch: how many steps of the reference
        batch it is worth, between 1 and ``scale``; 1 without an estimate."""
        noise, signal = self.variance / max(samples, 1), self.square
        if noise + signal <= 0.0 or scale <= 0.0:
            return 1.0
        return (noise * scale + signal) / (noise + signal)

    def advance(self, samples: int, scale: float) -> float:
        """Record that a step was made; returns its gain."""
        self.gain = self.gain_at(samples, scale)
        self.progress += self.gain
        return self.gain

    def state_dict(self) -> dict[str, float]:
        """The estimates and totals as plain numbers."""
        return {
            "gain": self.gain,
            "progress": self.progress,
            "variance": self._variance,
            "square": self._square,
            "weight": self._weight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned."""
        self.gain, self.progress = float(state["gain"]), float(state["progress"])
        self._variance, self._square = float(state["variance"]), float(state["square"])
        self._weight = float(state["weight"])
