"""A plain model of ranks that step together, for tests: windows with planted stragglers, on quiet and busy machines."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edl.stragglers.streaks import Streak, judge
from edl.stragglers.windows import compare
from edl.wire.rank_pace import RankPace

LIMIT, WINDOWS = 0.2, 6
"""The defaults of the product."""


@dataclass
class Model:
    """One job. A step lasts until the last rank has done its part; the others wait for it."""

    rng: np.random.Generator
    ranks: int
    steps: int
    """Steps in a window."""
    noise: float = 0.05
    """Relative deviation of the time of one step's part."""
    starved: float = 0.0
    """Mean time without a CPU in one step, where a rank's part takes 1. The waits are few and long."""
    transfer: float = 0.1
    samples: list[int] = field(default_factory=list)
    fixed: float = 0.0
    """Share of the part that does not depend on the number of samples."""
    slow: dict[int, float] = field(default_factory=dict)
    """Additional time of ranks in each step."""
    data: dict[int, float] = field(default_factory=dict)
    """Additional wait for data."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Share of time in which ranks are stopped."""

    def window(self) -> dict[int, RankPace]:
        """One window of all ranks."""
        shape = (self.steps, self.ranks)
        samples = np.array(self.samples or [8] * self.ranks)
        part = self.fixed + (1 - self.fixed) * samples / samples.mean()
        own = part * np.maximum(0.05, self.rng.normal(1.0, self.noise, shape))
        lack = self.rng.exponential(4.0, shape) * (self.rng.random(shape) < self.starved / 4.0)
        own = own + lack
        waits = np.zeros(shape)
        for rank, extra in self.slow.items():
            own[:, rank] += extra
        for rank, extra in self.data.items():
            waits[:, rank] = extra
            own[:, rank] += extra
        halted = np.zeros(shape)
        for rank, share in self.stopped.items():
            halted[:, rank] = own[:, rank] * (1 / (1 - share) - 1) * self.rng.exponential(1.0, self.steps)
            own[:, rank] += halted[:, rank]
        lasted = own.max(axis=1) + self.transfer
        whole = lasted.sum()
        looks = 20
        return {
            rank: RankPace(
                slot=rank,
                step_s=float(np.median(lasted)),
                slowest_s=float(lasted.max()),
                peers_share=float(1 - own[:, rank].sum() / whole),
                data_share=float(waits[:, rank].sum() / whole),
                stopped_share=float(self.rng.binomial(looks, min(1.0, halted[:, rank].sum() / whole)) / looks),
                starved_share=min(1.0, float(lack[:, rank].sum() / whole)),
                idle_share=min(1.0, float((lack + waits)[:, rank].sum() / whole)),
                samples=float(samples[rank]),
            )
            for rank in range(self.ranks)
        }


def named_in(model: Model, windows: int, needed: int = WINDOWS, limit: float = LIMIT) -> dict[int, tuple[int, str]]:
    """For each rank that is named within so many windows: in which one, and the cause."""
    streaks: dict[int, Streak] = {}
    named: dict[int, tuple[int, str]] = {}
    for number in range(1, windows + 1):
        judged = judge(streaks, compare(model.window(), limit), named, needed)
        streaks = dict(judged.streaks)
        named |= {rank: (number, one.cause.value) for rank, one in judged.named.items()}
    return named
