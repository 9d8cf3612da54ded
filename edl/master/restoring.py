"""Which commit the next world begins from, who gives it, and who keeps copies of the commits it makes.

One choice for the whole world, so that no two ranks restore different steps. The newest complete commit wins,
wherever it lies: in the memory of a node, its own or another's copy, or in the checkpoint directory. From there one
node reads it into its memory first; after that it is like any other. A sharded one is only checked by that node, to its
last byte, and read by the workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edl.master.state import NodeEntry
from edl.types import NodeId
from edl.wire.messages import NO_STATE, Source, Version


@dataclass(frozen=True, slots=True)
class Restore:
    """What the next world begins from."""

    version: Version = NO_STATE
    shards: int = 1
    stored: bool = False
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """First this node has to read the state from the checkpoint directory, or to check it there if it is sharded."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Unusable:
    """There are checkpoints, and none can be used."""

    why: str


def choose(members: Sequence[NodeEntry], entries: Iterable[NodeEntry], size: int) -> Restore | Load | Unusable:
    """What a world of ``members`` with ``size`` workers begins from. ``entries``: all nodes that can give state now."""
    held = _in_memory(entries, size)
    best = max(held, key=lambda restore: restore.version, default=Restore())
    stored = max((entry.stored for entry in members), default=NO_STATE)
    if stored.commit and stored > best.version:
        knows = [entry for entry in members if entry.stored == stored]
        if any(entry.stored_sharded and entry.load_tried for entry in knows):
            return Restore(stored, stored=True)
        untried = [entry for entry in knows if not entry.load_tried]
        if untried:
            return Load(untried[0].info.node)
    refusals = [entry.refused for entry in members if entry.refused]
    if not best.version.commit and refusals:
        return Unusable(refusals[0])
    return best


def size_of_newest(entries: Iterable[NodeEntry], than: Version) -> int:
    """Workers that a world must have to begin from the newest commit in memory, if that is newer than ``than``; 0 when
    it does not matter. A sharded state in memory fits one size only."""
    entries = list(entries)
    sizes = {holding.shards for entry in entries for holding in entry.holdings if holding.version > than}
    whole = [(found.version, size) for size in sizes for found in _in_memory(entries, size) if found.version > than]
    return max(whole, default=(than, 0))[1]


def is_cut(members: Sequence[NodeEntry]) -> bool:
    """The state is sharded, and in memory it fits worlds of this size only: another one would throw it away. Not so
    with a checkpoint directory: there the workers write it at the boundary, and any size reads it."""
    sharded = any(holding.shards > 1 for entry in members for holding in entry.holdings)
    return sharded and not any(entry.stored_sharded and entry.stored.commit for entry in members)


def newest_in_memory(entries: Sequence[NodeEntry]) -> Restore:
    """The newest commit of which every part is in somebody's memory, whatever size of world it fits."""
    sizes = {holding.shards for entry in entries for holding in entry.holdings}
    found = [restore for size in sizes for restore in _in_memory(entries, size)]
    return max(found, key=lambda restore: restore.version, default=Restore())


def _in_memory(entries: Iterable[NodeEntry], size: int) -> list[Restore]:
    """Commits of which every part is in somebody's memory, and that a world of this size can begin from."""
    parts: dict[tuple[Version, int], list[Source]] = {}
    for entry in entries:
        info = entry.info
        for holding in entry.holdings:
            if holding.version.commit and holding.shards in (1, size):
                source = Source(info.node, info.host, info.state_port, holding.shard)
                parts.setdefault((holding.version, holding.shards), []).append(source)
    return [
        Restore(version, shards, sources=tuple(sources))
        for (version, shards), sources in parts.items()
        if {source.shard for source in sources} >= set(range(shards))
    ]


def keepers(members: Sequence[NodeEntry], spares: Sequence[NodeEntry]) -> Mapping[NodeId, NodeEntry | None]:
    """Where each member sends copies of its commits: to a member on another rack, as evenly as can be, else to the next
    member; a world of one node to a spare, if there is one. Whoever has a place elsewhere that is not crowded keeps it:
    another one would cost a copy of everything."""
    racks = {entry.info.rack for entry in members} - {""}
    # Without two racks nobody is on another one, and looking for such is work for the square of the nodes.
    away: dict[NodeId, list[NodeEntry]] = {
        entry.info.node: _on_other_racks(index, members) if len(racks) > 1 else []
        for index, entry in enumerate(members)
    }
    load: Counter[NodeId] = Counter()
    found: dict[NodeId, NodeEntry | None] = {}
    for entry in members:
        there = away[entry.info.node]
        most = math.ceil((len(members) - len(there)) / len(there)) if there else 0
        stays = next((one for one in there if one.info.node == entry.keeper and load[one.info.node] < most), None)
        if stays is not None:
            found[entry.info.node] = stays
            load[stays.info.node] += 1
    for index, entry in enumerate(members):
        there = away[entry.info.node]
        if entry.info.node in found:
            continue
        if there:
            chosen: NodeEntry | None = min(there, key=lambda one: load[one.info.node])  # of equals the next one
        else:
            alone = next(iter(spares), None)
            chosen = members[(index + 1) % len(members)] if len(members) > 1 else alone
        found[entry.info.node] = chosen
        if chosen is not None:
            load[chosen.info.node] += 1
    return found


def _on_other_racks(index: int, members: Sequence[NodeEntry]) -> list[NodeEntry]:
    """Beginning with the next one."""
    rack = members[index].info.rack
    others = [*members[index + 1 :], *members[:index]]
    return [entry for entry in others if rack and entry.info.rack and entry.info.rack != rack]
