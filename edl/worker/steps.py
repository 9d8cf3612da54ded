"""Steps and their parts: what a loader says of each batch that it hands out, so that gradients can be weighed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Share:
    """What one micro-batch is in its step. A step is what lies between two commits of all workers."""

    samples: int
    """Real samples in it; 0 for a stand-in, which is there so that all workers take the same number of micro-batches
    and must not count."""
    total: int
    """Samples of the whole step, over all workers and all their micro-batches; at least 1."""
    micro: int = 0
    """Index among this worker's micro-batches of the step."""
    micros: int = 1
    """Their number, the same on all workers."""
    logical: int = -1
    """Logical rank that it belongs to, -1 if there are none."""

    @property
    def weight(self) -> float:
        """By which the gradient of this micro-batch's mean loss is multiplied: the weights of a step add up to 1."""
        return self.samples / self.total

    @property
    def last(self) -> bool:
        """The step ends with it."""
        return self.micro == self.micros - 1


class StepLoader(Protocol):
    """What ``accumulate`` takes: ``edl.DataLoader`` and the loaders of the data service."""

    def shares(self) -> Iterator[tuple[Any, Share]]:
        """The rest of the epoch: each micro-batch with its share, step after step.

        A step counts as consumed with the first commit after its last micro-batch was handed out.
        """
        ...
