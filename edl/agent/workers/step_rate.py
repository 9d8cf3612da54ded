"""Measures the pace of this node's workers from the commits that the worker server sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from edl.agent.machine.events import Event, Report
from edl.types import Round
from edl.wire.messages import Pace
from edl.wire.rank_pace import RankPace

EVERY_S = 5.0
"""Minimum seconds between two messages."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The newest commit of a node and its time."""

    round: Round
    commit: int
    at_s: float
    committing_s: float = 0.0
    """Seconds that a worker has waited for its commits so far, on average."""
    waiting_s: float = 0.0
    """The same for data."""


def pace(before: Mark | None, now: Mark | None, now_s: float) -> Pace | None:
    """The pace to report at ``now_s``; None without new commits or after a change of the world."""
    if before is None or now is None or before.round != now.round or not now.round:
        return None
    commits, took_s = now.commit - before.commit, now.at_s - before.at_s
    if commits <= 0 or took_s <= 0:
        return None

    def share(waited_s: float) -> float:
        return min(1.0, max(0.0, waited_s / took_s))  # a new process begins to count again

    shares = share(now.committing_s - before.committing_s), share(now.waiting_s - before.waiting_s)
    return Pace(now.round, now.commit, took_s / commits, max(0.0, now_s - now.at_s), *shares)


async def tell_pace(
    mark: Callable[[], Mark | None],
    post: Callable[[Event], None],
    ranks: Callable[[Round], tuple[RankPace, ...]] = lambda round: (),
    every_s: float = EVERY_S,
    holders: Callable[[], int] = lambda: 0,
) -> None:
    """Report the pace every ``every_s`` seconds until cancelled. ``ranks``: returns each window of a worker once.
    ``holders``: see ``Pace``."""
    before: Mark | None = None
    while True:
        await asyncio.sleep(every_s)
        now = mark()
        found = pace(before, now, asyncio.get_running_loop().time())
        if found is not None:
            post(Report(replace(found, ranks=ranks(found.round), holders=holders())))
        if before is None or now is None or now.round != before.round or now.commit > before.commit:
            before = now
