"""Launchers that are frozen while their workers are not."""

from __future__ import annotations

import pytest

from edl.types import NodeId
from tests.sim.test_scenarios import Story


@pytest.mark.parametrize("moment", range(8))
def test_workers_of_a_frozen_launcher_end_before_the_next_world(moment: int) -> None:
    """Wherever between two renewals of its lease it freezes."""
    story = Story("1:2")
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.world.run(moment / 8)
    frozen = story.world.launchers[NodeId("b")]
    frozen.pause()
    story.world.run_until(lambda: 2 in story.world.checks.worlds, 5.0, "a world without the frozen launcher")
    assert story.workers_of("b") == 0
    frozen.resume()
    story.running("a", "b", round=3, within_s=6.0)
    assert story.record.restarts == 0


def test_a_store_that_is_away_ends_no_workers_of_launchers_that_live() -> None:
    story = Story("1:2")
    story.start("a", "b")
    story.running("a", "b", round=1)
    story.world.store.away = True
    story.stays(12.0)
    story.world.store.come_back()
    story.stays(12.0)
    assert [story.workers_of(name) for name in "ab"] == [2, 2]
