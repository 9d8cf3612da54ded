"""The samples of one worker's micro-batches in an epoch, for a loader of any framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

from edl.integrations.step_split import StepSplit
from edl.worker.sampler import CoreSampler


class StepIndices:
    """The micro-batches of one worker in an epoch, each as the list of its samples' indices."""

    def __init__(self, order: CoreSampler, split: StepSplit, drop_last: bool) -> None:
        self.sampler = order
        """Where trainers look for ``set_epoch``."""
        self.split = split
        self.drop_last = drop_last
        self.limit = sys.maxsize
        """Most steps of an epoch."""
        self.start = 0
        """The step with which the next iteration begins; those after it begin with the first one."""

    @property
    def samples(self) -> int:
        """Number of samples in the order of an epoch."""
        return self.sampler.places()

    @property
    def steps(self) -> int:
        """Number of steps in an epoch."""
        return min(self.split.steps(self.samples, self.drop_last), self.limit)

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return min(self.split.batches(self.samples, self.drop_last), self.limit * self.split.accumulation)

    def __iter__(self) -> Iterator[list[int]]:
        begin, self.start = self.start * self.split.accumulation, 0
        order = self.sampler.order()
        for places in islice(self.split.places(len(order), self.drop_last), begin, len(self)):
            yield order.take(range(places[0], places[-1] + 1))
