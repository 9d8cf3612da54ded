"""The dependencies of loaders: threads with their events and locks, a clock, request numbers, and the link to
parameter servers.

A simulation in virtual time passes its own.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field

from data_service.loader import trainers
from data_service.loader.trainers import TrainerDataSets
from edl.adapters.clock import SystemClock
from edl.adapters.system_threads import SYSTEM_THREADS
from edl.ports import Clock
from edl.threads import Threads


class RequestNumbers:
    """Request ids, increasing over the life of the process, over all rounds and data sets."""

    def __init__(self, last: int = 0) -> None:
        """``last``: the id before the first one; 0: drawn at random."""
        self._lock = threading.Lock()
        self._last = last

    def next(self) -> int:
        """An id that neither this process nor a predecessor in its slot has used, whose requests may still be parked.
        The start is drawn on first use, because processes may be forked after this module is loaded."""
        with self._lock:
            self._last = (self._last or secrets.randbits(40)) + 1
            return self._last

    def rise_above(self, number: int) -> None:
        """A predecessor in this slot has used ids up to ``number``."""
        with self._lock:
            self._last = max(self._last, number)


@dataclass(frozen=True, slots=True)
class LoaderDeps:
    """Threads, clock, request numbers and registry of data sets, shared by the loaders of one process."""

    threads: Threads = SYSTEM_THREADS
    clock: Clock = field(default_factory=SystemClock)
    numbers: RequestNumbers = field(default_factory=RequestNumbers)
    registry: TrainerDataSets | None = None
    """None: the one that this process's parameter-server client uses."""

    @property
    def trainers(self) -> TrainerDataSets:
        """The registry of the process's independent data sets."""
        return trainers.trainers if self.registry is None else self.registry


PROCESS = LoaderDeps()
"""The dependencies of this process's loaders."""
