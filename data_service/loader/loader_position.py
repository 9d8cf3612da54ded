"""A loader's position in its data set: consumed records, and the steps that are planned next."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable

from data_service.ledger import Ledger
from data_service.loader.window import PlannedStep


class LoaderPosition:
    """The ledger of one loader, and the steps that all ranks have agreed on and the script has not received.

    Only the training thread changes it; any thread may read it with ``copy`` and ``announced``.
    """

    def __init__(self, *, independent: bool) -> None:
        self.ledger: Ledger | None = None
        self._independent = independent
        self._planned: collections.deque[PlannedStep] = collections.deque()
        self._lock = threading.Lock()

    @property
    def known(self) -> Ledger:
        """The ledger of a data set that has been opened."""
        assert self.ledger is not None, "it has been opened"  # noqa: S101
        return self.ledger

    def restore(self, ledger: Ledger | None) -> None:
        """Continue from another ledger; None: from the start, once the data set is opened."""
        with self._lock:
            self.ledger = ledger

    def copy(self) -> Ledger | None:
        """A copy of the ledger; None before the data set is opened. Thread-safe."""
        with self._lock:
            return None if self.ledger is None else self.ledger.copy()

    def announced(self) -> str:
        """The encoded ledger, including planned steps; empty in independent mode. Thread-safe."""
        with self._lock:
            if self.ledger is None or self._independent:
                return ""
            ledger = self.ledger.copy()
            for step in self._planned:
                for segment in step.taken:
                    ledger.take(segment.shard, segment.upto, segment.complete)
        return ledger.encode()

    @property
    def next_step(self) -> PlannedStep | None:
        """The next planned step; None if a new plan is needed."""
        return self._planned[0] if self._planned else None

    def plan(self, steps: Iterable[PlannedStep]) -> None:
        """Append steps that all ranks have agreed on."""
        with self._lock:
            self._planned.extend(steps)

    def drop_planned(self) -> None:
        """Drop all planned steps, which the script will not receive."""
        with self._lock:
            self._planned.clear()

    def consume(self) -> None:
        """Count the records of the next planned step, of all ranks, as consumed."""
        ledger = self.known
        with self._lock:
            for segment in self._planned.popleft().taken:
                # Independent mode: a shard may return to its previous holder if an acknowledgement did not count.
                shard = segment.shard
                if not self._independent or not (ledger.is_done(shard) or segment.upto < ledger.count(shard)):
                    ledger.take(shard, segment.upto, segment.complete)

    def extend(self, shards: int, digest: str) -> None:
        """Extend the ledger: files have joined the epoch. Raises ``DataError`` if it had more shards."""
        with self._lock:
            self.known.extend(shards, digest)

    def next_epoch(self) -> None:
        """Start the next epoch, with nothing consumed."""
        with self._lock:
            self.known.next_epoch()

    def start_epoch(self, epoch: int) -> None:
        """Start this epoch, with nothing consumed."""
        with self._lock:
            self.known.start(epoch)
