"""Whole jobs whose workers read data: the loader and the service that ship, in simulated time."""

from __future__ import annotations

import pytest

from edl.testing.sim.schedules import Schedule, play
from tests.sim import reading_bugs

BATCHES = 2
BATCH = 25
MOST = 40
"""Schedules that a planted bug gets, after the one that is known to find it."""


@pytest.mark.parametrize("batch", range(BATCHES))
def test_schedules(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        result = play(Schedule.reading(seed))
        assert not result.violation, f"Schedule.reading({seed}): {result.violation}"


def found(first: int) -> int:
    """Return the seed of a schedule that goes wrong, -1 for none; ``first`` is one that did."""
    return next((seed for seed in (first, *range(MOST)) if play(Schedule.reading(seed)).violation), -1)


@pytest.mark.parametrize(
    ("bug", "first"),
    [
        (reading_bugs.asks_a_new_master_nothing, 4),
        (reading_bugs.takes_late_answers, 12),
        (reading_bugs.gives_up_what_is_asked, 11),
        (reading_bugs.loses_what_is_queued, 20),
    ],
)
def test_planted_bug_is_found(bug: reading_bugs.Bug, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert found(first) >= 0, bug.__doc__
