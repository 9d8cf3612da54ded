"""AdaScale: by how much the learning rate may grow with the batch, from how noisy the gradients are. Pure.

Johnson, Agrawal, Gu, Guestrin: AdaScale SGD, ICML 2020 (arXiv:2007.05105). With S times the batch of the reference
the gradient's variance is an S-th, so a step is worth

    r = (σ² + μ²) / (σ²/S + μ²)        between 1 (nothing but signal) and S (nothing but noise)

steps of the reference; the learning rate is multiplied by r. σ² is the variance of the reference's gradient and μ² the
square of the true gradient's norm. Section 4 of the paper estimates both from the norms that data parallelism has
anyway: those of the parts' gradients and that of their average. Here parts may differ in size, so that it is the
variance v of one sample's gradient that is estimated:

    E Σ wᵢ|gᵢ|² = μ² + v·k/n     E|ḡ|² = μ² + v/n     for k parts of n samples together, wᵢ = nᵢ/n, ḡ = Σ wᵢ gᵢ

so v = n·(Σ wᵢ|gᵢ|² - |ḡ|²)/(k - 1), which for equal parts is the paper's formula. v and μ² mean the same at every
size of the world, so what has been learnt lasts through a change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_SMOOTHED_OVER = 1000
"""The paper's smoothing: a share of ``1 - parts/1000`` of the average stays at each step."""


class AdaScale:
    """What is known of the gradients' noise, the same on all workers: ``State(noise=AdaScale(), …)`` keeps it."""

    def __init__(self) -> None:
        self.gain = 1.0
        """What the last step's learning rate was multiplied by, by the rule."""
        self.progress = 0.0
        """Steps of the reference that the training so far is worth: the sum of all gains."""
        self._variance = 0.0
        self._square = 0.0
        self._weight = 0.0

    @property
    def known(self) -> bool:
        """Whether there has been anything to estimate from: a step with two parts or more."""
        return self._weight > 0.0

    @property
    def variance(self) -> float:
        """Estimate of v, the variance of one sample's gradient; 0 if nothing is known."""
        return max(self._variance / self._weight, 0.0) if self.known else 0.0

    @property
    def square(self) -> float:
        """Estimate of μ², the square of the true gradient's norm; 0 if nothing is known."""
        return max(self._square / self._weight, 0.0) if self.known else 0.0

    def measured(self, parts: int, samples: int, mean_of_squares: float, square_of_mean: float) -> None:
        """A step's gradients: how many parts had samples, how many samples, Σ wᵢ|gᵢ|², |ḡ|². One part says nothing of
        the noise; what is not finite says nothing at all."""
        if parts < 2 or not math.isfinite(mean_of_squares) or not math.isfinite(square_of_mean):
            return
        spread = (mean_of_squares - square_of_mean) / (parts - 1)
        stays = max(1.0 - parts / _SMOOTHED_OVER, 0.0)
        # Single estimates may be negative, and are not cut off: their average would be too large.
        self._variance = stays * self._variance + (1.0 - stays) * spread * samples
        self._square = stays * self._square + (1.0 - stays) * (square_of_mean - spread)
        self._weight = stays * self._weight + (1.0 - stays)

    def gain_at(self, samples: int, scale: float) -> float:
        """r for a step of so many samples, which is ``scale`` times the reference's; 1 if nothing is known."""
        noise, signal = self.variance / max(samples, 1), self.square
        if noise + signal <= 0.0 or scale <= 0.0:
            return 1.0
        return (noise * scale + signal) / (noise + signal)

    def advance(self, samples: int, scale: float) -> float:
        """A step is made: note and return its gain."""
        self.gain = self.gain_at(samples, scale)
        self.progress += self.gain
        return self.gain

    def state_dict(self) -> dict[str, float]:
        """All of it, as numbers."""
        return {
            "gain": self.gain,
            "progress": self.progress,
            "variance": self._variance,
            "square": self._square,
            "weight": self._weight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.gain, self.progress = float(state["gain"]), float(state["progress"])
        self._variance, self._square = float(state["variance"]), float(state["square"])
        self._weight = float(state["weight"])
