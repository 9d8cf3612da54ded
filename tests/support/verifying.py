"""Ranks that compare their states, each on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from edl.worker.verify import Difference, Held, Verifier
from tests.support.fake_agent import TIMEOUT_S


def together(digest: Callable[[Sequence[Any]], int], *ranks: Held) -> list[list[Difference]]:
    """Differences that each rank finds in a comparison."""
    barrier = threading.Barrier(len(ranks))
    handed: dict[int, bytes] = {}
    found: dict[int, list[Difference]] = {}

    def run(rank: int) -> None:
        def exchange(data: bytes) -> list[bytes]:
            handed[rank] = data
            barrier.wait(TIMEOUT_S)
            parts = [handed[number] for number in range(len(ranks))]
            barrier.wait(TIMEOUT_S)
            return parts

        found[rank] = Verifier(digest, exchange).differences(ranks[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return [found[rank] for rank in range(len(ranks))]
