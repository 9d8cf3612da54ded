"""Replaces one world by the next: stops the old one, waits for the living nodes, and forms the new one.

Only the first world waits a fixed time, ``--join-grace``, for more nodes than the minimum. Otherwise a world forms in
the step in which the last awaited node becomes ready or is proven dead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edl.exit_codes import ExitCode
from edl.master import away, checking, denylist, dropping, hyper
from edl.master.awaiting import awaited, deadline_s
from edl.master.events import Kind
from edl.master.resting import rest
from edl.master.restoring import Load, Restore, Unusable, choose
from edl.master.state import NodeEntry, NodeStatus, Phase
from edl.master.turn import MasterTurn
from edl.rendezvous.phrases import count, duration, listed
from edl.rendezvous.ranks import order
from edl.rendezvous.rules import NextSize
from edl.types import NodeId, Rank, Round
from edl.wire.messages import Finish, LoadState, Prestart, StartRound, StopRound, Switch
from edl.wire.records import Member, NodeInfo, World

UNSAVED = "checkpoint"
"""Name of the flaw of a job whose last requested checkpoint could not be written."""

FIRST_PAUSE_S = 0.5
"""Pause in seconds after the second world in a row that fails at once; each further pause is twice as long."""

QUICK_S = 5.0
"""A world whose workers fail within this many seconds counts as failed at once."""

FAREWELL_S = 5.0
"""Seconds that a Master stays after the end of the job for agents that do not know the outcome yet."""


def stop_world(turn: MasterTurn, reason: str, dump: bool = False) -> None:
    """Stop the running world; the next one forms as soon as all living members have stopped. ``dump``: members write
    the stacks of their workers first."""
    turn.write(phase=Phase.FORMING, reason=reason, done=(), saving=(), switch=None)
    if reason != turn.reason:  # else the same text has just been noted
        turn.note(Kind.WORLD_STOPPED, reason)
    _begin_forming(turn)
    stateless = not any(entry.underway for entry in turn.members())  # as far as they have reported
    for entry in turn.members():
        if entry.status in (NodeStatus.RUNNING, NodeStatus.DONE):
            order_stop(turn, entry, turn.record.round, dump)
    (_ask_spares if stateless else _ask_copy_holders)(turn)


def _begin_forming(turn: MasterTurn) -> None:
    turn.forming_since_s = turn.now_s
    turn.grace_until_s = None
    turn.agreement = None
    turn.planned = turn.at_boundary
    turn.trained_s = turn.now_s - turn.formed_at_s if turn.formed_at_s else 0.0
    if turn.trained_s >= QUICK_S:
        turn.quick = 0
    for entry in turn.members():
        turn.update(entry, restarted=False, orders=entry.orders._replace(load=False, prestart=False))


def _ask_copy_holders(turn: MasterTurn) -> None:
    """Ask spares to report the copies that they hold, if the world has one node: if that node is lost, so is the
    information about its copies."""
    world = turn.record.world
    if world is not None and len(world.members) == 1:
        _ask_spares(turn)


def _ask_spares(turn: MasterTurn) -> None:
    if turn.record.world is None or not turn.record.rejoins:
        return
    for entry in turn.ready():
        if turn.member(entry) is None:
            order_stop(turn, entry, turn.record.round)


def switch_world(turn: MasterTurn, order: Switch) -> None:
    """Begin a planned change to the next world: all members train up to a step boundary and park."""
    turn.write(phase=Phase.FORMING, reason=order.reason, done=(), saving=(), switch=order)
    turn.note(Kind.BOUNDARY, order.reason)
    _begin_forming(turn)
    for entry in turn.members():
        order_switch(turn, entry, order)


def order_switch(turn: MasterTurn, entry: NodeEntry, order: Switch) -> None:
    """Let a member train up to the step boundary; also one that has reconnected, which may have missed the order."""
    due_s = turn.now_s + turn.spec.timeouts.boundary_s + turn.spec.timeouts.rejoin_s + turn.absence_s(entry.info)
    turn.tell(turn.update(entry, status=NodeStatus.STOPPING, due_s=due_s, underway=False), order)


def interrupt(turn: MasterTurn) -> None:
    """Turn a planned change into an interruption: members that have not reached the step boundary stop at once."""
    if turn.at_boundary:
        turn.planned = False
        turn.write(switch=None)
        for entry in turn.members():
            if entry.status is NodeStatus.STOPPING:
                order_stop(turn, entry, turn.record.round)
        _ask_copy_holders(turn)


def order_stop(turn: MasterTurn, entry: NodeEntry, running: Round, dump: bool = False) -> None:
    """Order a node to stop its workers of round ``running``. Other nodes wait for it only for a limited time."""
    absence_s = turn.absence_s(entry.info)
    if entry.attached:
        absence_s += turn.spec.timeouts.shutdown_s + (turn.spec.timeouts.rejoin_s if turn.record.rejoins else 0)
    entry = turn.update(entry, status=NodeStatus.STOPPING, due_s=turn.now_s + absence_s, underway=False)
    turn.tell(entry, StopRound(running, turn.record.reason, dump))


def try_to_form(turn: MasterTurn) -> None:
    """Form the next world if possible, or end the job if it cannot continue. Otherwise set the reason for waiting, and
    request a tick."""
    not_ready = awaited(turn)
    if not_ready:
        turn.reason = f"{turn.record.reason}; waiting for {names(not_ready)}"
        turn.wake_at(min(deadline_s(turn, entry) for entry in not_ready))
        return
    final = next((failure for failure in turn.record.failures if failure.final), None)
    if final is not None:
        _end(turn, final.final, f"{turn.record.reason}; starting again would not help")
        return
    if turn.record.restarts > turn.spec.max_restarts:
        _end_for_failures(turn)
        return
    if turn.record.kill:
        _end(turn, ExitCode.KILLED, f"stopped by {turn.record.kill}")
        return
    if turn.record.sizing.suspended:
        rest(turn)
        return
    dropping.judge(turn)
    ready, unchecked = turn.ready(), turn.unchecked()
    previous = turn.record.world.members if turn.record.world else ()
    size = turn.next_size(len(ready) + len(unchecked))
    if size.nodes == 0:
        ready += turn.staying()
        size = turn.next_size(len(ready) + len(unchecked))
    if size.nodes == 0:
        away.dismiss(turn, "too few nodes are left for a world without this one", needed=True)
        _wait_for_nodes(turn, size.reason + kept_out(turn))
    elif turn.now_s < turn.forming_since_s + pause_s(turn):
        turn.reason = f"{turn.record.reason}; the last {turn.quick} worlds failed at once: pausing before the next one"
        turn.wake_at(turn.forming_since_s + pause_s(turn))
    elif not _grace_is_over(turn, size.nodes):
        turn.reason = f"{size.reason}; giving others {turn.spec.timeouts.join_grace_s:g} s to join the first world"
    elif not checking.holds_up(turn, unchecked, turn.next_size(len(ready)).nodes):
        checking.abandon(turn)
        size = turn.next_size(len(ready))
        why = NextSize(size.nodes, "; ".join([size.reason, *dropping.drops_since_last_world(turn)]))
        _form_with_state(turn, ready, [member.node for member in previous], why)


def pause_s(turn: MasterTurn) -> float:
    """Seconds to wait before the next world if workers keep failing as soon as they run, because the cause may be
    temporary. 0 after the first such failure, which may be chance, and for independent workers, whose failures say
    nothing about the next world."""
    if turn.quick < 2 or turn.spec.independent:
        return 0.0
    return min(FIRST_PAUSE_S * 2.0 ** (turn.quick - 2), turn.spec.timeouts.restart_s)


def kept_out(turn: MasterTurn) -> str:
    """Which nodes are there and may not take part, and why; each with a comma before it. Empty: none."""
    cordoned = [entry for entry in turn.free() if turn.record.sizing.excludes(entry.info.node)]
    faulty = [entry for entry in turn.free() if turn.known_health.is_kept_out(entry.info)]
    denied = [entry for entry in turn.free() if denylist.isolated(turn, entry.info)]
    text = f", {names(cordoned)} cordoned (edl uncordon)" if cordoned else ""
    text += f", {names(faulty)} kept out by the health check" if faulty else ""
    return text + (f", {names(denied)} on the denylist (edl denylist)" if denied else "")


def _form_with_state(turn: MasterTurn, ready: Sequence[NodeEntry], previous: Sequence[NodeId], size: NextSize) -> None:
    """Choose members and state of the next world, and form it; or have a node load the state first; or end the job if
    no checkpoint can be used."""
    entries = {entry.info.node: entry for entry in ready}
    candidates = [dropping.candidate(turn, entry) for entry in ready]
    target = turn.record.sizing.target(turn.spec.nodes)
    givers = [entry for entry in turn.nodes.values() if entry.attached]

    chosen = order(previous, candidates, size.nodes, target, turn.spec.replicas.nodes)
    members = [entries[node] for node in chosen]
    match choose(members, givers):
        case Restore() as restore:
            _form(turn, members, restore, size.reason)
        case Load(node):
            due_s = turn.now_s + turn.spec.timeouts.loading_s
            entry = turn.ordered(turn.update(entries[node], status=NodeStatus.LOADING, due_s=due_s), load=True)
            turn.tell(entry, LoadState("no node has the state in memory"))
            turn.reason = f"{turn.record.reason}; {node} reads the state from the checkpoint directory"
            turn.wake_at(entry.due_s)
        case Unusable(why):
            _end(turn, ExitCode.CHECKPOINT_UNUSABLE, why)


def end_if_all_done(turn: MasterTurn) -> None:
    """End the job with success once all members' workers have exited with status 0 and their saves are written. With a
    flaw, such as a save that could not be written, the exit status is ``INCOMPLETE``."""
    world = turn.record.world
    if world is not None and turn.finished >= {member.node for member in world.members}:
        who = f"all {world.size} workers" if world.size > 1 else "the only worker"
        reason = f"{who} of round {world.round} ended with status 0"
        if turn.record.flaws:
            _end(turn, ExitCode.INCOMPLETE, "; ".join([reason, *(flaw.text for flaw in turn.record.flaws)]))
        else:
            _end(turn, ExitCode.OK, "; ".join([reason, *dropping.left_out(turn)]))


def end_as_failed(turn: MasterTurn, reason: str) -> None:
    """End the job as failed, for a failure that no restart repairs; agents stop their workers."""
    _end(turn, ExitCode.WORKER_FAILED, reason)


def conclude_once_left(turn: MasterTurn) -> None:
    """After the end of the job, let the Master exit once all nodes have left, or after ``FAREWELL_S``."""
    ended_at_s = turn.now_s if turn.ended_at_s is None else turn.ended_at_s
    turn.ended_at_s = ended_at_s
    if not turn.nodes or turn.now_s >= ended_at_s + FAREWELL_S:
        turn.conclude()
    else:
        turn.wake_at(ended_at_s + FAREWELL_S)


def tell_outcome(turn: MasterTurn, entry: NodeEntry, outcome: Finish) -> None:
    """Send the job's outcome to an attached node, which is removed when its stream ends."""
    turn.tell(turn.update(entry, status=NodeStatus.LEAVING), outcome)


def _end_for_failures(turn: MasterTurn) -> None:
    """End the job, because the restart budget is used up. If all failures only report lost peers, first wait for
    members that have not reported since, one of which may be the cause, up to ``--recover-timeout``."""
    unheard = [e for e in turn.nodes.values() if e.status is NodeStatus.STOPPING and turn.member(e) is not None]
    deadline_s = turn.forming_since_s + turn.spec.timeouts.recover_s
    if unheard and turn.now_s < deadline_s and all(failure.peer_loss for failure in turn.record.failures):
        turn.reason = f"{turn.record.reason}; waiting for a report from {names(unheard)}, which may be the cause"
        turn.wake_at(deadline_s)
        return
    budget = turn.spec.max_restarts
    used = "the only restart is used" if budget == 1 else f"all {budget} restarts are used"
    spent = f"{used} (--max-restarts={budget})" if budget else "--max-restarts=0"
    _end(turn, ExitCode.WORKER_FAILED, f"{turn.record.reason}; {spent}")


def _grace_is_over(turn: MasterTurn, size: int) -> bool:
    """Whether the first world has waited long enough for more nodes. Later worlds, and one of the wanted size, do not
    wait."""
    if turn.record.world is not None or size == turn.record.sizing.target(turn.spec.nodes):
        return True
    if turn.grace_until_s is None:
        turn.grace_until_s = turn.now_s + turn.spec.timeouts.join_grace_s
    if turn.now_s >= turn.grace_until_s:
        return True
    turn.wake_at(turn.grace_until_s)
    return False


def _wait_for_nodes(turn: MasterTurn, missing: str) -> None:
    limit = turn.spec.timeouts.recover_s
    deadline_s = turn.forming_since_s + limit
    turn.grace_until_s = None
    if turn.now_s >= deadline_s:
        waited = f"{missing} for {limit:g} s (--recover-timeout={limit:g})"
        _end(turn, ExitCode.NOT_ENOUGH_NODES, f"{waited}; {turn.record.reason}")
        return
    end = f"; without them the job ends after {duration(limit)} (--recover-timeout)" if math.isfinite(limit) else ""
    reason = f"{turn.record.reason}; {missing}{end}"
    if reason != turn.reason:
        turn.note(Kind.WAITING, reason)
    turn.wake_at(deadline_s)


def _form(turn: MasterTurn, entries: Sequence[NodeEntry], restore: Restore, why: str) -> None:
    members: list[Member] = []
    rank = 0
    for entry in entries:
        info, places = entry.info, turn.places(entry)
        members.append(
            Member(
                node=info.node,
                incarnation=info.incarnation,
                host=info.host,
                slots=len(places),
                first_rank=Rank(rank),
                ports=entry.ports,
                places=_said(info, places),
                role=info.role,
            )
        )
        rank += len(places)
    era = max(turn.record.era, restore.version.era) + 1
    settings = hyper.adopt(turn, rank, restore.version.commit)
    world = World(
        Round(turn.record.round + 1),
        tuple(members),
        turn.record.restarts,
        era=era,
        restore=restore.version,
        shards=restore.shards,
        stored=restore.stored,
        sources=restore.sources,
        settings=settings,
    )
    _note_state(turn, restore)
    turn.write(phase=Phase.RUNNING, round=world.round, world=world, done=(), charged=False, reason=why, era=era)
    turn.write(
        judged=False, saving=(), switch=None, flaws=tuple(one for one in turn.record.flaws if one.name != UNSAVED)
    )
    away.forget(turn, {member.node for member in members})
    turn.note(Kind.WORLD_FORMED, f"round {world.round}: {count(len(members))}, {count(world.size, 'worker')} ({why})")
    turn.grace_until_s = None
    turn.formed_at_s = turn.now_s
    for entry in entries:
        fresh = {"underway": False, "finished": False, "restarted": False}
        entry = turn.update(entry, status=NodeStatus.RUNNING, due_s=float("inf"), **fresh)
        orders = entry.orders._replace(idle=False, prestart=False)
        entry = turn.update(entry, uses=turn.places(entry), orders=orders)
        turn.tell(entry, StartRound(world, turn.reason))
    if turn.spec.independent:
        # Workers that were not stopped must learn that their node is not in this world.
        for entry in turn.free():
            turn.tell(entry, StartRound(world, turn.reason))
    for entry in turn.free():
        if entry.orders.idle:
            prestart(turn, entry)


def _said(info: NodeInfo, places: tuple[int, ...]) -> tuple[int, ...]:
    """``Member.places`` for these slots: empty for the first ones, which are the default."""
    return () if places == tuple(range(info.slots)) else places


def prestart(turn: MasterTurn, entry: NodeEntry) -> None:
    """Order a node outside the world to start workers ahead of the next one, if this job's workers can rejoin."""
    entry = turn.ordered(entry, idle=False)
    if turn.record.rejoins and not entry.parked:
        due_s = turn.now_s + turn.spec.timeouts.warming_s
        entry = turn.update(entry, status=NodeStatus.PREPARING, restarted=True, due_s=due_s)
        entry = turn.ordered(entry, prestart=True)
        turn.tell(entry, Prestart("workers of this job wait for their world"))


def _note_state(turn: MasterTurn, restore: Restore) -> None:
    """Record the commit of the next world, with a line in the history if it is older than that of an earlier world."""
    lost = turn.record.newest
    if restore.version < lost:
        begins = f"from commit {restore.version.commit}" if restore.version.commit else "from scratch"
        turn.note(Kind.STATE, f"commit {lost.commit} is lost on all nodes: the next world begins {begins}")
    turn.write(newest=restore.version)


_SEVERITIES: dict[int, str] = {ExitCode.OK: "info", ExitCode.KILLED: "info", ExitCode.INCOMPLETE: "warning"}
"""Severity of the job's end by exit code; of others: critical."""


def _end(turn: MasterTurn, code: int, reason: str) -> None:
    root_first = tuple(sorted(turn.record.failures, key=lambda failure: failure.peer_loss))
    outcome = Finish(int(code), reason, () if code in (ExitCode.OK, ExitCode.KILLED) else root_first)
    turn.write(phase=Phase.ENDED, outcome=outcome, reason=reason, switch=None)
    turn.note(Kind.JOB_ENDED, reason, severity=_SEVERITIES.get(code, "critical"))
    for entry in list(turn.nodes.values()):
        if entry.attached:
            tell_outcome(turn, entry, outcome)
    conclude_once_left(turn)


def names(entries: Sequence[NodeEntry]) -> str:
    """The names of nodes for messages; of many only some, and the number of the others."""
    return listed([entry.info.node for entry in entries])
