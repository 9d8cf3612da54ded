"""Decides how many nodes the next world has, from the bounds, the requested size and the fault-tolerance level.

The result always satisfies ``lowest <= size <= highest`` and ``size % unit == 0``, or it is 0 and the reason says what
is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.config import FaultTolerance, NodeRange
from edl.rendezvous.phrases import count


@dataclass(frozen=True, slots=True)
class NextSize:
    """Number of nodes in the next world, 0 if none can form, with the reason as text."""

    nodes: int
    reason: str


def next_size(bounds: NodeRange, level: FaultTolerance, previous: int, available: int, requested: int = 0) -> NextSize:
    """Decide the next world's number of nodes.

    ``previous``: nodes in the last world, 0 before the first. ``available``: nodes that are ready. ``requested``: a
    requested size within the bounds, 0 for none; it overrides the size that the level would choose.
    """
    kept = max(previous, bounds.lowest)  # the minimum may have been raised
    if previous and level is FaultTolerance.RECOVER:
        return _recover(bounds, kept, available, requested)
    usable = min(available, kept) if previous and level is FaultTolerance.SHRINK and not requested else available
    nodes = bounds.fit(min(usable, requested) if requested else usable)
    if nodes == 0:
        return NextSize(0, f"{count(available)} ready, at least {bounds.lowest} needed (--nnodes={bounds})")
    return NextSize(nodes, _surplus(bounds, nodes, available, requested))


def _recover(bounds: NodeRange, kept: int, available: int, requested: int) -> NextSize:
    """Keep the size until another one is requested and enough nodes are ready for it."""
    if requested and available >= requested:
        return NextSize(requested, f"{count(requested)}, as requested")
    keep = min(kept, requested or bounds.highest)
    if available >= keep:
        return NextSize(keep, "all places are filled again")
    missing = keep - available
    return NextSize(0, f"--fault-tolerance=recover keeps {count(keep)}: waiting for {count(missing, 'replacement')}")


def _surplus(bounds: NodeRange, nodes: int, available: int, requested: int) -> str:
    if nodes == available:
        return f"{count(nodes)} ready"
    if nodes == requested:
        return f"{nodes} of {count(available)} ready, as requested; the others are spares"
    if nodes == bounds.highest:
        return f"{nodes} of {count(available)} ready, the maximum; the others are spares"
    return f"{nodes} of {count(available)} ready; the others are spares"
