"""Whom the next world waits for: living nodes that are not ready yet, and how long."""

from __future__ import annotations

from edl.config import FaultTolerance
from edl.master.restoring import newest_in_memory
from edl.master.state import NodeEntry, NodeStatus
from edl.master.turn import MasterTurn


def awaited(turn: MasterTurn) -> list[NodeEntry]:
    """Living nodes that are not ready yet, and that the next world waits for."""
    first = turn.record.world is None
    found = _unheard_spares(turn)
    for entry in turn.nodes.values():
        if not entry.registered or turn.now_s >= entry.due_s:
            continue
        stopping = entry.status is NodeStatus.STOPPING
        silent_member = entry.status is NodeStatus.READY and not entry.attached and turn.member(entry) is not None
        warming = entry.status is NodeStatus.WARMING and (first or turn.member(entry) is not None)
        loading = entry.status is NodeStatus.LOADING
        if stopping or silent_member or warming or loading or _is_needed(turn, entry):
            found.append(entry)
    return found


def deadline_s(turn: MasterTurn, entry: NodeEntry) -> float:
    """The next time at which an awaited node may not be awaited any more."""
    return min(at_s for at_s in (entry.due_s, entry.report_due_s) if at_s > turn.now_s)


def _unheard_spares(turn: MasterTurn) -> list[NodeEntry]:
    """Spares that have not reported to this Master yet and may have the only copies of the state: no member has
    reported the commit from which the last world began, or a newer one."""
    world = turn.record.world
    if world is None or not turn.record.rejoins:
        return []
    unheard = [e for e in turn.nodes.values() if e.status is NodeStatus.WARMING and turn.now_s < e.report_due_s]
    unheard = [e for e in unheard if world.member(e.info.node) is None]  # a later launcher of a member has no copies
    if not unheard:
        return []
    reported = (NodeStatus.READY, NodeStatus.PREPARING, NodeStatus.LOADING)
    heard = [entry for entry in turn.members() if entry.status in reported]
    return unheard if not heard or newest_in_memory(heard).version < world.restore else []


def _is_needed(turn: MasterTurn, entry: NodeEntry) -> bool:
    """Whether to wait for a member that starts workers ahead. If the workers of other members kept their processes,
    these continue without it, provided that fault-tolerance level and bounds allow, and it joins at a step boundary
    later. If all members restart their workers, all are waited for."""
    if entry.status is not NodeStatus.PREPARING or turn.member(entry) is None:
        return False
    ready = turn.ready()
    back = any(turn.member(other) is not None and not other.restarted for other in ready)
    elastic = turn.spec.fault_tolerance is FaultTolerance.ELASTIC
    return not (back and elastic and turn.bounds.fit(len(ready)))
