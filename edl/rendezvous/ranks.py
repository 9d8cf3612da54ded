"""Which nodes form the next world, and in which order.

Rules, in this order of weight: where fewer train than could, those go that their scheduler takes away first (the
highest indexes, where it has given any), and then those that can run fewer workers than they are meant to, since a slot
of theirs was dropped: a whole node takes their place; a node that asked for a position with ``--node-rank`` gets it
when the world is that large; survivors keep their order; a newcomer takes the first vacated place; further newcomers go
to the end in the order in which they joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edl.types import NodeId


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that stands ready. ``joined`` orders newcomers; ``node_rank`` is -1 when no position was asked for,
    ``index`` when its scheduler has given it no number."""

    node: NodeId
    joined: int
    node_rank: int = -1
    index: int = -1
    impaired: bool = False
    """It can run fewer workers than it is meant to."""


def order(
    previous: Sequence[NodeId], candidates: Sequence[Candidate], size: int, wanted: int = 0
) -> tuple[NodeId, ...]:
    """The next world's nodes, position 0 first.

    ``previous``: the last world in order. ``size``: at most ``len(candidates)``. ``wanted``: nodes that there are to
    be in the end, 0 when nobody has said; a scheduler takes those away whose index is not below. When there are more
    candidates than places, those go first, then impaired ones, then newcomers, then the highest indexes, then the last
    survivors.
    """
    if not 0 < size <= len(candidates):
        raise ValueError(f"size={size} with {len(candidates)} candidates")
    chosen = _choose(previous, candidates, size, wanted)
    return _honour_node_ranks(_fill_places(previous, chosen), {c.node: c.node_rank for c in candidates})


def _choose(previous: Sequence[NodeId], candidates: Sequence[Candidate], size: int, wanted: int) -> list[NodeId]:
    """Members in order of claim: survivors by index and position, then newcomers by node rank asked for, index and
    arrival; then the same of impaired ones; at the end all that will be taken away."""
    place = {node: position for position, node in enumerate(previous)}

    def claim(one: Candidate) -> tuple[Any, ...]:
        doomed = 0 < wanted <= one.index
        if one.node in place:
            return (doomed, one.impaired, False, one.index, place[one.node])
        return (doomed, one.impaired, True, one.node_rank < 0, one.node_rank, one.index, one.joined, one.node)

    return [one.node for one in sorted(candidates, key=claim)][:size]


def _fill_places(previous: Sequence[NodeId], chosen: Sequence[NodeId]) -> list[NodeId]:
    before, members = set(previous), set(chosen)
    newcomers = iter([node for node in chosen if node not in before])
    placed: list[NodeId] = []
    for node in previous:
        occupant = node if node in members else next(newcomers, None)
        if occupant is not None:
            placed.append(occupant)
    return placed + list(newcomers)


def _honour_node_ranks(ordered: Sequence[NodeId], asked: dict[NodeId, int]) -> tuple[NodeId, ...]:
    fixed: dict[int, NodeId] = {}
    for node in ordered:
        place = asked[node]
        if 0 <= place < len(ordered):
            fixed.setdefault(place, node)
    settled = set(fixed.values())
    others = iter([node for node in ordered if node not in settled])
    return tuple(fixed[place] if place in fixed else next(others) for place in range(len(ordered)))
