"""Rows that are fetched while the script computes, for the pull that asks for the same keys next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edl.worker.session import note
from ps.background import Background, Job

Fetch = Callable[[], NDArray[np.float32]]
LOOK_S = 0.25
"""Whoever waits looks so often whether it is to stop."""


@dataclass(slots=True)
class _Batch:
    keys: NDArray[np.int64]
    fetch: Fetch
    step: int
    """In which it was fetched, or will be."""
    job: Job | None = None


class Ahead:
    """One batch of each table."""

    def __init__(self, background: Background, oldest: int, stand: Callable[[], None]) -> None:
        """``oldest``: a batch fetched more steps ago is of no use. ``stand``: stops this trainer if it is to stop."""
        self._background, self._oldest, self._stand = background, oldest, stand
        self._lock = threading.Lock()
        self._batches: dict[str, _Batch] = {}

    def ask(self, table: str, keys: NDArray[np.int64], fetch: Fetch, step: int, later: bool) -> None:
        """``later``: not before this step has ended."""
        batch = _Batch(keys, fetch, step + 1 if later else step)
        with self._lock:
            self._batches[table] = batch
            if not later:
                batch.job = self._background.submit(fetch)

    def stepped(self, step: int) -> None:
        """So many steps have ended."""
        with self._lock:
            for batch in self._batches.values():
                if batch.job is None:
                    batch.step = step
                    batch.job = self._background.submit(batch.fetch)

    def take(self, table: str, keys: NDArray[np.int64], step: int) -> NDArray[np.float32] | None:
        """What has been fetched for exactly these keys; waits for it. None: fetch them now."""
        with self._lock:
            batch = self._batches.pop(table, None)
        if batch is None or batch.job is None or step - batch.step > self._oldest:
            return None
        if not np.array_equal(batch.keys, keys):
            return None
        while not batch.job.wait(LOOK_S):
            self._stand()  # those it waits for may have stopped, and wait for this trainer to stop as well
        try:
            rows: NDArray[np.float32] = batch.job.result()
        except Exception as error:  # noqa: BLE001 - if it matters, it happens again to whoever fetches now
            note(f"rows of table {table} could not be fetched ahead: {error}")
            return None
        return rows

    def close(self) -> None:
        """Fetch nothing more."""
        with self._lock:
            self._batches.clear()
        self._background.close()
