"""How many nodes the next world has. Pure arithmetic on the bounds and the level of fault tolerance.

Whatever is answered here, ``lowest <= size <= highest`` and ``size % unit == 0`` hold, or the size is 0 and the
reason says what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.config import FaultTolerance, NodeRange


@dataclass(frozen=True, slots=True)
class Size:
    """Node count of the next world, 0 when none can form, with the reason in words."""

    nodes: int
    reason: str


def next_size(bounds: NodeRange, level: FaultTolerance, previous: int, available: int) -> Size:
    """Decide the next world's node count.

    ``previous``: nodes of the last world, 0 before the first. ``available``: nodes that stand ready.
    """
    if previous == 0 or level is FaultTolerance.ELASTIC:
        usable = available
    elif level is FaultTolerance.SHRINK:
        usable = min(available, previous)
    else:
        return _recover(previous, available)
    nodes = bounds.fit(usable)
    if nodes == 0:
        return Size(0, f"{count(available)} ready, at least {bounds.lowest} needed (--nnodes={bounds})")
    return Size(nodes, _surplus(bounds, nodes, available))


def _recover(previous: int, available: int) -> Size:
    if available >= previous:
        return Size(previous, "all places are filled again")
    missing = previous - available
    return Size(0, f"--fault-tolerance=recover keeps {count(previous)}: waiting for {count(missing, 'replacement')}")


def _surplus(bounds: NodeRange, nodes: int, available: int) -> str:
    if nodes == available:
        return f"{count(nodes)} ready"
    if nodes == bounds.highest:
        return f"{nodes} of {count(available)} ready, the maximum; the others are spares"
    return f"{nodes} of {count(available)} ready; the others are spares"


def count(number: int, noun: str = "node") -> str:
    """A number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
