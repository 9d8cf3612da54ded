"""Many random schedules, played one after another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest

from edl.testing.__main__ import summary
from edl.testing.sim.schedules import Result, Schedule, play


@functools.cache
def played(draw: Callable[[int], Schedule], seed: int) -> Result:
    """The result of a schedule that several tests of a module look at."""
    return play(draw(seed))


def play_all(draw: Callable[[int], Schedule], seeds: Iterable[int], worlds: float) -> None:
    """Each is clean. ``worlds``: how many a schedule has to form on average, lest they become too gentle."""
    results = []
    for seed in seeds:
        result = played(draw, seed)
        if result.violation:
            pytest.fail(f"Schedule.{draw.__name__}({seed}): {result.violation}", pytrace=False)
        results.append(result)
    print(summary(results))
    assert sum(result.worlds for result in results) > worlds * len(results), "the schedules have become too gentle"
    assert {"exit 0", "exit 1", "exit 3"} <= {result.outcome for result in results}
