"""Drops slots of nodes and takes them back, in the Master. The rules are in ``edl.master.policies.slots``.

Level-triggered like the size: the record says which slots are dropped, and from this follows which slots each node's
next workers use. A world that uses others is replaced (``edl.master.resizing``); agents are notified, so that they keep
workers ready in the right slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl.master import denylist
from edl.master.events import Kind, Unfit
from edl.master.policies import slots as rules
from edl.master.policies.slots import Dropped, DroppedBy, Strike
from edl.master.sizing import LIFT
from edl.master.state import NodeEntry, NodeStatus
from edl.master.turn import MasterTurn
from edl.rendezvous.ranks import ReadyNode, order
from edl.types import NodeId
from edl.wire.messages import UseSlots
from edl.wire.records import NodeInfo
from edl.wire.scale_requests import Cordon


def candidate(turn: MasterTurn, entry: NodeEntry) -> ReadyNode:
    """A node in the form that ``edl.rendezvous.ranks`` needs."""
    info = entry.info
    impaired = is_impaired(turn, entry)
    return ReadyNode(info.node, entry.joined, info.node_rank, info.index, impaired=impaired, rack=info.rack)


def is_impaired(turn: MasterTurn, entry: NodeEntry) -> bool:
    """Whether the node can run fewer workers than planned."""
    return len(turn.places(entry)) < entry.info.slots


def workers_of(turn: MasterTurn, entries: Sequence[NodeEntry]) -> int:
    """Number of workers in a world of these nodes."""
    return sum(len(turn.places(entry)) for entry in entries)


# --- automatic -------------------------------------------------------------------------------------------------------


def judge(turn: MasterTurn) -> None:
    """Count what ended the last world, once it is known and before the next one forms."""
    record = turn.record
    if record.judged or record.world is None:
        return
    turn.write(judged=True)
    if record.strikes and turn.trained_s:
        used = [(entry.info, member.used) for entry in turn.members() if (member := turn.member(entry)) is not None]
        turn.write(strikes=rules.trained(record.strikes, used, turn.trained_s))
    limit = turn.spec.slots.strikes
    failure = rules.culprit(record.failures) if record.charged and limit else None
    entry = turn.nodes.get(failure.node) if failure is not None else None
    if failure is None or entry is None or turn.member(entry) is None:
        return
    slot = rules.slot_in(failure)
    strikes, strike = rules.struck(turn.record.strikes, entry.info, slot, failure.rank)
    turn.write(strikes=strikes)
    known = rules.counted(strikes, turn.record.dropped)
    for one in turn.record.dropped:
        if one.by_itself and one.strike is not None and rules.against(one.strike, known) < limit:
            _take_back(turn, one, rules.excused(failure))
    # A slot that was dropped while its worker ran stays with who dropped it: only the job's own drops come back.
    if rules.against(strike, known) >= limit and slot in rules.usable(turn.record.dropped, entry.info):
        _drop_by_itself(turn, entry, slot, rules.because(strike, failure), strike)


def unfit(turn: MasterTurn, event: Unfit) -> None:
    """A check reports an unfit slot."""
    entry = turn.current(event.node, event.incarnation)
    if entry is not None and event.slot in rules.usable(turn.record.dropped, entry.info):
        _drop_by_itself(turn, entry, event.slot, event.why)


def exclude(turn: MasterTurn, entry: NodeEntry, slot: int, why: str) -> None:
    """Drop the slot of a straggler."""
    if slot in rules.usable(turn.record.dropped, entry.info):
        _drop_by_itself(turn, entry, slot, why, by=DroppedBy.STRAGGLER)


def _drop_by_itself(
    turn: MasterTurn,
    entry: NodeEntry,
    slot: int,
    why: str,
    strike: Strike | None = None,
    by: DroppedBy = DroppedBy.JOB,
) -> None:
    """Drop a slot if the job can do without it. ``strike``: its failures, if they are the reason."""
    why_not = missed(turn, entry, slot)
    name = f"slot {slot} of {entry.info.node}"
    if why_not:
        if rules.slots_of(entry.info) > 1 or len(turn.nodes) > 1:  # otherwise there was no choice
            turn.note(Kind.SLOT, f"{name} {why}; it stays: {why_not}", entry.info.node)
        return
    one = rules.drop_of(entry.info, slot, why, turn.record.round, by, strike)
    _drop(turn, one, entry.info)
    turn.dropped_s = {**turn.dropped_s, (entry.info.node, slot): turn.now_s}
    if turn.spec.slots.cooldown_s:
        turn.wake_at(turn.now_s + turn.spec.slots.cooldown_s)
    turn.note(Kind.SLOT, f"{name} dropped: {why}", entry.info.node)


def missed(turn: MasterTurn, entry: NodeEntry, slot: int) -> str:
    """Why the job cannot do without a slot; empty if it can."""
    others = [one for one in turn.members() if one.info.node != entry.info.node]
    if turn.spec.independent and others and all(one.finished for one in others):
        return "the workers of all other nodes have ended, and nobody would do its work"
    left = [one for one in rules.usable(turn.record.dropped, entry.info) if one != slot]
    remaining = sum(one.info.node != entry.info.node for one in turn.able())
    if not turn.spec.replicas.whole(len(left)) and not turn.next_size(remaining).nodes:
        return (
            "it is the last one of its node, and there is no world without that"
            if not left
            else "its node holds no whole replica without it, and there is no world without that node"
        )
    return ""


def _drop(turn: MasterTurn, one: Dropped, info: NodeInfo) -> None:
    others = tuple(other for other in turn.record.dropped if not rules.is_same(other, info, one.slot))
    strikes = rules.without(turn.record.strikes, info, one.slot)
    turn.write(dropped=rules.newest((*others, one), turn.nodes), strikes=strikes)


def _take_back(turn: MasterTurn, one: Dropped, why: str) -> None:
    """Let a slot take part again that was dropped for its failures. The next one drops it again."""
    _forget(turn, (one,))
    ranks = one.strike.ranks if one.strike is not None else ()
    again = Strike(one.node, one.slot, one.device, max(1, turn.spec.slots.strikes - 1), ranks=ranks)
    turn.write(strikes=(*turn.record.strikes, again)[-rules.KEPT :])
    turn.note(Kind.SLOT, f"slot {one.slot} of {one.node} may take part again: {why}", one.node)


def come_back(turn: MasterTurn) -> None:
    """Let dropped slots take part again after their cool-down, with one strike left, as long as the restart budget
    would bear a failure."""
    limits = turn.spec.slots
    cooling = [one for one in turn.record.dropped if one.by_itself]
    if not limits.cooldown_s or not cooling or turn.record.restarts >= turn.spec.max_restarts:
        return
    for one in cooling:
        key = (one.node, one.slot)
        if key not in turn.dropped_s:
            turn.dropped_s = {**turn.dropped_s, key: turn.now_s}
        due_s = turn.dropped_s[key] + limits.cooldown_s
        if turn.now_s < due_s:
            turn.wake_at(due_s)
            continue
        _take_back(turn, one, f"the cool-down of {limits.cooldown_s:g} s is over (--slot-cooldown)")


def _forget(turn: MasterTurn, back: Sequence[Dropped]) -> Sequence[Dropped]:
    """Let these slots take part again. Returns new drops of those that have been put on the denylist meanwhile."""
    turn.write(dropped=tuple(one for one in turn.record.dropped if one not in back))
    turn.dropped_s = {key: at_s for key, at_s in turn.dropped_s.items() if key not in {(o.node, o.slot) for o in back}}
    nodes, devices = {one.node for one in back}, {one.device for one in back} - {""}
    infos = [entry.info for entry in turn.nodes.values()]
    return denylist.apply(turn, (one for one in infos if one.node in nodes or devices.intersection(one.devices)))


# --- by hand ---------------------------------------------------------------------------------------------------------


def cordon(turn: MasterTurn, request: Cordon) -> str:
    """Carry out a request that ``edl.master.sizing`` has accepted. Returns what the requester should know besides."""
    entry = turn.nodes.get(NodeId(request.node))
    info = entry.info if entry is not None else None
    if not request.cordoned:
        back = rules.meant(turn.record.dropped, info, request.node, request.device)
        denied = _forget(turn, [one for one in back if not one.denied])
        but = "; ".join(f"slot {one.slot}: {one.why}" for one in denied)
        return f", except {but}. {LIFT}" if but else ""
    if request.device and info is not None:
        slot = rules.named(info, request.device)
        assert slot is not None  # noqa: S101 - otherwise the request would have been refused
        why = ": ".join(part for part in (request.by, " ".join(request.reason.split())) if part)
        _drop(turn, rules.drop_of(info, slot, f"by hand ({why})", turn.record.round, DroppedBy.HAND), info)
    return ""


def drops_since_last_world(turn: MasterTurn) -> list[str]:
    """The slots dropped since the last world, as text."""
    return [
        f"slot {one.slot} of {one.node} dropped: {one.why}"
        for one in turn.record.dropped
        if turn.record.world is not None and one.round == turn.record.round
    ]


def left_out(turn: MasterTurn) -> list[str]:
    """The slots that were dropped automatically and still are: a successful job may have hidden a bug in this way."""
    return [f"slot {one.slot} of {one.node} was dropped: {one.why}" for one in turn.record.dropped if one.by_itself]


# --- from there to the world -----------------------------------------------------------------------------------------


def relieved(turn: MasterTurn, newcomers: Sequence[NodeEntry], nodes: int) -> list[NodeEntry]:
    """Members with dropped slots that ready complete nodes would replace, in a world of ``nodes`` nodes. None if that
    would cost steps."""
    members = turn.members()
    impaired = [entry for entry in members if not turn.excluded(entry) and is_impaired(turn, entry)]
    if not impaired or not newcomers or not turn.underway:
        return []
    staying = [entry for entry in members if not turn.excluded(entry) and not entry.draining]
    candidates = [candidate(turn, entry) for entry in (*staying, *newcomers)]
    target = turn.record.sizing.target(turn.spec.nodes)
    chosen = order([entry.info.node for entry in members], candidates, nodes, target, turn.spec.replicas.nodes)
    return [entry for entry in impaired if entry.info.node not in chosen]


def misplaced(turn: MasterTurn) -> list[NodeEntry]:
    """Members whose workers should be in other slots."""
    found = []
    for entry in turn.members():
        member, places = turn.member(entry), turn.places(entry)
        if member is not None and places and member.used != places:
            found.append(entry)
    return found


def changes(turn: MasterTurn, entries: Sequence[NodeEntry]) -> str:
    """The changes to the slots of these members, as text."""
    said: list[str] = []
    for entry in entries:
        member = turn.member(entry)
        used, places = set(member.used if member is not None else ()), set(turn.places(entry))
        for slot in sorted(used - places):
            one = rules.dropped_here(turn.record.dropped, entry.info, slot)
            why = f" dropped: {one.why}" if one is not None else " no longer needed"
            said.append(f"slot {slot} of {entry.info.node}{why}")
        said += [f"slot {slot} of {entry.info.node} takes part" for slot in sorted(places - used)]
    return "; ".join(said)


def tell(turn: MasterTurn) -> None:
    """Tell agents which slots their next workers use, if that has changed."""
    for entry in list(turn.nodes.values()):
        places = turn.places(entry)
        known = entry.uses or rules.first(entry.info.slots)
        if not entry.attached or entry.status is NodeStatus.LEAVING or not places or known == places:
            continue
        entry = turn.update(entry, uses=places)
        turn.tell(entry, UseSlots(places, "slots of this node are dropped or take part again"))
