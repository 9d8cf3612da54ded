"""What the plan of a re-cut moves between nodes, against the least possible, on random pairs of worlds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks import recut
from benchmarks.recut import Change, Mesh


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "no copies"])
@pytest.mark.parametrize("layout", [recut.fsdp, recut.hsdp_within], ids=["FSDP2", "HSDP"])
def test_rows_move_once_and_only_where_they_are_missing(layout: Callable[[int], Mesh], copies: bool) -> None:
    rng = random.Random(3)
    for _ in range(300):
        change = Change.draw(rng, 6)
        read, each, least = recut.measure(layout, change, copies)
        assert read == each == least, change


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "no copies"])
def test_workers_of_a_node_with_the_same_piece_each_read_it(copies: bool) -> None:
    """A known limit: decision 0051 says why."""
    rng = random.Random(4)
    for _ in range(200):
        change = Change.draw(rng, 6)
        read, _, least = recut.measure(recut.hsdp_across, change, copies)
        assert read == 2 * least, change
        read, each, least = recut.measure(recut.tensor_parallel, change, copies)
        assert least <= read == each, change


def test_a_node_that_stays_with_everything_reads_nothing() -> None:
    assert recut.measure(recut.fsdp, Change((0,), (0,)), True) == (0, 0, 0)


def test_a_newcomer_reads_all_that_it_needs() -> None:
    """One node has the whole state, and a second joins: half of the rows of each tensor, rounded as they are cut."""
    cut = recut.fsdp(2)
    needs = sum(cut.box(rank, name).volume for rank in (2, 3) for name in recut.SHAPES)
    assert recut.measure(recut.fsdp, Change((0,), (0, 1)), False) == (needs * recut.BYTES,) * 3
