"""How many nodes the next world has. Arithmetic on the bounds, the size asked for and the level of fault tolerance.

Whatever is answered here, ``lowest <= size <= highest`` and ``size % unit == 0`` hold, or the size is 0 and the
reason says what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.config import FaultTolerance, NodeRange
from edl.rendezvous.phrases import count


@dataclass(frozen=True, slots=True)
class Size:
    """Node count of the next world, 0 when none can form, with the reason in words."""

    nodes: int
    reason: str


def next_size(bounds: NodeRange, level: FaultTolerance, previous: int, available: int, wished: int = 0) -> Size:
    """Decide the next world's node count.

    ``previous``: nodes of the last world, 0 before the first. ``available``: nodes that stand ready. ``wished``: a size
    within the bounds that somebody has asked for, 0 for none. It takes the place of what the level says about the size.
    """
    if previous and level is FaultTolerance.RECOVER:
        return _recover(bounds, previous, available, wished)
    usable = min(available, previous) if previous and level is FaultTolerance.SHRINK and not wished else available
    nodes = bounds.fit(min(usable, wished) if wished else usable)
    if nodes == 0:
        return Size(0, f"{count(available)} ready, at least {bounds.lowest} needed (--nnodes={bounds})")
    return Size(nodes, _surplus(bounds, nodes, available, wished))


def _recover(bounds: NodeRange, previous: int, available: int, wished: int) -> Size:
    """Keep the size, until somebody asks for another one and there are nodes enough for it."""
    if wished and available >= wished:
        return Size(wished, f"{count(wished)}, as asked for")
    keep = min(max(previous, bounds.lowest), wished or bounds.highest)
    if available >= keep:
        return Size(keep, "all places are filled again")
    missing = keep - available
    return Size(0, f"--fault-tolerance=recover keeps {count(keep)}: waiting for {count(missing, 'replacement')}")


def _surplus(bounds: NodeRange, nodes: int, available: int, wished: int) -> str:
    if nodes == available:
        return f"{count(nodes)} ready"
    if nodes == wished:
        return f"{nodes} of {count(available)} ready, as asked for; the others are spares"
    if nodes == bounds.highest:
        return f"{nodes} of {count(available)} ready, the maximum; the others are spares"
    return f"{nodes} of {count(available)} ready; the others are spares"
