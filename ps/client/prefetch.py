"""Rows fetched in the background while the script computes, for the next pull of the same keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edl.worker.session import note
from ps.background import Background, BackgroundJob
from ps.client.dedup import DistinctKeys

PulledRows = tuple[DistinctKeys, NDArray[np.float32]]
"""Distinct keys and their rows."""
FetchedRows = tuple[PulledRows, Mapping[int, int]]
"""Pulled rows, and how many pushes each pserver had applied when it sent them."""
Fetch = Callable[[], FetchedRows]
LOOK_S = 0.25
"""Seconds between checks whether this trainer must stop for a checkpoint."""


@dataclass(slots=True)
class _PrefetchedBatch:
    keys: NDArray[np.int64]
    fetch: Fetch
    step: int
    """The step in which the rows are fetched."""
    job: BackgroundJob | None = None


class PrefetchedRows:
    """Prefetched rows: at most one batch of each table."""

    def __init__(self, background: Background, oldest: int, stand: Callable[[], None]) -> None:
        """``oldest``: most steps that a batch may be old. ``stand``: stops this trainer for a checkpoint if one is
        due."""
        self._background, self._oldest, self._stand = background, oldest, stand
        self._lock = threading.Lock()
        self._batches: dict[str, _PrefetchedBatch] = {}

    def ask(self, table: str, keys: NDArray[np.int64], fetch: Fetch, step: int, later: bool) -> None:
        """Prefetch the rows of ``keys``; with ``later`` only after this step has ended."""
        batch = _PrefetchedBatch(keys, fetch, step + 1 if later else step)
        with self._lock:
            self._batches[table] = batch
            if not later:
                batch.job = self._background.submit(fetch)

    def stepped(self, step: int) -> None:
        """Start the fetches that were waiting for a step to end. ``step``: number of completed steps."""
        with self._lock:
            for batch in self._batches.values():
                if batch.job is None:
                    batch.step = step
                    batch.job = self._background.submit(batch.fetch)

    def take(self, table: str, keys: NDArray[np.int64], step: int) -> FetchedRows | None:
        """The rows prefetched for exactly these keys, waiting for them if necessary; None if they must be fetched
        now."""
        with self._lock:
            batch = self._batches.pop(table, None)
        if batch is None or batch.job is None or step - batch.step > self._oldest:
            return None
        if not np.array_equal(batch.keys, keys):
            return None
        while not batch.job.wait(LOOK_S):
            self._stand()  # the trainers it waits for may have stopped and wait for this one to stop too
        try:
            rows: FetchedRows = batch.job.result()
        except Exception as error:  # noqa: BLE001 - a lasting error occurs again in the regular fetch
            note(f"cannot prefetch rows of table {table}: {error}")
            return None
        return rows

    def drop(self, table: str) -> None:
        """Rows of the table have been set: drop those that may have been fetched before."""
        with self._lock:
            batch = self._batches.get(table)
            if batch is not None and batch.job is not None:
                del self._batches[table]

    def close(self) -> None:
        """Drop all prefetched rows and start no more fetches."""
        with self._lock:
            self._batches.clear()
        self._background.close()
