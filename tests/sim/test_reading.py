"""Whole jobs whose workers read data: the loader and the service that ship, in simulated time."""

from __future__ import annotations

import pytest

from edl.testing.sim.schedules import Schedule, play
from tests.sim import reading_bugs

BATCH = 24
BATCHES = 2
BATCHES_OF_SOAK = 200
MOST = 40
"""Schedules that a planted bug gets, after the one that is known to find it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch", [pytest.param(n, marks=() if n < BATCHES else pytest.mark.soak) for n in range(BATCHES_OF_SOAK)]
)
def test_schedules(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        result = play(Schedule.reading(seed))
        assert not result.violation, f"Schedule.reading({seed}): {result.violation}"


FOUND = {
    551: "master: the slot of the last worker with something left to read was dropped, and the job ended well",
    442: "(the simulator's own: a script that could not run was not given the time to use up its restarts)",
    842: "loader: after two changes of the Master, a worker forgot records that were counted and not stored",
    950: "(the simulator's own: a rollback after the last worker had ended was taken for the beginning)",
}
"""Schedules that once found something."""


@pytest.mark.parametrize("seed", FOUND)
def test_known_seed(seed: int) -> None:
    assert not play(Schedule.reading(seed)).violation, FOUND[seed]


@pytest.mark.parametrize(
    ("seed", "story"),
    [
        (11, "rolled back to position"),
        (57, "by its rule"),
        (10, "is skipped from now"),
        (593, "granting leases without"),
    ],
)
def test_schedules_meet_what_they_are_for(seed: int, story: str) -> None:
    lines: list[str] = []
    assert not play(Schedule.reading(seed), lines.append).violation
    assert any(story in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "first"), reading_bugs.FIRST, ids=lambda one: getattr(one, "__name__", ""))
def test_planted_bug_is_found(bug: reading_bugs.Bug, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    found = next((seed for seed in (first, *range(MOST)) if play(Schedule.reading(seed)).violation), -1)
    assert found >= 0, bug.__doc__
