"""Sizes of worlds, against a reference that simply tries every size."""

from __future__ import annotations

import itertools

import pytest

from edl.config import FaultTolerance, NodeRange
from edl.errors import SettingError
from edl.rendezvous.rules import next_size

RECOVER, SHRINK, ELASTIC = FaultTolerance.RECOVER, FaultTolerance.SHRINK, FaultTolerance.ELASTIC


def reference(bounds: NodeRange, level: FaultTolerance, previous: int, available: int) -> int:
    """The largest size that breaks no rule; 0 when there is none."""
    allowed = [
        size
        for size in range(1, available + 1)
        if bounds.minimum <= size <= bounds.maximum
        and size % bounds.unit == 0
        and not (previous and level is RECOVER and size != previous)
        and not (previous and level is SHRINK and size > previous)
    ]
    return max(allowed, default=0)


def all_bounds() -> list[NodeRange]:
    made = []
    for minimum, maximum, unit in itertools.product(range(1, 7), range(1, 8), range(1, 4)):
        try:
            made.append(NodeRange(minimum, maximum, unit))
        except SettingError:
            continue
    return made


def test_sizes_are_those_of_the_reference() -> None:
    checked = 0
    for bounds in all_bounds():
        sizes = [0, *(n for n in range(1, 8) if bounds.minimum <= n <= bounds.maximum and n % bounds.unit == 0)]
        for level, previous, available in itertools.product(FaultTolerance, sizes, range(10)):
            size = next_size(bounds, level, previous, available)
            assert size.nodes == reference(bounds, level, previous, available), (bounds, level, previous, available)
            assert size.reason
            checked += 1
    assert checked > 5000


@pytest.mark.parametrize(
    ("bounds", "level", "previous", "available", "nodes", "reason"),
    [
        (NodeRange(3, 6, 2), ELASTIC, 4, 3, 0, "3 nodes ready, at least 4 needed (--nnodes=3:6 in units of 2)"),
        (NodeRange(2, 2), ELASTIC, 0, 1, 0, "1 node ready, at least 2 needed (--nnodes=2)"),
        (NodeRange(1, 4), ELASTIC, 0, 5, 4, "4 of 5 nodes ready, the maximum; the others are spares"),
        (NodeRange(2, 6, 2), ELASTIC, 4, 3, 2, "2 of 3 nodes ready; the others are spares"),
        (NodeRange(1, 4), SHRINK, 2, 3, 2, "2 of 3 nodes ready; the others are spares"),
        (NodeRange(1, 4), ELASTIC, 2, 3, 3, "3 nodes ready"),
        (NodeRange(1, 4), RECOVER, 3, 3, 3, "all places are filled again"),
        (NodeRange(1, 4), RECOVER, 3, 4, 3, "all places are filled again"),
        (NodeRange(1, 4), RECOVER, 3, 2, 0, "--fault-tolerance=recover keeps 3 nodes: waiting for 1 replacement"),
        (NodeRange(1, 4), RECOVER, 1, 0, 0, "--fault-tolerance=recover keeps 1 node: waiting for 1 replacement"),
        (NodeRange(1, 4), RECOVER, 4, 1, 0, "--fault-tolerance=recover keeps 4 nodes: waiting for 3 replacements"),
    ],
)
def test_reasons(
    bounds: NodeRange, level: FaultTolerance, previous: int, available: int, nodes: int, reason: str
) -> None:
    size = next_size(bounds, level, previous, available)
    assert (size.nodes, size.reason) == (nodes, reason)


REQUESTED = [
    # bounds, level, previous, available, requested, size
    (NodeRange(1, 6), FaultTolerance.ELASTIC, 4, 6, 2, 2),
    (NodeRange(1, 6), FaultTolerance.ELASTIC, 2, 3, 5, 3),
    (NodeRange(2, 6), FaultTolerance.ELASTIC, 2, 1, 5, 0),
    (NodeRange(1, 6), FaultTolerance.SHRINK, 2, 6, 4, 4),
    (NodeRange(1, 6), FaultTolerance.RECOVER, 4, 4, 2, 2),
    (NodeRange(1, 6), FaultTolerance.RECOVER, 2, 3, 4, 2),
    (NodeRange(1, 6), FaultTolerance.RECOVER, 2, 4, 4, 4),
    (NodeRange(1, 6), FaultTolerance.RECOVER, 4, 1, 2, 0),
    (NodeRange(1, 3), FaultTolerance.RECOVER, 4, 3, 0, 3),
    (NodeRange(3, 6), FaultTolerance.RECOVER, 2, 3, 0, 3),
    (NodeRange(3, 6), FaultTolerance.SHRINK, 2, 5, 0, 3),
    (NodeRange(3, 6), FaultTolerance.SHRINK, 2, 2, 0, 0),
    (NodeRange(3, 6, 2), FaultTolerance.SHRINK, 2, 5, 0, 4),
    (NodeRange(1, 6), FaultTolerance.RECOVER, 0, 6, 2, 2),
]


@pytest.mark.parametrize(("bounds", "level", "previous", "available", "requested", "size"), REQUESTED)
def test_a_size_that_is_asked_for_takes_the_place_of_what_the_level_says(
    bounds: NodeRange, level: FaultTolerance, previous: int, available: int, requested: int, size: int
) -> None:
    assert next_size(bounds, level, previous, available, requested).nodes == size
