"""Divides the samples of each step among the workers, so that every world makes the same steps. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from edl.errors import StateError


class HasGlobalBatch(Protocol):
    """What a trainer keeps of its training."""

    global_batch: int
    """Samples of each step; 0 until training has begun."""


@dataclass(frozen=True, slots=True)
class StepSplit:
    """One worker's part of steps of ``global_batch`` samples.

    Step ``n`` of an epoch consists of the samples at the places ``n * global_batch`` and following in the order of the
    epoch, in a world of any size: the number of steps says which samples have been used. Each worker gets its part in
    micro-batches of at most ``micro_batch`` samples; all workers get the same number of them.
    """

    global_batch: int
    micro_batch: int
    rank: int
    world: int

    def __post_init__(self) -> None:
        """Raises ``StateError`` when the samples of a step cannot be divided among the workers."""
        if self.accumulation * self.world > self.global_batch:
            raise StateError(
                f"a global batch of {self.global_batch} cannot be divided among {self.world} workers in micro-batches "
                f"of {self.micro_batch} at most: some would get none. Limit the size of the world (--nnodes, "
                "--node-unit), or give a global_batch that is divisible by its sizes"
            )

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of each worker in a full step."""
        return self.micro_batches(self.global_batch)

    def batches(self, samples: int, drop_last: bool) -> int:
        """Number of micro-batches of each worker in an epoch of so many samples."""
        full, rest = divmod(samples, self.global_batch)
        return full * self.accumulation + (0 if drop_last else self.micro_batches(rest))

    def places(self, samples: int, drop_last: bool) -> Iterator[list[int]]:
        """The places of each micro-batch of this worker in an epoch.

        Where the last step has fewer samples than there are workers, some get a sample from the beginning of the order.
        """
        for begin in range(0, samples, self.global_batch):
            count = min(self.global_batch, samples - begin)
            if count < self.global_batch and drop_last:
                return
            micros = self.micro_batches(count)
            parts = micros * self.world
            for part in range(self.rank, parts, self.world):
                if count < parts:
                    yield [(begin + part) % samples]
                else:
                    yield list(range(begin + part * count // parts, begin + (part + 1) * count // parts))

    def steps(self, samples: int, drop_last: bool) -> int:
        """Number of steps in an epoch of so many samples."""
        full, rest = divmod(samples, self.global_batch)
        return full + (1 if rest and not drop_last else 0)

    def weight(self, batch: int, samples: int) -> float:
        """What to multiply the loss of a micro-batch with, for a trainer that divides it by ``accumulation`` and
        averages over the workers: the step's gradient is then the mean over its samples, however they are divided.

        ``batch``: number of the micro-batch in the epoch. A sample that fills up the last step counts nothing.
        """
        step, micro = divmod(batch, self.accumulation)
        count = self.count(step, samples)
        parts = self.micro_batches(count) * self.world
        part = self.rank + micro * self.world
        mine = int(part < count) if count < parts else (part + 1) * count // parts - part * count // parts
        return mine * self.accumulation * self.world / count

    def count(self, step: int, samples: int) -> int:
        """Number of samples of a step in an epoch of so many samples, over all workers."""
        return min(self.global_batch, samples - step * self.global_batch)

    def micro_batches(self, count: int) -> int:
        """Number of micro-batches of each worker in a step of so many samples."""
        return -(-count // (self.micro_batch * self.world))


def split_in_world(
    progress: HasGlobalBatch, rank: int, world: int, *, given: int, micro_batch: int, accumulation: int
) -> StepSplit:
    """A worker's part of each step in its world. The first world determines the global batch, unless it is ``given``
    (0: it is not): ``accumulation`` micro-batches of each worker.

    Raises ``StateError`` as ``StepSplit`` does.
    """
    if not progress.global_batch:
        progress.global_batch = given or micro_batch * accumulation * world
    return StepSplit(progress.global_batch, micro_batch, rank, world)
