"""Lets nodes leave, remembers those that were lost or have left, and recognises them when a later launcher of the same
name is ready.

The names are in the record. The times are not, because each Master has a clock of its own: of a node that went under an
earlier Master only the least time is known.
"""

from __future__ import annotations

from collections.abc import Collection

from edl.master.state import Away, NodeEntry, NodeStatus, Phase
from edl.master.turn import MasterTurn
from edl.types import Incarnation, NodeId
from edl.wire.messages import Dismissed

KEPT = 100
"""Most nodes remembered, so that replacements with names of their own do not make the record grow without end."""


def remember(turn: MasterTurn, node: NodeId, incarnation: Incarnation, *, since_s: float | None) -> None:
    """A node takes no part any more: it is lost, or was dismissed. ``since_s``: the time of that; None: before this
    Master took over."""
    if turn.record.phase is Phase.ENDED:
        return  # the record of an ended job does not change
    others = [one for one in turn.record.away if one.node != node]
    kept = (*others, Away(node, incarnation))[-KEPT:]
    turn.write(away=kept)
    times = {**turn.away_s, node: since_s}
    turn.away_s = {one.node: at_s for one in kept if (at_s := times.get(one.node)) is not None}


def has_left(turn: MasterTurn, entry: NodeEntry) -> bool:
    """Whether this launcher was dismissed, perhaps by an earlier Master, and only takes its time to exit."""
    return Away(entry.info.node, entry.info.incarnation) in turn.record.away


def returned(turn: MasterTurn, entry: NodeEntry) -> str:
    """How long a node that is ready was away, for messages; empty: it was not. The node is then forgotten."""
    info = entry.info
    if not any(one.node == info.node and one.incarnation != info.incarnation for one in turn.record.away):
        return ""
    since_s = turn.away_s.get(info.node)
    least = "at least " if since_s is None else ""
    away_s = turn.now_s - (turn.began_s if since_s is None else since_s)
    forget(turn, {info.node})
    return f"{least}{away_s:.1f} s"


def forget(turn: MasterTurn, nodes: Collection[NodeId]) -> None:
    """These nodes take part."""
    if any(one.node in nodes for one in turn.record.away):
        turn.write(away=tuple(one for one in turn.record.away if one.node not in nodes))
        turn.away_s = {node: at_s for node, at_s in turn.away_s.items() if node not in nodes}


def dismiss(turn: MasterTurn, reason: str, *, needed: bool = False, only: NodeEntry | None = None) -> None:
    """Let draining nodes leave that run no workers, or ``only`` this one. ``needed``: no world can form without
    them."""
    for entry in [only] if only is not None else list(turn.nodes.values()):
        if entry.draining and entry.status is NodeStatus.READY:
            if entry.hurried and not needed:
                turn.write(owed=f"node {entry.info.node} left without time for a checkpoint")
            entry = turn.update(entry, status=NodeStatus.LEAVING)
            remember(turn, entry.info.node, entry.info.incarnation, since_s=turn.now_s)
            turn.tell(entry, Dismissed(reason, needed, save=needed or not entry.hurried))
