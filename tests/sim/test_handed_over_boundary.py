"""A step boundary that one Master has agreed on, and the next one finds in the record."""

from __future__ import annotations

import pytest

from edl.types import NodeId
from edl.wire.records import Version
from tests.sim.test_scenarios import RERUN, Story


def spare_rules(bounds: str = "2") -> Story:
    """The Master is on a spare; ``b`` is to leave, and ``c`` to take its place."""
    story = Story(bounds, script=RERUN)
    story.start("m")
    for rank, name in enumerate(("a", "b", "c")):
        story.world.start(name, node_rank=rank)
    story.running("a", "b", round=1, within_s=6.0)
    story.world.run(3.0)
    assert story.master() == "m"
    story.world.launchers[NodeId("b")].interrupt(15)
    return story


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.01, 0.02, 0.05, 0.1])
def test_a_step_boundary_that_is_agreed_on_holds_although_the_master_dies(after_s: float) -> None:
    story = spare_rules()
    story.world.run_until(lambda: story.record.switch is not None, 2.0, "the boundary is recorded")
    order = story.record.switch
    assert order is not None
    story.world.run(after_s)  # by then no node, some or all have the order
    story.world.crash("m")
    story.running("a", "c", round=2, within_s=4.0)
    assert story.last.restore == Version(1, order.commit), "no step is redone"
    assert story.record.restarts == 0
    assert story.record.switch is None


def test_a_boundary_that_a_member_no_longer_reaches_is_given_up_by_the_next_master() -> None:
    story = spare_rules("1:2")
    story.world.run_until(lambda: story.record.switch is not None, 2.0, "the boundary is recorded")
    story.world.crash("m")
    story.world.crash("a")
    story.running("c", round=2, within_s=8.0)
    assert story.record.switch is None
    story.world.run(2.0)
    assert story.passed(2) > story.last.restore.commit
