"""Selects the nodes of the next world and orders them.

The rules, by priority. If there are more candidates than places, the nodes that their scheduler will remove first (the
highest indexes, where it assigns any) are left out first, then impaired nodes, which run fewer workers than planned
because a slot was dropped: a complete node replaces them. A node that requested a position with ``--node-rank`` gets it
when the world is large enough. Survivors keep their order. A newcomer takes the first vacated place; further newcomers
go to the end in the order in which they joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edl.types import NodeId


@dataclass(frozen=True, slots=True)
class ReadyNode:
    """A node that is ready. ``joined`` orders newcomers; ``node_rank`` is -1 if no position was requested, ``index`` is
    -1 if the scheduler assigned no number."""

    node: NodeId
    joined: int
    node_rank: int = -1
    index: int = -1
    impaired: bool = False
    """It runs fewer workers than planned, because a slot was dropped."""


def order(
    previous: Sequence[NodeId], candidates: Sequence[ReadyNode], size: int, wanted: int = 0
) -> tuple[NodeId, ...]:
    """The next world's nodes, position 0 first.

    ``previous``: the last world in order. ``size``: from 1 to ``len(candidates)``. ``wanted``: the target number of
    nodes, 0 if there is none; a scheduler removes nodes whose index is not below it. If there are more candidates than
    places, those nodes are left out first, then impaired ones, then newcomers, then the highest indexes, then the last
    survivors. Raises ``ValueError`` for a size out of range.
    """
    if not 0 < size <= len(candidates):
        raise ValueError(f"size={size} with {len(candidates)} candidates")
    chosen = _choose(previous, candidates, size, wanted)
    return _honour_node_ranks(_fill_places(previous, chosen), {c.node: c.node_rank for c in candidates})


def _choose(previous: Sequence[NodeId], candidates: Sequence[ReadyNode], size: int, wanted: int) -> list[NodeId]:
    """Candidates in order of priority, at most ``size``: survivors by index and position, then newcomers by requested
    node rank, index and arrival; then impaired nodes in the same order; last those that will be removed."""
    place = {node: position for position, node in enumerate(previous)}

    def claim(one: ReadyNode) -> tuple[Any, ...]:
        surplus = 0 < wanted <= one.index
        if one.node in place:
            return (surplus, one.impaired, False, one.index, place[one.node])
        return (surplus, one.impaired, True, one.node_rank < 0, one.node_rank, one.index, one.joined, one.node)

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
