"""The Master's machine: events in, a new state and effects out. No clock, no I/O.

The contract with the shell: after each step write ``state.record`` if it has changed (guarded by the fencing token),
and only then run the effects in order. If the write is refused because of the token, another Master has been elected:
run no effects and step down. Every message may be lost with its stream. An agent that attaches reports its state and is
brought up to date, so the Master never depends on a message that was sent only once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from edl.config import JobSpec
from edl.master import (
    alarms,
    autoscaling,
    away,
    checking,
    denylist,
    dropping,
    incidents,
    planning,
    resizing,
    straggling,
)
from edl.master.events import (
    Decision,
    DenylistChanged,
    Event,
    Failed,
    Flawed,
    JobAlarms,
    Kind,
    NodeAttached,
    NodeDetached,
    NodeExpired,
    NodeRefused,
    NodeRegistered,
    NodeSaid,
    OperatorRequest,
    ScaleRequested,
    Tick,
    Unfit,
)
from edl.master.forming import (
    UNSAVED,
    conclude_once_left,
    end_as_failed,
    end_if_all_done,
    interrupt,
    order_stop,
    order_switch,
    prestart,
    stop_world,
    tell_outcome,
    try_to_form,
)
from edl.master.state import NO_ORDERS, Away, Flaw, MasterState, NodeEntry, NodeStatus, Phase, Record
from edl.master.turn import MasterTurn
from edl.rendezvous.phrases import count
from edl.types import Incarnation, NodeId, Round
from edl.wire.health import HealthChecked
from edl.wire.messages import (
    Alarms,
    Asked,
    Attach,
    Boundary,
    Dismissed,
    Expelled,
    Hanging,
    HangLimit,
    Kept,
    Leaving,
    NotKept,
    NotLogged,
    Pace,
    Preparing,
    Ready,
    StartRound,
    Switch,
    Underway,
    WorkerFailed,
    WorkersDone,
)
from edl.wire.records import NO_STATE, Member, NodeInfo


def take_over(spec: JobSpec, record: Record | None, nodes: Sequence[NodeInfo], now_s: float) -> Decision:
    """The first step of a new Master. ``record``: that of the last Master; None: the job has just begun. ``nodes``:
    those with a lease.

    Nodes are assumed to be as recorded until they attach or are proven dead.
    """
    # formed_at_s: members of a running world get time to report that they are underway.
    known = record or Record()
    turn = MasterTurn(MasterState(spec, known, began_s=now_s, forming_since_s=now_s, formed_at_s=now_s), now_s)
    turn.planned = turn.at_boundary
    sizing, observed = turn.record.sizing, turn.record.observed
    turn.resizing = sizing.generation > observed
    turn.cooling_until_s = now_s + spec.cooldown_s if observed else 0.0  # the elapsed part of the cool-down is unknown
    for info in nodes:
        entry = _add_node(turn, info, registered=True)
        if turn.member(entry) is not None:
            running = turn.record.phase is Phase.RUNNING
            wait_s = 0.0 if away.has_left(turn, entry) else turn.absence_s(info)
            entry = turn.update(
                entry,
                status=NodeStatus.RUNNING if running else NodeStatus.STOPPING,
                due_s=float("inf") if running else now_s + wait_s,
            )
        elif not away.has_left(turn, entry):
            entry = turn.update(entry, report_due_s=now_s + turn.absence_s(info))
        turn.probe(entry)
    turn.reason = turn.record.reason
    if turn.record.phase is not Phase.ENDED:
        _handle_lost_members(turn)
    _apply_rules(turn)
    return turn.decision()


def _handle_lost_members(turn: MasterTurn) -> None:
    """Handle members whose leases ended while the job had no Master."""
    members = turn.record.world.members if turn.record.world else ()
    alive = {entry.info.incarnation for entry in turn.nodes.values()}
    gone = [m for m in members if m.incarnation not in alive and m.node not in turn.finished]
    if not gone:
        return
    what = "lost while the job had no Master"
    lately = [member for member in gone if _is_lost_only_now(turn, member)]
    for member in gone:
        away.remember(turn, member.node, member.incarnation, since_s=None)
    for member in lately:
        turn.mention(Kind.NODE_LOST, f"node {member.node} {what}", member.node)
    how = f"{_listed(gone)} {what}"
    if turn.record.phase is Phase.RUNNING:
        turn.reason = how if lately else turn.reason
        stop_world(turn, how)
        return
    interrupt(turn)
    if lately:  # an earlier Master has decided about the others
        incidents.refund(turn, f"{_listed(lately)} {what}")


def _listed(members: Sequence[Member]) -> str:
    return f"{'node' if len(members) == 1 else 'nodes'} {', '.join(member.node for member in members)}"


def _is_lost_only_now(turn: MasterTurn, member: Member) -> bool:
    """Whether no earlier Master has noted that this member is gone: it had lost or dismissed it, and perhaps seen it
    return, while the next world was not formed yet."""
    returned = turn.record.phase is Phase.FORMING and member.node in turn.nodes
    return not returned and Away(member.node, member.incarnation) not in turn.record.away


def step(state: MasterState, event: Event, now_s: float) -> Decision:
    """Handle one event. Events about earlier incarnations of a node are ignored."""
    return step_all(state, (event,), now_s)


def step_all(state: MasterState, events: Iterable[Event], now_s: float) -> Decision:
    """Handle several events in order, then apply the rules once. The rules look at every node: applying them after each
    event would be quadratic in the number of nodes."""
    turn = MasterTurn(state, now_s)
    for event in events:
        handler: Callable[[MasterTurn, Any], None] = EVENT_HANDLERS[type(event)]
        handler(turn, event)
    _apply_rules(turn)
    return turn.decision()


def absent(state: MasterState, streams: Container[tuple[NodeId, Incarnation]]) -> tuple[NodeId, ...]:
    """Nodes that have a lease, as far as the store has reported, and are not attached. A Master without the store may
    continue only while there are none, because they may already follow another Master. ``streams``: the agents whose
    streams are open. They count as well, because the state does not change while a decision waits for the store."""
    return tuple(
        node
        for node, entry in state.nodes.items()
        if entry.registered and not (entry.attached and (node, entry.info.incarnation) in streams)
    )


def _apply_rules(turn: MasterTurn) -> None:
    """Apply the rules that depend only on the state, whatever the event was."""
    if turn.record.phase is Phase.ENDED:
        conclude_once_left(turn)
        return
    resizing.depart(turn)
    dropping.come_back(turn)
    checking.keep_going(turn)
    if turn.record.phase is Phase.RUNNING:
        _prestart_checked(turn)  # before copies are assigned, which a node that starts its workers does not get
        incidents.look_for_cause(turn)
    rules = (
        planning.look_at_agreement,
        planning.consider_stop,
        planning.see_off,
        resizing.suspend,
        resizing.consider_size,
        planning.consider_checkpoint,
        planning.consider_settings,
        planning.assign_copy_holders,
    )
    for rule in rules:
        if turn.record.phase is Phase.RUNNING and not turn.held:
            rule(turn)
    if turn.record.phase is Phase.FORMING:
        incidents.add_held(turn)
        try_to_form(turn)
    if turn.record.phase is Phase.RUNNING:
        checking.consider(turn)
        _prestart_checked(turn)
    if turn.record.outcome is None:
        alarms.settle(turn)
        straggling.settle(turn)
        dropping.tell(turn)
        resizing.observe(turn)


def _prestart_checked(turn: MasterTurn) -> None:
    """Let new nodes that have passed their health check start workers ahead, as others do when they are ready."""
    if not (turn.checks_health and turn.record.rejoins):
        return
    for entry in turn.ready():
        if turn.member(entry) is None and not (entry.parked or entry.orders.prestart or entry.orders.idle):
            prestart(turn, entry)


# --- nodes join and leave --------------------------------------------------------------------------------------------


def _add_node(turn: MasterTurn, info: NodeInfo, *, registered: bool) -> NodeEntry:
    entry = NodeEntry(info, turn.arrivals, NodeStatus.WARMING, registered, due_s=turn.now_s + turn.absence_s(info))
    turn.arrivals += 1
    turn.nodes[info.node] = entry
    denylist.apply(turn, (info,))
    return entry


def _registered(turn: MasterTurn, event: NodeRegistered) -> None:
    info = event.info
    if info.incarnation in turn.dead:
        return  # its end was reported first
    entry = turn.nodes.get(info.node)
    if entry is not None and entry.info.incarnation != info.incarnation:
        _lost(turn, entry, "replaced by a new launcher of the same name")
        entry = None
    if entry is None:
        _add_node(turn, info, registered=True)
        return
    turn.update(entry, registered=True)


def _attached(turn: MasterTurn, event: NodeAttached) -> None:
    attach = event.attach
    info = attach.info
    entry = turn.nodes.get(info.node)
    if info.incarnation in turn.dead:
        stranger = NodeEntry(info, 0, NodeStatus.LEAVING, attached=True)
        turn.tell(stranger, Expelled("its lease ended; the job went on without it"))
        return
    if entry is not None and entry.info.incarnation != info.incarnation:
        _lost(turn, entry, "replaced by a new launcher of the same name")
        entry = None
    if entry is None:
        entry = _add_node(turn, info, registered=False)
    entry = turn.update(entry, attached=True, seen_round=attach.seen_round, uses=attach.uses, orders=NO_ORDERS)
    if turn.record.outcome is not None:
        tell_outcome(turn, entry, turn.record.outcome)
    else:
        _catch_up(turn, entry, attach)


def _catch_up(turn: MasterTurn, entry: NodeEntry, attach: Attach) -> None:
    """Bring an agent that has attached in line with the record: order it to stop or to start, or wait for its
    report."""
    world = turn.record.world
    member = turn.member(entry)
    meant_to_run = world is not None and turn.record.phase is Phase.RUNNING and member is not None
    if turn.member(entry) is not None and entry.status is NodeStatus.STOPPING and not attach.running_round:
        incidents.refund_if_consequence(turn, entry)
    order = turn.record.switch
    if order is not None and member is not None and attach.running_round == turn.record.round:
        _go_on_to_boundary(turn, entry, order, attach.unbroken)
    elif attach.running_round and not (meant_to_run and attach.running_round == turn.record.round):
        order_stop(turn, entry, attach.running_round)
    elif attach.running_round:
        entry = turn.update(entry, status=NodeStatus.RUNNING, due_s=float("inf"), underway=attach.underway)
        planning.ask_again(turn, entry, attach.in_doubt)
        turn.saving = False  # with its earlier stream, the order to save or the report may be lost
        if attach.done:
            _done(turn, entry, attach.saving, attach.unsaved)
        elif not attach.underway:
            _replan_without_source(turn)
    elif meant_to_run and world is not None and attach.seen_round < world.round:
        entry = turn.update(entry, status=NodeStatus.RUNNING, due_s=float("inf"))
        _replan_without_source(turn)  # it may have been lost with the last Master
        if turn.record.phase is Phase.RUNNING:
            turn.tell(entry, StartRound(world, turn.record.reason))
    else:  # also a node that was leaving: its dismissal may have been lost, and it will report again that it leaves
        turn.update(entry, status=NodeStatus.WARMING, due_s=turn.now_s + turn.spec.timeouts.warming_s)
    missed = world is not None and turn.record.phase is Phase.RUNNING and 0 < attach.seen_round < world.round
    if turn.spec.independent and world is not None and missed and member is None:
        # Its workers continue to train unless they learn that they have no place in the world.
        turn.tell(turn.nodes[entry.info.node], StartRound(world, turn.record.reason))


def _go_on_to_boundary(turn: MasterTurn, entry: NodeEntry, order: Switch, unbroken: bool) -> None:
    """A member has attached whose workers are to be at an agreed step boundary. It may have missed the order: they have
    waited for it since they were asked for their newest commit. ``unbroken``: they have not been interrupted since."""
    if unbroken:
        order_switch(turn, entry, order)
    else:
        turn.update(entry, status=NodeStatus.STOPPING)
        interrupt(turn)


def _detached(turn: MasterTurn, event: NodeDetached) -> None:
    entry = turn.current(event.node, event.incarnation)
    if entry is None or not entry.attached:
        return
    entry = turn.update(entry, attached=False, due_s=min(entry.due_s, turn.now_s + turn.absence_s(entry.info)))
    if not entry.registered or (entry.status is NodeStatus.LEAVING and turn.record.phase is Phase.ENDED):
        del turn.nodes[event.node]
        _replan_without_source(turn)
        return
    turn.probe(entry)


def _refused(turn: MasterTurn, event: NodeRefused) -> None:
    entry = turn.current(event.node, event.incarnation)
    if entry is None or entry.attached:
        return
    turn.revoke(event.incarnation)
    _lost(turn, entry, "its launcher is gone (connection refused)")


def _expired(turn: MasterTurn, event: NodeExpired) -> None:
    entry = turn.current(event.node, event.incarnation)
    if entry is None:
        return
    leaving = entry.status is NodeStatus.LEAVING or away.has_left(turn, entry)
    if not leaving:
        checking.suspect(turn, entry.info, "it went silent")
    _lost(turn, entry, "left" if leaving else f"silent for {turn.lease_s(entry.info):g} s (lease ended)")


def _lost(turn: MasterTurn, entry: NodeEntry, how: str) -> None:
    """Remove a node that is proven gone, and replace the world if it was a member. ``how``: the proof, for messages."""
    node = entry.info.node
    turn.tell(entry, Expelled(f"{node}: {how}"))
    turn.dead |= {entry.info.incarnation}
    del turn.nodes[node]
    if entry.status is NodeStatus.LEAVING or away.has_left(turn, entry):  # the latter under an earlier Master
        _replan_without_source(turn)
        return
    away.remember(turn, node, entry.info.incarnation, since_s=turn.now_s)
    turn.note(Kind.NODE_LOST, f"node {node} lost: {how}", node)
    if turn.member(entry) is None or node in turn.finished:
        _replan_without_source(turn)
        return
    if turn.record.phase is Phase.RUNNING:
        stop_world(turn, f"node {node} lost: {how}")
    elif turn.record.phase is Phase.FORMING:
        incidents.refund(turn, f"node {node} lost: {how}")
        interrupt(turn)


def _replan_without_source(turn: MasterTurn) -> None:
    """Replace a world that has not begun to train if the last node with a part of its state is gone: its workers may
    never get that part."""
    world = turn.record.world
    if turn.record.phase is not Phase.RUNNING or world is None or turn.record.done or turn.underway:
        return
    there = {source.shard for source in world.sources if source.node in turn.nodes}
    gone = [source.node for source in world.sources if source.shard not in there]
    if gone:
        stop_world(turn, f"node {gone[0]}, which had the state, is gone")


# --- messages from agents --------------------------------------------------------------------------------------------


def _said(turn: MasterTurn, event: NodeSaid) -> None:
    entry = turn.current(event.node, event.incarnation)
    # Once the job has ended, only the outcome of its last checkpoint matters.
    if entry is None or (turn.record.phase is Phase.ENDED and not isinstance(event.message, Kept)):
        return
    handler: Callable[[MasterTurn, NodeEntry, Any], None] = MESSAGE_HANDLERS[type(event.message)]
    handler(turn, entry, event.message)


def _is_outdated(turn: MasterTurn, entry: NodeEntry, seen_round: Round) -> bool:
    """Whether a node sent its report before it received a start order for the current round, even if a stop order has
    followed."""
    ordered = entry.status in (NodeStatus.RUNNING, NodeStatus.STOPPING, NodeStatus.DONE)
    free = entry.orders.idle  # it has reported since, and is ending waiting workers
    behind = turn.member(entry) is not None and ordered and not free and seen_round < turn.record.round
    return behind or entry.status is NodeStatus.LEAVING


def _has_yet_to_read(entry: NodeEntry, ready: Ready) -> bool:
    """Whether a node sent its report before it received the order to read the state: the checkpoint is still neither in
    its memory nor refused. One that workers read themselves leaves no such trace."""
    reads_it = entry.status is NodeStatus.LOADING and not (ready.refused or ready.stored_sharded)
    there = any(holding.version == ready.stored for holding in ready.holdings)
    return reads_it and ready.stored == entry.stored and ready.stored != NO_STATE and not there


def _ready(turn: MasterTurn, entry: NodeEntry, ready: Ready) -> None:
    if _is_outdated(turn, entry, ready.seen_round) or _has_yet_to_read(entry, ready):
        return
    running_here = turn.record.phase is Phase.RUNNING and turn.member(entry) is not None
    newcomer = turn.member(entry) is None and entry.status in (NodeStatus.WARMING, NodeStatus.PREPARING)
    if ready.stored > entry.stored and not ready.refused:
        # The last Master may have been informed, and this node may leave.
        planning.lies_stored(turn, ready.stored, ready.stored_sharded)
    # It may not know of a newer checkpoint that another node has written. But a checkpoint that it has read and refused
    # cannot be used.
    has_read = entry.status is NodeStatus.LOADING or bool(ready.refused)
    stored, sharded = ready.stored, ready.stored_sharded
    if not has_read and entry.stored > stored:
        stored, sharded = entry.stored, entry.stored_sharded
    entry = turn.update(
        entry,
        status=NodeStatus.READY,
        ports=ready.ports,
        seen_round=ready.seen_round,
        due_s=float("inf"),
        report_due_s=0.0,
        parked=ready.parked,
        holdings=ready.holdings,
        stored=stored,
        stored_sharded=sharded,
        refused=ready.refused,
    )
    checking.ask_again(turn, entry)
    unchecked = turn.member(entry) is None and turn.must_be_checked(entry)
    if ready.stopped_itself:
        incidents.stopped_itself(turn, entry)
    if running_here:
        stop_world(turn, f"node {entry.info.node} has stopped its workers")
    elif turn.record.sizing.suspended:
        pass  # a suspended job keeps no waiting workers
    elif turn.record.rejoins and not (ready.parked or entry.orders.prestart or entry.draining):
        if not unchecked:  # otherwise once it has passed its check
            prestart(turn, entry)
    elif newcomer:
        waits = ", its workers wait" if ready.parked else ""
        text = f"node {entry.info.node} is ready with {count(entry.info.slots, 'slot')}{waits}"
        if away_for := away.returned(turn, entry):
            turn.note(Kind.NODE_RETURNED, f"{text}; it was away for {away_for}", entry.info.node)
        else:
            turn.note(Kind.NODE_JOINED, text, entry.info.node)


def _preparing(turn: MasterTurn, entry: NodeEntry, preparing: Preparing) -> None:
    if _is_outdated(turn, entry, preparing.seen_round):
        return
    running_here = turn.record.phase is Phase.RUNNING and turn.member(entry) is not None
    turn.update(
        entry,
        status=NodeStatus.PREPARING,
        restarted=True,
        orders=entry.orders._replace(prestart=True),
        seen_round=preparing.seen_round,
        due_s=turn.now_s + turn.spec.timeouts.warming_s,
        report_due_s=0.0,
        holdings=preparing.holdings,
    )
    if preparing.stopped_itself:
        incidents.stopped_itself(turn, entry)
    if running_here:
        stop_world(turn, f"node {entry.info.node} has stopped its workers")


def _workers_done(turn: MasterTurn, entry: NodeEntry, message: WorkersDone) -> None:
    if turn.record.phase is Phase.RUNNING and message.round == turn.record.round:
        _done(turn, entry, message.saving, message.unsaved)


def _done(turn: MasterTurn, entry: NodeEntry, saving: bool, unsaved: str) -> None:
    node, record = entry.info.node, turn.record
    if turn.member(entry) is None:
        return
    turn.update(entry, status=NodeStatus.DONE, finished=True)
    if node in turn.finished:
        return  # it has attached again, or to another Master
    others = tuple(one for one in record.saving if one != node)
    now_saving = (*others, node) if saving else others
    done = record.done if node in record.done else (*record.done, node)
    if (done, now_saving) != (record.done, record.saving):
        turn.write(done=done, saving=now_saving)
    if saving:
        turn.reason = f"all workers of node {node} have ended; it writes what they saved"
    if unsaved:
        _flawed(turn, Flawed(UNSAVED, f"node {node}: {unsaved}"))
    end_if_all_done(turn)


def _leaving(turn: MasterTurn, entry: NodeEntry, leaving: Leaving) -> None:
    """Handle a node that leaves: at once, or as soon as the others have a world without it."""
    if leaving.grace_s and planning.drain(turn, entry, leaving):
        return
    reason = leaving.reason
    node = entry.info.node
    turn.tell(entry, Dismissed("nothing to wait for", needed=resizing.is_missed(turn, entry)))
    known = entry.draining
    turn.update(entry, status=NodeStatus.LEAVING)
    away.remember(turn, node, entry.info.incarnation, since_s=turn.now_s)
    if not known:
        turn.note(Kind.NODE_LEAVING, f"node {node} leaves: {reason}", node)
    if turn.member(entry) is None or node in turn.finished:
        return
    if turn.record.phase is Phase.RUNNING:
        stop_world(turn, f"node {node} leaves: {reason}")
    else:
        interrupt(turn)
        incidents.refund_if_consequence(turn, entry, f"leaves: {reason}")


def _paced(turn: MasterTurn, entry: NodeEntry, message: Pace) -> None:
    straggling.measured(turn, entry, message)
    autoscaling.paced(turn, turn.nodes[entry.info.node], message)


def _asked(turn: MasterTurn, entry: NodeEntry, message: Asked) -> None:
    planning.asked(turn, message)


def _request_received(turn: MasterTurn, event: OperatorRequest) -> None:
    planning.asked(turn, event.asked)


def _scale_requested(turn: MasterTurn, event: ScaleRequested) -> None:
    resizing.handle_request(turn, event)


def _unfit(turn: MasterTurn, event: Unfit) -> None:
    if turn.record.phase is not Phase.ENDED:
        dropping.unfit(turn, event)


def _flawed(turn: MasterTurn, event: Flawed) -> None:
    if turn.record.phase is not Phase.ENDED:
        others = tuple(flaw for flaw in turn.record.flaws if flaw.name != event.name)
        turn.write(flaws=(*others, Flaw(event.name, event.text)) if event.text else others)


def _failed(turn: MasterTurn, event: Failed) -> None:
    if turn.record.phase is not Phase.ENDED:
        end_as_failed(turn, event.text)


def _tick(turn: MasterTurn, event: Tick) -> None:
    """Do nothing: ``_apply_rules`` checks all deadlines."""


EVENT_HANDLERS: dict[type, Callable[[MasterTurn, Any], None]] = {
    NodeRegistered: _registered,
    NodeAttached: _attached,
    NodeDetached: _detached,
    NodeRefused: _refused,
    NodeExpired: _expired,
    NodeSaid: _said,
    OperatorRequest: _request_received,
    ScaleRequested: _scale_requested,
    Unfit: _unfit,
    Flawed: _flawed,
    Failed: _failed,
    JobAlarms: alarms.watched,
    DenylistChanged: denylist.changed,
    Tick: _tick,
}
"""What handles each event. ``CONTRIBUTING.md`` lists it, with what has happened."""

MESSAGE_HANDLERS: dict[type, Callable[[MasterTurn, NodeEntry, Any], None]] = {
    Ready: _ready,
    Preparing: _preparing,
    Underway: planning.underway,
    Boundary: planning.answered,
    Kept: planning.kept,
    Asked: _asked,
    Pace: _paced,
    Hanging: incidents.hanging,
    HangLimit: incidents.hang_limit,
    WorkerFailed: incidents.worker_failed,
    WorkersDone: _workers_done,
    NotKept: planning.not_kept,
    NotLogged: planning.not_kept,
    Alarms: alarms.reported,
    HealthChecked: checking.reported,
    Leaving: _leaving,
}
"""What handles each message in ``NodeSaid``."""
