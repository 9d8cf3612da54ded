"""What the program about re-cuts in real jobs concludes from the logs of a run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from benchmarks import recut
from benchmarks.common.losses import Difference, largest_difference, losses
from benchmarks.common.model_sizes import shapes
from benchmarks.common.steps import Step, World
from benchmarks.recut import Change, Mesh, holders
from benchmarks.recut_job import TOLERANCE, WORKERS, Run, broken_promises, changes, least_bytes


def world(nodes: tuple[int, ...], steps: dict[int, float], formed: int = 1) -> World:
    """Each rank has logged these losses; ranks follow the order of the nodes."""
    size = len(nodes) * WORKERS
    return World(
        formed, size,
        {rank: [Step(0.0, rank, size, step, 100 + rank, nodes[rank // WORKERS], 0, formed, loss)
                for step, loss in steps.items()] for rank in range(size)},
    )  # fmt: skip


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("layout", list(recut.LAYOUTS.values()), ids=list(recut.LAYOUTS))
def test_the_least_of_named_nodes_is_that_of_the_random_changes(layout: Callable[[int], Mesh], copies: bool) -> None:
    rng = random.Random(2)
    for _ in range(50):
        change = Change.draw(rng, 6)
        after = [node for node in change.new for _ in range(recut.WORKERS)]
        found = recut.least(layout(len(change.old)), layout(len(change.new)), holders(change.old, copies), after)
        assert found * recut.BYTES == recut.measure(layout, change, copies)[2], change


def test_a_replica_that_joins_receives_the_state_once_and_one_that_leaves_moves_nothing() -> None:
    parameters = sum(math.prod(shape) for shape in shapes(0).values())
    three, two = world((0, 1, 2), {1: 1.0}), world((0, 2), {1: 1.0})
    assert least_bytes("hsdp", 0, two, three) == parameters * 12
    assert least_bytes("hsdp", 0, three, two) == 0


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_the_parts_of_a_lost_node_are_in_the_copy_of_the_next_one(layout: str) -> None:
    """The node after it has them, so only what the others need of them moves."""
    three, one = world((0, 1, 2), {1: 1.0}), world((2,), {1: 1.0})
    whole = sum(math.prod(shape) for shape in shapes(0).values()) * 12
    assert least_bytes(layout, 0, three, world((0, 1, 2), {1: 1.0})) == 0
    assert 0.2 * whole < least_bytes(layout, 0, three, one) < 0.5 * whole


def test_a_step_counts_once_all_ranks_have_completed_it() -> None:
    short = world((0,), {1: 4.0, 2: 2.0})
    short.steps[1].pop()
    again = world((0, 1), {2: 2.5, 3: 1.0})
    assert list(losses([short, again])) == [(1, 4.0), (2, 2.5), (3, 1.0)]


def test_the_largest_difference_is_relative_and_names_its_step() -> None:
    found = largest_difference([(1, 4.0), (2, 2.5), (2, 2.2), (9, 7.0)], {1: 4.0, 2: 2.0})
    assert found.relative == pytest.approx(0.25)
    assert (found.step, found.compared) == (2, 2)
    with pytest.raises(ValueError, match="no step"):
        largest_difference([(3, 1.0)], {1: 1.0})


def test_each_promise_that_was_broken_is_named() -> None:
    good = Run("edl", "fsdp")
    assert not list(broken_promises(good, Difference(TOLERANCE / 2, 7, 100)))
    bad = Run("edl", "fsdp", restarted={1: [11, 12, 13]}, written=["checkpoints"])
    differs, restarted, written = broken_promises(bad, Difference(2 * TOLERANCE, 7, 100))
    assert "at step 7" in differs
    assert "node 1" in restarted and "[11, 12, 13]" in restarted
    assert "checkpoints" in written


def test_the_first_node_that_leaves_is_killed_and_the_one_that_came_last_leaves() -> None:
    assert [(one.name, one.nodes, one.node) for one in changes((2, 4, 3, 1, 4))] == [
        ("join to 3", 3, 2), ("join to 4", 4, 3), ("kill to 3", 3, 3), ("drain to 2", 2, 2), ("drain to 1", 1, 1),
        ("join to 2", 2, 4), ("join to 3, again", 3, 5), ("join to 4, again", 4, 6),
    ]  # fmt: skip
