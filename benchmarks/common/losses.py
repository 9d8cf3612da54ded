"""Compares the losses that the ranks of a job have logged with those of another job with the same samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.common.steps import World


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest one, relative to the loss of the other job, at a step; and how many steps were compared."""

    relative: float
    step: int
    compared: int

    def __str__(self) -> str:
        return f"{self.relative:.1e} of the loss at step {self.step}, of {self.compared} steps compared"


def losses(worlds: Iterable[World]) -> Iterator[tuple[int, float]]:
    """Each step that all ranks of a world have completed, and the mean of their losses. A step that was repeated comes
    again."""
    for world in worlds:
        by_step: dict[int, list[float]] = {}
        for done in world.steps.values():
            for step in done:
                if step.loss is not None:
                    by_step.setdefault(step.step, []).append(step.loss)
        yield from ((step, statistics.fmean(of)) for step, of in sorted(by_step.items()) if len(of) == world.size)


def largest_difference(found: Iterable[tuple[int, float]], expected: Mapping[int, float]) -> Difference:
    """Compare the steps that both have. Raises ``ValueError`` if they have none in common."""
    each = [(abs(loss - expected[step]) / abs(expected[step]), step) for step, loss in found if step in expected]
    if not each:
        raise ValueError("no step of the two jobs is the same")
    return Difference(*max(each), len({step for _, step in each}))
