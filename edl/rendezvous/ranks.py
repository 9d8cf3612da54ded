"""Selects the nodes of the next world and orders them.

The rules, by priority. If there are more candidates than places, the nodes that their scheduler will remove first (the
highest indexes, where it assigns any) are left out first, then impaired nodes, which run fewer workers than planned
because a slot was dropped: a complete node replaces them. A node that requested a position with ``--node-rank`` gets it
when the world is large enough. Survivors keep their order. A newcomer takes the first vacated place; further newcomers
go to the end in the order in which they joined. If a replica of the model spans several nodes, replicas that have lost
none of them stay together, and survivors of the others fill one another's places. A replica gets nodes of one rack as
far as that moves no survivor.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
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
    rack: str = ""


def order(
    previous: Sequence[NodeId], candidates: Sequence[ReadyNode], size: int, wanted: int = 0, group: int = 1
) -> tuple[NodeId, ...]:
    """The next world's nodes, position 0 first.

    ``previous``: the last world in order. ``size``: from 1 to ``len(candidates)``. ``wanted``: the target number of
    nodes, 0 if there is none; a scheduler removes nodes whose index is not below it. ``group``: nodes of one replica,
    of which ``size`` is a multiple. If there are more candidates than places, the nodes to be removed are left out
    first, then impaired ones, then newcomers, then survivors of replicas that have lost a node, then the highest
    indexes, then the last survivors. Raises ``ValueError`` for a size out of range.
    """
    if not 0 < size <= len(candidates):
        raise ValueError(f"size={size} with {len(candidates)} candidates")
    if size % group:
        raise ValueError(f"size={size} with replicas of {group} nodes")
    chosen = _choose(previous, candidates, size, wanted, group)
    if group == 1:
        placed = _fill_places(previous, chosen)
    else:
        placed = _fill_groups(previous, chosen, group, {one.node: one.rack for one in candidates})
    return _honour_node_ranks(placed, {c.node: c.node_rank for c in candidates})


def _choose(
    previous: Sequence[NodeId], candidates: Sequence[ReadyNode], size: int, wanted: int, group: int
) -> list[NodeId]:
    """Candidates in order of priority, at most ``size``: survivors of whole replicas, then the others, each by index
    and position; then newcomers by requested node rank, index and arrival; then impaired nodes in the same order; last
    those that will be removed."""
    place = {node: position for position, node in enumerate(previous)}
    there = {one.node for one in candidates}
    kept = [nodes for nodes in _groups(previous, group) if len(nodes) == group and there.issuperset(nodes)]
    whole = set(itertools.chain.from_iterable(kept))

    def claim(one: ReadyNode) -> tuple[Any, ...]:
        surplus = 0 < wanted <= one.index
        if one.node in place:
            return (surplus, one.impaired, False, one.node not in whole, one.index, place[one.node])
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


def _fill_groups(
    previous: Sequence[NodeId], chosen: Sequence[NodeId], group: int, racks: Mapping[NodeId, str]
) -> list[NodeId]:
    """Like ``_fill_places``, but whole replicas stay together. Vacated places of the others go to newcomers, then to
    survivors of the last of these others, which are dissolved."""
    before, members = set(previous), set(chosen)
    newcomers = [node for node in chosen if node not in before]
    parts = [[node for node in nodes if node in members] for nodes in _groups(previous, group)]
    broken = [part for part in parts if len(part) < group]
    for index, part in enumerate(broken):
        while part and len(part) < group:
            # As all nodes together fill whole replicas, one of these has a node left.
            givers = [newcomers] if newcomers else broken[:index:-1]
            part.append(_take(givers, part, racks))
    return [*itertools.chain.from_iterable(parts), *_by_rack(newcomers, group, racks)]


def _take(givers: Sequence[list[NodeId]], part: Sequence[NodeId], racks: Mapping[NodeId, str]) -> NodeId:
    """Take a node for a replica away from its giver: the first in the rack of most of the replica's nodes, or else the
    first."""
    ((rack, _),) = Counter(racks[node] for node in part).most_common(1)
    offers = [(giver, node) for giver in givers for node in giver]
    giver, node = next((offer for offer in offers if rack and racks[offer[1]] == rack), offers[0])
    giver.remove(node)
    return node


def _by_rack(newcomers: Sequence[NodeId], group: int, racks: Mapping[NodeId, str]) -> list[NodeId]:
    """As many replicas within one rack as possible, then the others in their order."""
    waiting: dict[str, list[NodeId]] = {}
    placed: list[NodeId] = []
    for node in newcomers:
        there = waiting.setdefault(racks[node], [])
        there.append(node)
        if racks[node] and len(there) == group:
            placed += there
            there.clear()
    return [*placed, *(node for node in newcomers if node in waiting[racks[node]])]


def _groups(previous: Sequence[NodeId], group: int) -> list[Sequence[NodeId]]:
    """The replicas of a world, in order."""
    return [previous[start : start + group] for start in range(0, len(previous), group)]


def _honour_node_ranks(ordered: Sequence[NodeId], asked: dict[NodeId, int]) -> tuple[NodeId, ...]:
    fixed: dict[int, NodeId] = {}
    for node in ordered:
        place = asked[node]
        if 0 <= place < len(ordered):
            fixed.setdefault(place, node)
    settled = set(fixed.values())
    others = iter([node for node in ordered if node not in settled])
    return tuple(fixed[place] if place in fixed else next(others) for place in range(len(ordered)))
