"""From windows to verdicts: a rank is named after several slow windows in a row, and cleared after as many good ones.

A window is good if the excess is below half of the limit. One in between is neither: it ends both kinds of streaks. So
a rank near the limit is not named and cleared again and again.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from edl.stragglers.windows import Cause, Excess, TimeSpent

K = TypeVar("K", bound=Hashable)

GOOD = 0.5
"""A window is good below this part of the limit."""
DOUBT = 2
"""Factor on the number of windows if chance may be behind them."""
_REMEMBERED = 16
"""Number of windows whose causes are remembered."""


@dataclass(frozen=True, slots=True)
class Streak:
    """Windows in a row of one rank that were all slow, or all good."""

    slow: bool
    count: int
    excess: float = 0.0
    """Sum over the windows."""
    seen: tuple[tuple[Cause, TimeSpent], ...] = ()
    """The causes of the last windows, with their values."""
    doubtful: bool = False
    """One of the windows is; see ``Excess``."""

    def lasts(self, windows: int) -> bool:
        """Whether it is long enough for a verdict, where ``windows`` in a row are without doubt."""
        return self.count >= windows * (DOUBT if self.doubtful else 1)


@dataclass(frozen=True, slots=True)
class StragglerVerdict:
    """Why a rank is named."""

    excess: float
    """Mean share of the step time that the others waited for it."""
    cause: Cause
    evidence: TimeSpent


@dataclass(frozen=True, slots=True)
class Judgement(Generic[K]):
    """The result of one window of all ranks."""

    streaks: Mapping[K, Streak]
    named: Mapping[K, StragglerVerdict]
    """Newly found stragglers."""
    cleared: frozenset[K]


def judge(streaks: Mapping[K, Streak], found: Mapping[K, Excess], named: Collection[K], windows: int) -> Judgement[K]:
    """Take one window into account. ``named``: the ranks that are named at the moment; ``windows``: the number in a row
    that names a rank, or clears it."""
    now = {key: streak for key, one in found.items() if (streak := _next(streaks.get(key), one)) is not None}
    full = {key: streak for key, streak in now.items() if streak.lasts(windows)}
    return Judgement(
        now,
        {key: verdict(streak) for key, streak in full.items() if streak.slow and key not in named},
        frozenset(key for key, streak in full.items() if not streak.slow and key in named),
    )


def _next(before: Streak | None, one: Excess) -> Streak | None:
    if not one.slow:
        if one.share >= GOOD * one.limit:
            return None
        return Streak(False, 1 + (before.count if before is not None and not before.slow else 0))
    seen = (one.cause, one.evidence)
    if before is None or not before.slow:
        return Streak(True, 1, one.share, (seen,), one.doubtful)
    remembered = (*before.seen, seen)[-_REMEMBERED:]
    return Streak(True, before.count + 1, before.excess + one.share, remembered, before.doubtful or one.doubtful)


def verdict(streak: Streak) -> StragglerVerdict:
    """The verdict on a rank after a streak of slow windows: its most frequent cause, with the mean values."""
    (cause, what), _ = collections.Counter((cause, spent.what) for cause, spent in streak.seen).most_common(1)[0]
    found = [spent for other, spent in streak.seen if (other, spent.what) == (cause, what)]
    mine, others = (statistics.fmean(shares) for shares in zip(*((one.mine, one.others) for one in found), strict=True))
    return StragglerVerdict(streak.excess / streak.count, cause, TimeSpent(what, mine, others))
