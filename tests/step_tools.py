"""A loader for tests of ``accumulate``: what it hands out is said beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from edl.worker.steps import Share

Batch = tuple[Any, Any]


class Given:
    """``edl.worker.steps.StepLoader`` over a list of steps."""

    def __init__(self, steps: Sequence[Sequence[tuple[Any, Share]]]) -> None:
        self.steps = steps
        self.handed_out = 0

    def shares(self) -> Iterator[tuple[Any, Share]]:
        for step in self.steps:
            for item in step:
                self.handed_out += 1
                yield item


def uneven(rng: np.random.Generator, workers: int, width: int) -> tuple[list[list[tuple[Batch, Share]]], Batch]:
    """One step: for each worker its micro-batches, among them stand-ins full of NaN and infinity; and all samples."""
    micros = int(rng.integers(1, 5))
    sizes = rng.integers(0, 6, (workers, micros))
    if not sizes.sum():
        sizes[rng.integers(workers), rng.integers(micros)] = 1
    if rng.random() < 0.5:
        sizes[rng.integers(workers), micros - 1] = 0  # where the wrapper exchanges
    if not sizes.sum():
        sizes[0, 0] = 3
    total = int(sizes.sum())
    every: list[list[tuple[Batch, Share]]] = []
    samples: list[Batch] = []
    for worker in range(workers):
        own: list[tuple[Batch, Share]] = []
        for micro in range(micros):
            count = int(sizes[worker, micro])
            batch = (rng.normal(size=(max(count, 2), width)), rng.normal(size=(max(count, 2), 1)))
            if count:
                batch = (batch[0][:count], batch[1][:count])
                samples.append(batch)
            else:
                batch[0][0, 0], batch[1][1, 0] = np.nan, np.inf
            own.append((batch, Share(count, total, micro, micros)))
        every.append(own)
    return every, (np.concatenate([x for x, _ in samples]), np.concatenate([y for _, y in samples]))


def logical_steps(
    count: int, ranks: int, workers: int, worker: int, each: int, width: int, seed: int
) -> list[list[tuple[Batch, Share]]]:
    """Steps of one worker that holds its block of logical ranks; each rank has two micro-batches. In the last step the
    first ranks have no samples, and the others none in their second micro-batch. The numbers depend on step and
    logical rank only."""
    least, more = divmod(ranks, workers)
    first = worker * least + min(worker, more)
    block = range(first, first + least + (worker < more))
    most = least + (more > 0)
    steps = []
    for step in range(count):
        last = step == count - 1
        missing = ranks // 3 if last else 0
        total = (ranks - missing) * (each - each // 2 if last else each)
        micros = 2 * most
        items: list[tuple[Batch, Share]] = []
        for rank in block:
            rng = np.random.default_rng([seed, step, rank])
            x, y = rng.normal(size=(each, width)), rng.normal(size=(each, 1))
            halves = np.array_split(np.arange(each), 2)
            for number, half in enumerate(halves):
                samples = 0 if rank < missing or (last and number) else len(half)
                nothing = 1.0 if samples else np.nan
                items.append(((x[half] * nothing, y[half]), Share(samples, total, len(items), micros, rank)))
        while len(items) < micros:
            stand_in = (np.full((2, width), np.nan), np.zeros((2, 1)))
            items.append((stand_in, Share(0, total, len(items), micros, -1)))
        steps.append(items)
    return steps
