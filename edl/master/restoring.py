"""Chooses the commit from which the next world begins, its sources, and the nodes that store copies of new commits.

There is one choice for the whole world, so that no two ranks restore different steps. The newest complete commit is
chosen, wherever it is: in a node's memory, as its own or as a copy, or in the checkpoint directory. In the last case
one node first reads it into memory; a sharded checkpoint is only verified completely by that node, and read by the
workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edl.master.state import NodeEntry
from edl.types import NodeId
from edl.wire.records import NO_STATE, Source, Version


@dataclass(frozen=True, slots=True)
class Restore:
    """The commit from which the next world begins, and where it is."""

    version: Version = NO_STATE
    shards: int = 1
    """Number of parts; 1: not sharded."""
    stored: bool = False
    """Whether the workers read it from the checkpoint directory."""
    sources: tuple[Source, ...] = ()
    """Nodes that have a part in memory."""


@dataclass(frozen=True, slots=True)
class Load:
    """This node must first read the state from the checkpoint directory, or verify it there if it is sharded."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Unusable:
    """Checkpoints exist, but none can be used. ``why``: the reason, as a node reported it."""

    why: str


def choose(members: Sequence[NodeEntry], entries: Iterable[NodeEntry]) -> Restore | Load | Unusable:
    """The starting point of a world of ``members``. ``entries``: all nodes that can provide state now."""
    best = newest_in_memory(entries)
    stored = max((entry.stored for entry in members), default=NO_STATE)
    if stored.commit and stored > best.version:
        knows = [entry for entry in members if entry.stored == stored]
        if any(entry.stored_sharded and entry.orders.load for entry in knows):
            return Restore(stored, stored=True)
        untried = [entry for entry in knows if not entry.orders.load]
        if untried:
            return Load(untried[0].info.node)
    refusals = [entry.refused for entry in members if entry.refused]
    if not best.version.commit and refusals:
        return Unusable(refusals[0])
    return best


def newest_in_memory(entries: Iterable[NodeEntry]) -> Restore:
    """The newest commit of which all parts are in memory. Any number of workers can begin from it."""
    parts: dict[tuple[Version, int], list[Source]] = {}
    for entry in entries:
        info = entry.info
        for holding in entry.holdings:
            if holding.version.commit:
                source = Source(info.node, info.host, info.state_port, holding.shard)
                parts.setdefault((holding.version, holding.shards), []).append(source)
    whole = [
        Restore(version, shards, sources=tuple(sources))
        for (version, shards), sources in parts.items()
        if {source.shard for source in sources} >= set(range(shards))
    ]
    return max(whole, key=lambda restore: restore.version, default=Restore())


def copy_holders(
    members: Sequence[NodeEntry], spares: Sequence[NodeEntry], group: int = 1
) -> Mapping[NodeId, NodeEntry | None]:
    """For each member the node that stores copies of its commits; None: none can.

    It is a member on another rack, with the copies spread as evenly as possible; without one the member in the same
    place of the next replica (of ``group`` nodes); in a world of one node a spare. An earlier choice is kept unless
    that node would hold too many, because a new choice costs a copy of everything.
    """
    racks = {entry.info.rack for entry in members} - {""}
    # With a single rack, searching other racks would only cost time (quadratic in the nodes).
    away: dict[NodeId, list[NodeEntry]] = {
        entry.info.node: _on_other_racks(index, members) if len(racks) > 1 else []
        for index, entry in enumerate(members)
    }
    load: Counter[NodeId] = Counter()
    found: dict[NodeId, NodeEntry | None] = {}
    for entry in members:
        there = away[entry.info.node]
        most = math.ceil((len(members) - len(there)) / len(there)) if there else 0
        stays = next((one for one in there if one.info.node == entry.copy_holder and load[one.info.node] < most), None)
        if stays is not None:
            found[entry.info.node] = stays
            load[stays.info.node] += 1
    for index, entry in enumerate(members):
        there = away[entry.info.node]
        if entry.info.node in found:
            continue
        if there:
            chosen: NodeEntry | None = min(there, key=lambda one: load[one.info.node])  # of equals the next member
        else:
            alone = next(iter(spares), None)
            step = group if len(members) > group else 1
            chosen = members[(index + step) % len(members)] if len(members) > 1 else alone
        found[entry.info.node] = chosen
        if chosen is not None:
            load[chosen.info.node] += 1
    return found


def _on_other_racks(index: int, members: Sequence[NodeEntry]) -> list[NodeEntry]:
    """Members on other racks, in the order of the members after this one."""
    rack = members[index].info.rack
    others = [*members[index + 1 :], *members[:index]]
    return [entry for entry in others if rack and entry.info.rack and entry.info.rack != rack]
