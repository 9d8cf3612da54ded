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
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from edl.wire.rank_pace import RankPace

K = TypeVar("K", bound=Hashable)

_NORMAL = 1.4826
"""Factor from the median absolute deviation to the standard deviation of normally distributed values."""
_DEVIATIONS = 3.0
"""An excess counts only if it is this many standard deviations of the other ranks."""
_LUCK = 0.5
"""Where ranks compete for CPUs, chance decides who waits: an excess counts only above this part of the share of time
that the median rank has no CPU."""
_MAIN_PART = 0.5
"""A cause is named if it explains at least this part of the excess."""


class Cause(enum.Enum):
    """Why a rank is slow, as far as it can be told."""

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
class _Column(Generic[K]):
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
    stopped, starved = _column(windows, lambda one: one.stopped_share), _column(windows, lambda one: one.starved_share)
    data = _column(windows, lambda one: one.data_share)
    own, per_sample = _own(windows), _own_per_sample(windows)
    luck = _LUCK * statistics.median(starved.values.values())
    spread = _spread(own) if own is not None else {}
    found = {}
    for key in windows:
        halted = stopped.excess(key)
        share = min(own.excess(key), per_sample.excess(key)) if own is not None and per_sample is not None else 0.0
        allowed = max(limit, luck, _DEVIATIONS * spread.get(key, 0.0))
        if halted >= limit:  # evidence of its own: chance stops no process
            share, allowed = max(share, halted), limit
        parts = {
            Cause.DATA: data.excess(key),
            Cause.STOPPED: max(halted, 0.0) + max(starved.excess(key), 0.0),
        }
        cause = _cause(share, parts)
        found[key] = Excess(share, allowed, cause, _evidence(cause, key, data, stopped, starved, own))
    return found


def _column(windows: Mapping[K, RankPace], value: Callable[[RankPace], float]) -> _Column[K]:
    values = {key: value(one) for key, one in windows.items()}
    all_of_them = Others(list(values.values()))
    return _Column(values, {key: all_of_them.median(one) for key, one in values.items()})


def _own(windows: Mapping[K, RankPace]) -> _Column[K] | None:
    """Own times; None if one is unknown, because the others cannot be compared with it."""
    if any(one.peers_share < 0 for one in windows.values()):
        return None
    return _column(windows, lambda one: one.own_share)


def _own_per_sample(windows: Mapping[K, RankPace]) -> _Column[K] | None:
    """Own times for the mean number of samples: after a change of the world, ranks may have batches of different
    sizes. The same as own times if one is unknown."""
    samples = [one.samples for one in windows.values()]
    if any(one.peers_share < 0 for one in windows.values()):
        return None
    if min(samples) <= 0:
        return _own(windows)
    mean = sum(samples) / len(samples)
    return _column(windows, lambda one: one.own_share * mean / one.samples)


def _spread(own: _Column[K]) -> dict[K, float]:
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


def _evidence(
    cause: Cause, key: K, data: _Column[K], stopped: _Column[K], starved: _Column[K], own: _Column[K] | None
) -> str:
    def both(column: _Column[K]) -> str:
        return f"{column.values[key]:.0%} of the time, the others {column.others[key]:.0%}"

    if cause is Cause.DATA:
        return f"it waits for data {both(data)}"
    if cause is Cause.STOPPED and stopped.excess(key) >= starved.excess(key):
        return f"its process is stopped {both(stopped)}"
    if cause is Cause.STOPPED:
        return f"its process has no CPU {both(starved)}"
    return f"it computes {both(own)}" if own is not None else ""
