"""Brings the world in line with the requested size.

``handle_request`` decides about a request. The other functions compare the requested size with the current one at every
step, and begin one change at a time: the next world follows the newest requests. A planned change happens at one step
boundary, however many nodes join and leave with it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edl.master import dropping, planning
from edl.master.events import Grant, Kind, ScaleRequested
from edl.master.forming import kept_out, names, stop_world
from edl.master.resting import newest_to_keep
from edl.master.sizing import UNNAMED, Departing, Facts, Judged, judge, remember, shortened
from edl.master.state import NodeEntry, NodeStatus, Phase
from edl.master.turn import MasterTurn
from edl.rendezvous.phrases import count
from edl.types import NodeId
from edl.wire.messages import Depart
from edl.wire.purpose import Purpose
from edl.wire.scale_requests import Cordon, Drain, DrainMode, Resize, ScaleRequest, SetBounds, Suspend, Verdict
from edl.wire.status import SUSPENDED

FINISHING = "the workers finish"
"""Why nothing is changed any more: those that have finished would repeat their work."""

# --- requests --------------------------------------------------------------------------------------------------------


def handle_request(turn: MasterTurn, event: ScaleRequested) -> None:
    """Decide about a request, and answer it."""
    request, record = shortened(event.request), turn.record
    judged = judge(record.sizing, request, _facts(turn, event))
    seen = remember(record.seen, request, judged)
    if judged.sizing != record.sizing or seen != record.seen:
        turn.write(sizing=judged.sizing, seen=seen)
    is_new = judged.sizing.generation > record.sizing.generation  # else it repeats an accepted one with its key
    but = _take_on(turn, request) if judged.verdict is Verdict.ACCEPTED and is_new else ""
    if judged.said:
        turn.note(Kind.DRAIN if isinstance(request, Drain) else Kind.SCALE, _line(request, judged))
    turn.effects.append(Grant(judged.verdict, judged.text + but))


def decide(turn: MasterTurn, request: Resize) -> None:
    """Decide about a request of the autoscale policy, which is dropped if it is refused."""
    judged = judge(turn.record.sizing, request, _facts(turn, ScaleRequested(request)))
    if judged.verdict is Verdict.ACCEPTED:
        turn.write(sizing=dataclasses.replace(judged.sizing, automatic=True))
        _take_on(turn, request)
        turn.note(Kind.SCALE, _line(request, judged))


def _take_on(turn: MasterTurn, request: ScaleRequest) -> str:
    """Begin what an accepted request needs beyond the new ``Sizing``. Returns what the answer should say besides."""
    match request:
        case Resize() | SetBounds():
            turn.resizing = True
        case Drain():
            _send_away(turn, request)
        case Cordon():
            return dropping.cordon(turn, request)
        case Suspend(suspended=False):
            turn.forming_since_s = turn.now_s
    return ""


def _send_away(turn: MasterTurn, request: Drain) -> None:
    """Record that nodes have to leave; ``depart`` orders it. A newer request about a node replaces deadline and
    checkpoint mode, and the node gets a new order."""
    reason = turn.record.sizing.reason
    why = f"{request.by}: {reason}" if reason else request.by
    departing = {(one.node, one.incarnation): one for one in turn.record.departing}
    for name in request.nodes:
        entry = turn.ordered(turn.nodes[NodeId(name)], depart=False)
        node, incarnation = entry.info.node, entry.info.incarnation
        before = departing.get((node, incarnation))
        era, commit = (before.era, before.commit) if before is not None else (0, 0)
        departing[node, incarnation] = Departing(node, incarnation, why, request.deadline_s, request.mode, era, commit)
    turn.write(departing=tuple(departing.values()))


def _line(request: ScaleRequest, judged: Judged) -> str:
    if judged.verdict is not Verdict.ACCEPTED:
        return judged.said
    why = f": {judged.sizing.reason}" if judged.sizing.reason else ""
    return f"{judged.said} by {request.by or UNNAMED}{why}"


def _facts(turn: MasterTurn, event: ScaleRequested) -> Facts:
    record, spec = turn.record, turn.spec
    over = f"the job is being stopped by {record.kill}" if record.kill else ""
    if record.phase is Phase.ENDED:
        over = f"the job has ended: {record.reason}"
    return Facts(
        spec=spec.nodes,
        nodes=frozenset(turn.nodes),
        able=frozenset(entry.info.node for entry in turn.able()),
        lowest=_lowest(turn),
        over=over,
        owner=spec.size_owner if spec.sized_outside else "",
        saves=event.saves,
        aware=record.rejoins,
        scales=spec.autoscale.enabled,
        store_members=frozenset(entry.info.node for entry in turn.nodes.values() if entry.info.members),
        members=max((entry.info.members for entry in turn.nodes.values()), default=0),
        held=event.held,
        seen=record.seen,
        infos={node: entry.info for node, entry in turn.nodes.items()},
        dropped=record.dropped,
        replicas=spec.replicas,
    )


def _lowest(turn: MasterTurn) -> int:
    """Minimum number of nodes for a world: the lower bound, or with level ``recover`` the current size."""
    bounds = turn.bounds
    return next(
        (n for n in range(bounds.lowest, bounds.highest, bounds.unit) if turn.next_size(n).nodes), bounds.highest
    )


def is_missed(turn: MasterTurn, entry: NodeEntry) -> bool:
    """Whether no world could form without this node, as far as the Master knows now."""
    others = [one for one in turn.able() if one.info.node != entry.info.node]
    if turn.record.sizing.suspended:
        return not others
    return turn.record.phase is not Phase.ENDED and not turn.next_size(len(others)).nodes


# --- nodes that have to leave ----------------------------------------------------------------------------------------


def depart(turn: MasterTurn) -> None:
    """Order departing nodes to leave, all at one step boundary. If some need a checkpoint first, have it written."""
    there = [one for one in turn.record.departing if turn.current(one.node, one.incarnation) is not None]
    if len(there) != len(turn.record.departing):
        turn.write(departing=tuple(there))
    ordered: list[NodeEntry] = []
    held: list[Departing] = []
    for one in there:
        entry = turn.nodes[one.node]
        if entry.orders.depart or entry.status is NodeStatus.LEAVING or not entry.attached:
            continue
        if not _may_go(turn, one):
            held.append(one)
            continue
        entry = turn.ordered(turn.update(entry, draining=True), depart=True)
        turn.tell(entry, Depart(one.reason, one.deadline_s, one.mode))
        if turn.member(entry) is not None:
            ordered.append(entry)
    if ordered and turn.underway:
        planning.agree(turn, Purpose.SWITCH, f"{names(ordered)} to leave")
    elif held and turn.underway and turn.agreement is None and not _is_being_saved(turn, held):
        planning.agree(turn, Purpose.SAVE, f"a checkpoint before {held[0].node} leaves")


def _may_go(turn: MasterTurn, one: Departing) -> bool:
    """Whether the node may be ordered to leave now: it needs no checkpoint first, or the checkpoint is complete."""
    if one.mode is not DrainMode.MUST or turn.is_saved(one):
        return True
    resting = turn.record.phase is Phase.FORMING and bool(turn.record.sizing.suspended)
    return resting and planning.newest_stored(turn) >= newest_to_keep(turn)


def _is_being_saved(turn: MasterTurn, held: list[Departing]) -> bool:
    world = turn.record.world
    return world is not None and turn.saving and all(one.commit and one.era == world.era for one in held)


# --- the world -------------------------------------------------------------------------------------------------------


def suspend(turn: MasterTurn) -> None:
    """Stop the running world if the job is suspended, if possible at a step boundary and with a checkpoint."""
    who = turn.record.sizing.suspended
    if not who or turn.record.done:
        return  # nodes whose workers have finished would repeat their work
    if turn.underway:
        planning.agree(turn, Purpose.KILL, f"suspended by {who}")
    elif planning.settled(turn):
        stop_world(turn, f"suspended by {who}")


@dataclass(frozen=True, slots=True)
class Fit:
    """The world that should run, compared with the running one."""

    nodes: int
    """The size it should have, as far as the available nodes allow; 0: no world can form."""
    cordoned: tuple[NodeEntry, ...]
    """Members that should not be in it."""
    newcomers: tuple[NodeEntry, ...]
    """Ready nodes that are not members."""
    changed: tuple[NodeEntry, ...] = ()
    """Members that should use other slots."""
    relieved: tuple[NodeEntry, ...] = ()
    """Members with dropped slots that ready nodes with all slots should replace."""

    @property
    def other(self) -> bool:
        """Whether a world of the same size would have other members or slots."""
        return bool(self.cordoned or self.changed or self.relieved)


def fit(turn: MasterTurn) -> Fit:
    """The world that should run, compared with the current one."""
    members = turn.members()
    excludes = turn.record.sizing.excludes
    cordoned = tuple(entry for entry in members if excludes(entry.info.node) or not turn.places(entry))
    staying = [entry for entry in members if entry not in cordoned and not entry.draining]
    newcomers = tuple(entry for entry in turn.ready() if turn.member(entry) is None)
    nodes = turn.next_size(len(staying) + len(newcomers)).nodes
    changed = tuple(entry for entry in dropping.misplaced(turn) if entry in staying)
    relieved = dropping.relieved(turn, newcomers, nodes) if nodes == len(members) else ()
    return Fit(nodes, cordoned, newcomers, changed, tuple(relieved))


def consider_size(turn: MasterTurn) -> None:
    """Replace the running world if its size or its nodes should change."""
    world = turn.record.world
    if world is None or turn.record.done or turn.record.sizing.suspended:
        return
    if turn.agreement is not None or not planning.settled(turn):
        return
    best, now = fit(turn), len(world.members)
    if not best.nodes or (best.nodes == now and not best.other):
        turn.grace_until_s = None
        return
    if best.nodes != now and _cools_down(turn, best):
        return
    if best.nodes > now and not best.changed and _others_come(turn, best):
        return
    planning.change(turn, _why(turn, best, now))


def _cools_down(turn: MasterTurn, best: Fit) -> bool:
    """Whether a change must wait for the cool-down. Cordons, other slots, and nodes that join without a new request do
    not wait."""
    if best.other or not turn.resizing or turn.now_s >= turn.cooling_until_s:
        return False
    turn.wake_at(turn.cooling_until_s)
    return True


def _others_come(turn: MasterTurn, best: Fit) -> bool:
    """Whether to wait, at most ``--join-grace``, for nodes that are still warming up, so that several join in one
    change."""
    coming = (NodeStatus.WARMING, NodeStatus.PREPARING)
    warming = any(e.attached and e.registered and e.status in coming for e in turn.nodes.values())
    if not warming or best.nodes >= turn.record.sizing.target(turn.spec.nodes):
        return False
    if turn.grace_until_s is None:
        turn.grace_until_s = turn.now_s + turn.spec.timeouts.join_grace_s
    if turn.now_s < turn.grace_until_s:
        turn.wake_at(turn.grace_until_s)
        return True
    return False


def _why(turn: MasterTurn, best: Fit, now: int) -> str:
    step = f"{'growing' if best.nodes > now else 'shrinking'} from {now} to {best.nodes} nodes"
    if best.cordoned:
        return f"{names(best.cordoned)} cordoned" + (f": {step}" if best.nodes != now else "")
    if best.changed or best.relieved:
        replaced = f"replacing {names(best.relieved)}, which has dropped slots, by a node with all slots"
        parts = (
            dropping.changes(turn, best.changed),
            replaced if best.relieved else "",
            step if best.nodes != now else "",
        )
        return "; ".join(part for part in parts if part)
    if best.nodes > now:
        return f"{names(best.newcomers)} joined: {step}"
    return f"{step}, as requested by {turn.record.sizing.by}"


# --- progress --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the world conforms to the newest request."""

    conforms: bool
    """Whether it does, as far as the available nodes allow."""
    waiting: str
    """What is still missing; empty: nothing."""


def observe(turn: MasterTurn) -> None:
    """Record that the newest request is fulfilled, once it is."""
    sizing = turn.record.sizing
    if turn.record.observed >= sizing.generation:
        return
    found = standing(turn)
    if not found.conforms:
        return
    turn.write(observed=sizing.generation)
    if turn.resizing:
        turn.resizing = False
        turn.cooling_until_s = turn.now_s + turn.spec.cooldown_s
    world = turn.record.world
    what = SUSPENDED
    if not sizing.suspended and world is not None:
        what = f"{count(len(world.members))} in round {world.round}"
    more = f" ({found.waiting})" if found.waiting else ""
    turn.note(Kind.SCALE, f"{what}, as requested by {sizing.by or UNNAMED}{more}")


def standing(turn: MasterTurn) -> Standing:
    """Compare the current world with the newest request."""
    record = turn.record
    leaving = [turn.nodes[one.node] for one in record.departing if turn.current(one.node, one.incarnation) is not None]
    if leaving:
        return Standing(False, f"{names(leaving)} to leave")
    if record.sizing.suspended:
        return _suspended(turn)
    world = record.world
    if record.phase is not Phase.RUNNING or world is None:
        return Standing(False, turn.reason or record.reason)
    best, now = fit(turn), len(world.members)
    if best.cordoned:
        few = "" if best.nodes else ": too few others are there for a world without it"
        return Standing(False, f"{names(best.cordoned)} cordoned, and still part of the world{few}")
    if best.changed and best.nodes == now:
        return Standing(False, dropping.changes(turn, best.changed))
    if best.nodes and best.nodes != now:
        return Standing(False, _obstacle(turn, best, now))
    if record.rejoins and not turn.underway:
        return Standing(False, f"workers of round {world.round} are still starting")
    wanted = max(record.sizing.requested(turn.spec.nodes), turn.bounds.lowest)
    if wanted <= now:
        return Standing(True, "")
    return Standing(True, f"{count(wanted - now, 'more node')} to come: {now} of {wanted} train{kept_out(turn)}")


def _suspended(turn: MasterTurn) -> Standing:
    if turn.record.phase is not Phase.FORMING:
        return Standing(False, FINISHING if turn.record.done else "the workers are being stopped")
    rests = (NodeStatus.READY, NodeStatus.WARMING, NodeStatus.LEAVING)
    busy = [
        entry
        for entry in turn.nodes.values()
        if entry.attached or turn.now_s < entry.due_s  # it may not have attached to this Master yet
        if entry.status not in rests or entry.parked or entry.draining
    ]
    return Standing(not busy, f"workers of {names(busy)} are being stopped" if busy else "")


def _obstacle(turn: MasterTurn, best: Fit, now: int) -> str:
    if turn.record.done:
        return FINISHING
    if turn.resizing and turn.now_s < turn.cooling_until_s:
        left_s = turn.cooling_until_s - turn.now_s
        return f"{best.nodes} nodes in {left_s:.0f} s: --scale-cooldown={turn.spec.cooldown_s:g} since the last resize"
    return f"changing from {now} to {count(best.nodes)}"
