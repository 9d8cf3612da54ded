"""A metric of Paddle's kind, for tests of ``EDLModel``."""

from __future__ import annotations

from typing import Any

import paddle


class Distance(paddle.metric.Metric):
    """The mean distance from the label, and the number of samples that it was computed over."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        self.total, self.count = 0.0, 0

    def update(self, *arguments: Any) -> Any:
        """Add a batch."""
        output, label = arguments
        self.total += float(abs(output - label).sum())
        self.count += len(output)
        return self.total / self.count

    def accumulate(self) -> Any:
        """Distance and number of all batches so far."""
        return [self.total / max(self.count, 1), self.count]

    def name(self) -> Any:
        """The names in logs."""
        return ["distance", "count"]
