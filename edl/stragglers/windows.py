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

SMALLEST = 0.01
"""Smallest limit: shares are not measured more exactly."""
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
class TimeSpent:
    """What a rank does more than the others, as shares of time."""

    what: str
    mine: float
    others: float

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.what} {self.mine:.0%} of the time, the others {self.others:.0%}"


@dataclass(frozen=True, slots=True)
class Excess:
    """How one rank differs from the others in one window."""

    share: float
    """Share of the step time that the others wait for this rank, as far as it is known; may be negative."""
    limit: float
    """The share above which it counts as slow in this window, considering how much the other ranks differ."""
    cause: Cause
    evidence: TimeSpent
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
        _shares(windows, lambda one: one.stopped_share),
        _shares(windows, lambda one: one.starved_share),
        _shares(windows, lambda one: one.data_share),
        _own_times(windows),
    )
    return {key: seen.excess(key, max(limit, SMALLEST)) for key in windows}


@dataclass(frozen=True, slots=True)
class _OwnTimes(Generic[K]):
    """Own times of all ranks, and running times: own times without those in which a rank had no CPU."""

    own: _Shares[K]
    running: _Shares[K]
    per_sample: _Shares[K]
    """Running times for the mean number of samples; the same as running times if the samples are not known."""
    spread: Mapping[K, float]
    """Usual difference between two of the other ranks, in own time."""
    running_spread: Mapping[K, float]
    """The same in running time."""


@dataclass(frozen=True, slots=True)
class _Reason:
    """One reason to call a rank slow."""

    share: float
    limit: float
    cause: Cause
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class _Compared(Generic[K]):
    """All ranks in one window."""

    stopped: _Shares[K]
    starved: _Shares[K]
    data: _Shares[K]
    times: _OwnTimes[K] | None
    """None: they are not known of all ranks, so they cannot be compared."""

    def excess(self, key: K, limit: float) -> Excess:
        """The largest excess of a rank, relative to the limit for its kind of evidence."""
        most = max(self._kinds(key, limit), key=lambda one: one.share / one.limit)
        return Excess(most.share, most.limit, most.cause, self._spent(most.cause, key), most.doubtful)

    def _kinds(self, key: K, limit: float) -> list[_Reason]:
        kinds = [_Reason(self.stopped.excess(key), limit, Cause.STOPPED)]  # chance stops no process
        times = self.times
        if times is None:
            return kinds
        running = min(times.running.excess(key), times.per_sample.excess(key))
        parts = {Cause.DATA: self.data.excess(key), Cause.STOPPED: self.stopped.excess(key)}
        usual = _DEVIATIONS * times.running_spread.get(key, 0.0)
        kinds.append(_Reason(running, max(limit, usual), _cause(running, parts)))
        # Where several ranks compete for CPUs, chance decides who gets none.
        lack = self.starved.others[key]
        if lack < _PLENTY * limit:
            usual = _DEVIATIONS * times.spread.get(key, 0.0)
            starved = min(self.starved.excess(key), times.own.excess(key))
            kinds.append(_Reason(starved, max(limit, usual, _LUCK * lack), Cause.STOPPED, doubtful=True))
        return kinds

    def _spent(self, cause: Cause, key: K) -> TimeSpent:
        what, shares = "is stopped", self.stopped
        if cause is Cause.DATA:
            what, shares = "waits for data", self.data
        elif cause is Cause.COMPUTE and self.times is not None:
            what, shares = "computes", self.times.own
        elif self.stopped.excess(key) < self.starved.excess(key):
            what, shares = "has no CPU", self.starved
        return TimeSpent(what, shares.values[key], shares.others[key])


def _shares(windows: Mapping[K, RankPace], value: Callable[[RankPace], float]) -> _Shares[K]:
    values = {key: value(one) for key, one in windows.items()}
    all_of_them = Others(list(values.values()))
    return _Shares(values, {key: all_of_them.median(one) for key, one in values.items()})


def _own_times(windows: Mapping[K, RankPace]) -> _OwnTimes[K] | None:
    if any(one.peers_share < 0 for one in windows.values()):
        return None
    own, running = _shares(windows, lambda one: one.own_share), _shares(windows, _running)
    per_sample, samples = running, [one.samples for one in windows.values()]
    if min(samples) > 0:  # after a change of the world, ranks may have batches of different sizes
        mean = sum(samples) / len(samples)
        per_sample = _shares(windows, lambda one: _running(one) * mean / one.samples)
    return _OwnTimes(own, running, per_sample, _spread(own), _spread(running))


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
