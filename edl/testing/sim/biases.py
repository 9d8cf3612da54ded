"""How often processes are slow or unresponsive. Each schedule may draw its own mix."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Biases:
    """Chances (0 to 1) and magnitudes of delays."""

    deaf: float = 0.08
    """Chance that a worker ignores SIGTERM."""
    sluggish: float = 0.05
    """Chance that a worker takes 2 s longer to boot, or 3 s longer to leave its round."""
    late_watch: float = 0.03
    """Chance that a watch delivers a change late."""
    slow_reader: float = 0.0
    """Chance that the receiver of a stream reads a message late. The messages behind it are delayed too."""
    slowest_read_s: float = 0.0
    """Longest delay of a late read."""
    drift: float = 0.0
    """Each process's clock runs fast or slow by up to this fraction."""

    @classmethod
    def draw(cls, rng: random.Random) -> Biases:
        """A mix in which each bias is absent, mild or strong."""
        return cls(
            deaf=rng.choice((0.0, 0.08, 0.5, 0.9)),
            sluggish=rng.choice((0.0, 0.05, 0.3)),
            late_watch=rng.choice((0.0, 0.03, 0.3)),
            slow_reader=rng.choice((0.0, 0.0, 0.02, 0.2)),
            slowest_read_s=rng.choice((0.05, 0.3, 1.0)),
            drift=rng.choice((0.0, 0.0, 0.001, 0.01)),
        )


USUAL = Biases()
