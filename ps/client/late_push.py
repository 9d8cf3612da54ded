"""A step's push that is on its way while the script trains on the next batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from data_service.loader import trainers
from data_service.loader.trainers import Mark

RowsByTable = dict[str, NDArray[np.float32]]


@dataclass(slots=True)
class LatePush:
    """A push and what follows from its acknowledgement. Not thread-safe: used by the script's thread."""

    result: Callable[[], RowsByTable]
    """Waits for the push; returns the updated rows of dense tables. Raises the error of the push."""
    step: int
    """Number of completed steps, including this one."""
    mark: Mark = field(default_factory=trainers.mark)
    """The batches whose gradients it contains."""
    _acknowledged: bool = False

    @property
    def has_all(self) -> bool:
        """True if no batch was received since."""
        return trainers.mark() == self.mark

    def acknowledge(self) -> None:
        """Wait for the push, and count its batches as used."""
        if not self._acknowledged:
            self.result()
            self._acknowledged = True
            trainers.pushed(self.mark)
