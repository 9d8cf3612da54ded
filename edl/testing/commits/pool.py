"""Runs many schedules on several processes.

Not in ``__main__``, which a spawned process cannot import from a package.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import threading
from collections.abc import Iterator

from edl.testing.commits.schedule import Played, play

_CHUNK = 200


def results(seeds: range, jobs: int, checked: bool) -> Iterator[Played]:
    """Play schedules in chunks, on ``jobs`` processes. Results come in the order of the seeds."""
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    if jobs == 1:
        yield from (play(chunk, checked) for chunk in chunks)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)
    try:
        yield from pool.map(play, chunks, [checked] * len(chunks))
    finally:
        # After a wrong number or an interrupt, do not wait for the queued chunks.
        pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """Exit when the parent process dies; otherwise a worker of the pool would wait for more work forever."""
    threading.Thread(target=_outlive_no_parent, daemon=True).start()


def _outlive_no_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
