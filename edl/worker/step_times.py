"""Sums up how a worker spends its time: one report for each window of some seconds. No clock, no I/O.

A step costs one comparison and one entry in a list. All else happens once in a window.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from edl.wire.local import StepTimes
from edl.wire.rank_pace import UNKNOWN

WINDOW_S = 5.0
"""Shortest window in seconds. It ends with the first step after that."""
MOST_STEPS = 10_000
"""Steps of a window whose times are kept: enough for those of 0.5 ms."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a worker has spent since its process started."""

    peers_s: float
    """Seconds in collectives; negative: not measured."""
    committing_s: float
    waiting_s: float
    """Seconds of waiting for data."""
    idle_s: float
    """Seconds in which the training thread used no CPU, outside collectives; from an arbitrary beginning."""
    samples: int = 0
    """Real samples that loaders have delivered."""


@dataclass(slots=True)
class _Window:
    began_s: float
    totals: Totals
    last_s: float
    """Time of the last boundary."""
    times_s: list[float]


class StepMeter:
    """Windows of the steps of one worker. A window never contains steps of two rounds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._round = 0
        self._window: _Window | None = None

    def passed(self, round: int, now_s: float, totals: Callable[[], Totals]) -> StepTimes | None:
        """A boundary of this round was passed. Returns a report if a window ends with it. ``totals`` is called only at
        the ends of windows."""
        window = self._window
        if window is None or round != self._round:
            self._round, self._window = round, _Window(now_s, totals(), now_s, [])
            return None
        if len(window.times_s) < MOST_STEPS:
            window.times_s.append(now_s - window.last_s)
        window.last_s = now_s
        took_s = now_s - window.began_s
        if took_s < self._window_s:
            return None
        now = totals()
        self._window = _Window(now_s, now, now_s, [])
        return _report(round, window, now, took_s)


def _report(round: int, window: _Window, now: Totals, took_s: float) -> StepTimes:
    before, times_s = window.totals, window.times_s

    def share(spent_s: float) -> float:
        return min(1.0, max(0.0, spent_s / took_s))

    known = before.peers_s >= 0 and now.peers_s >= before.peers_s
    return StepTimes(
        round=round,
        step_s=statistics.median(times_s),
        slowest_s=max(times_s),
        peers_share=share(now.peers_s - before.peers_s) if known else UNKNOWN,
        commit_share=share(now.committing_s - before.committing_s),
        data_share=share(now.waiting_s - before.waiting_s),
        idle_share=share(now.idle_s - before.idle_s),
        samples=max(0, now.samples - before.samples) / len(times_s),
    )
