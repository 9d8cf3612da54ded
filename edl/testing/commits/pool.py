"""Many schedules, on several processes.

Not in ``__main__``: a spawned process does not import that of a package, and finds nothing that is in it.
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
    """Play these schedules in chunks, on several processes if asked. Their results come in the order of seeds."""
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
    """A process of a pool whose parent was killed would play on, and then wait for more for ever."""
    threading.Thread(target=_outlive_no_parent, daemon=True).start()


def _outlive_no_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
