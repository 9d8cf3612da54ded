"""Compares the windows of all ranks of a world: by how much each rank delays the others, and why.

The ranks of a world step together, so all of them have the same step time, and the slow one is the one that waits least
for the others. What counts is **own time**: the part of a rank's time in which it neither waits in collectives nor for
commits. The other ranks have to wait for whatever a rank has more of it than they have. So the excess of a rank is the
share of the step time by which the job would be faster if this rank were like the others.

Each rank is compared with the median of the *other* ranks, so a world of two ranks needs no special rule, and a node
with half of all ranks can be slow as a whole. All values are shares of the ranks' own time: no common clock is needed,
and a load that slows all ranks alike cancels out.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edl.wire.rank_pace import RankPace

K = TypeVar("K", bound=Hashable)

_NORMAL = 1.4826
"""Factor from the median absolute deviation to the standard deviation of normally distributed values."""
_DEVIATIONS = 3.0
"""An excess counts only if it is this many standard deviations of the other ranks."""
_PLENTY = 0.5
"""A rank can be slow for lack of CPUs only if the others lack them for less than this part of the limit,"""
_LUCK = 3.0
"""and if the excess is at least this many times what they lack."""
_MAIN_PART = 0.5
"""A cause is named if it explains at least this part of the excess."""


class Cause(enum.Enum):
    """Why a rank is slow, as far as the measurements show."""

    DATA = "data"
    """It waits for its data loader."""
    STOPPED = "stopped"
    """Its process does not run: it is stopped by signals, or has no CPU."""
    COMPUTE = "compute"
    """It needs more time for the same work, on its CPU or device."""


@dataclass(frozen=True, slots=True)
class Excess:
    """How one rank differs from the others in one window."""

    share: float
    """Share of the step time that the others wait for this rank, as far as it is known; may be negative."""
    limit: float
    """The share above which it counts as slow in this window, considering how much the other ranks differ."""
    cause: Cause
    evidence: str
    """The values behind the cause, for people."""
    doubtful: bool = False
    """Chance may be behind it: it takes more windows to believe it."""

    @property
    def slow(self) -> bool:
        """Whether this rank was slow in this window."""
        return self.share >= self.limit


class Others:
    """The median of all values but one, for each one, in O(n log n) for all of them."""

    def __init__(self, values: Sequence[float]) -> None:
        self._sorted = sorted(values)

    def median(self, without: float) -> float:
        """The median of the values without one of this value; that value itself if there is no other."""
        count = len(self._sorted) - 1
        if not count:
            return without
        gap = bisect.bisect_left(self._sorted, without)

        def at(index: int) -> float:
            return self._sorted[index if index < gap else index + 1]

        return at(count // 2) if count % 2 else (at(count // 2 - 1) + at(count // 2)) / 2


@dataclass(frozen=True, slots=True)
class _Shares(Generic[K]):
    """One value of each rank, and the median of the others."""

    values: Mapping[K, float]
    others: Mapping[K, float]

    def excess(self, key: K) -> float:
        return self.values[key] - self.others[key]


def compare(windows: Mapping[K, RankPace], limit: float) -> dict[K, Excess]:
    """The excess of each rank. ``windows``: one for each rank of a world; ``limit``: the smallest share that counts.
    Empty for less than two ranks."""
    if len(windows) < 2:
        return {}
    seen = _Compared(
        _column(windows, lambda one: one.stopped_share),
        _column(windows, lambda one: one.starved_share),
        _column(windows, lambda one: one.data_share),
        *_own(windows),
    )
    return {key: seen.excess(key, limit) for key in windows}


@dataclass(frozen=True, slots=True)
class _Compared(Generic[K]):
    """All ranks in one window."""

    stopped: _Shares[K]
    starved: _Shares[K]
    data: _Shares[K]
    own: _Shares[K] | None
    """Own times; None if one is unknown."""
    running: tuple[_Shares[K], _Shares[K]] | None
    """Own times without those in which a rank had no CPU: as they are, and for the mean number of samples."""
    spreads: tuple[Mapping[K, float], Mapping[K, float]]
    """Usual difference between two of the other ranks, in own time and in running time."""

    def excess(self, key: K, limit: float) -> Excess:
        """The largest excess of a rank, relative to what is allowed for its kind."""
        found = max(self._kinds(key, limit), key=lambda one: one[0] / one[1])
        share, allowed, cause, doubtful = found
        return Excess(share, allowed, cause, self._evidence(cause, key), doubtful)

    def _kinds(self, key: K, limit: float) -> list[tuple[float, float, Cause, bool]]:
        """Share, limit and cause of each kind of evidence, and whether it may be chance."""
        kinds = [(self.stopped.excess(key), limit, Cause.STOPPED, False)]  # chance stops no process
        if self.own is None or self.running is None:
            return kinds
        usual_own, usual = (max(limit, _DEVIATIONS * spread.get(key, 0.0)) for spread in self.spreads)
        running = min(column.excess(key) for column in self.running)
        parts = {Cause.DATA: self.data.excess(key), Cause.STOPPED: self.stopped.excess(key)}
        kinds.append((running, usual, _cause(running, parts), False))
        # Where several ranks compete for CPUs, chance decides who gets none.
        if self.starved.others[key] < _PLENTY * limit:
            starved = min(self.starved.excess(key), self.own.excess(key))
            kinds.append((starved, max(usual_own, _LUCK * self.starved.others[key]), Cause.STOPPED, True))
        return kinds

    def _evidence(self, cause: Cause, key: K) -> str:
        def both(column: _Shares[K]) -> str:
            return f"{column.values[key]:.0%} of the time, the others {column.others[key]:.0%}"

        if cause is Cause.DATA:
            return f"it waits for data {both(self.data)}"
        if cause is Cause.STOPPED and self.stopped.excess(key) >= self.starved.excess(key):
            return f"its process is stopped {both(self.stopped)}"
        if cause is Cause.STOPPED:
            return f"its process has no CPU {both(self.starved)}"
        return f"it computes {both(self.own)}" if self.own is not None else ""


def _column(windows: Mapping[K, RankPace], value: Callable[[RankPace], float]) -> _Shares[K]:
    values = {key: value(one) for key, one in windows.items()}
    all_of_them = Others(list(values.values()))
    return _Shares(values, {key: all_of_them.median(one) for key, one in values.items()})


def _own(
    windows: Mapping[K, RankPace],
) -> tuple[_Shares[K] | None, tuple[_Shares[K], _Shares[K]] | None, tuple[Mapping[K, float], Mapping[K, float]]]:
    """Own times, running times, and the spreads of both. Own times that are not all known cannot be compared."""
    if any(one.peers_share < 0 for one in windows.values()):
        return None, None, ({}, {})
    own, running = _column(windows, lambda one: one.own_share), _column(windows, _running)
    spreads = _spread(own), _spread(running)
    samples = [one.samples for one in windows.values()]
    if min(samples) <= 0:
        return own, (running, running), spreads
    # After a change of the world, ranks may have batches of different sizes.
    mean = sum(samples) / len(samples)
    return own, (running, _column(windows, lambda one: _running(one) * mean / one.samples)), spreads


def _running(one: RankPace) -> float:
    return max(0.0, one.own_share - one.kept_share)


def _spread(own: _Shares[K]) -> dict[K, float]:
    """The usual difference between two other ranks, for each rank: their standard deviation, from the median absolute
    deviation. 0 for few ranks, where nothing is usual."""
    if len(own.values) < 4:
        return {}
    found = {}
    by_median: dict[float, Others] = {}
    for key, median in own.others.items():
        deviations = by_median.get(median)
        if deviations is None:
            deviations = by_median[median] = Others([abs(value - median) for value in own.values.values()])
        found[key] = _NORMAL * deviations.median(abs(own.values[key] - median))
    return found


def _cause(share: float, parts: Mapping[Cause, float]) -> Cause:
    cause, part = max(parts.items(), key=lambda one: one[1])
    return cause if part > 0 and part >= _MAIN_PART * share else Cause.COMPUTE
