"""Steps and their parts: a loader's description of each batch, so that gradients can be weighted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one micro-batch in its step. A step is what lies between two commits of all workers."""

    samples: int
    """Number of real samples; 0 for padding, which gives all workers the same number of micro-batches and must not
    count."""
    total: int
    """Number of samples in the whole step, over all workers and micro-batches; at least 1."""
    micro: int = 0
    """Index among this worker's micro-batches of the step."""
    micros: int = 1
    """Number of micro-batches per worker, the same on all workers."""
    logical: int = -1
    """Its logical rank; -1 without logical ranks."""
    full: int = 0
    """Number of samples in a step that is not cut short by the end of the epoch; 0 where steps vary."""

    @property
    def weight(self) -> float:
        """Factor for the gradient of this micro-batch's mean loss; the weights of a step add up to 1."""
        return self.samples / self.total

    @property
    def last(self) -> bool:
        """Whether it is the last micro-batch of the step."""
        return self.micro == self.micros - 1


class StepLoader(Protocol):
    """The loaders that ``accumulate`` accepts: ``edl.DataLoader`` and those of the data service."""

    def shares(self) -> Iterator[tuple[Any, Share]]:
        """The rest of the epoch: each micro-batch with its share, step after step.

        A step counts as consumed with the first commit after its last micro-batch was delivered.
        """
        ...
