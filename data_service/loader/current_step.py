"""The step whose micro-batches a loader is returning to the script."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from data_service.loader.prefetcher import ReadyStep
from edl.worker.steps import Share


class CurrentStep:
    """The micro-batches of one step that the script has not received yet, each with its share in the step."""

    def __init__(
        self, parts: Sequence[tuple[Any, int]], total: int, logical: Sequence[int], full: int, ready: ReadyStep | None
    ) -> None:
        """``parts``: micro-batches with their number of samples, of ``total`` samples of all workers. ``logical``: the
        logical rank of each. ``full``: the total of a full step. ``ready``: the step that they come from; None for
        padding."""
        self.ready = ready
        self._parts = collections.deque(
            (batch, Share(samples, total, index, len(parts), logical[index], full))
            for index, (batch, samples) in enumerate(parts)
        )

    @property
    def first(self) -> Any:
        """The next micro-batch; it stays here."""
        return self._parts[0][0]

    def pop(self) -> tuple[Any, Share]:
        """Remove and return the next micro-batch with its share."""
        return self._parts.popleft()

    @property
    def is_over(self) -> bool:
        """True if the script has received all micro-batches."""
        return not self._parts
