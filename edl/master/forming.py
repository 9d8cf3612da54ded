"""From one world to the next: stop the old one, wait for those known to be alive, form the new one.

There is no fixed wait. A world forms in the turn in which the last node that others must wait for says that it is
ready, or turns out to be dead.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl.config import FaultTolerance
from edl.exit_codes import ExitCode
from edl.master.events import Kind
from edl.master.state import NodeEntry, NodeStatus, Phase
from edl.master.turn import Turn
from edl.rendezvous.ranks import Candidate, order
from edl.rendezvous.rules import count, next_size
from edl.types import NodeId, Rank, Round
from edl.wire.messages import Finish, Member, StartRound, StopRound, World

WARMING_PATIENCE_S = 120.0
"""How long the first world waits for an attached node that still imports its framework."""

FAREWELL_S = 5.0
"""How long an ended Master stays for agents that have not heard the outcome yet."""


def stop_world(turn: Turn, reason: str) -> None:
    """Begin the change to the next world. The next one forms as soon as every living member has stopped."""
    turn.write(phase=Phase.FORMING, reason=reason, done=())
    if reason != turn.reason:  # else what led to it has just been noted in the same words
        turn.note(Kind.WORLD_STOPPED, reason)
    turn.forming_since_s = turn.now_s
    turn.grace_until_s = None
    for entry in list(turn.nodes.values()):
        if turn.member(entry) is not None and entry.status in (NodeStatus.RUNNING, NodeStatus.DONE):
            order_stop(turn, entry, turn.record.round)


def order_stop(turn: Turn, entry: NodeEntry, running: Round) -> None:
    """Have a node stop its workers; others wait for it only so long."""
    patience_s = turn.spec.timeouts.shutdown_s + turn.patience_s if entry.attached else turn.patience_s
    entry = turn.update(entry, status=NodeStatus.STOPPING, due_s=turn.now_s + patience_s)
    turn.tell(entry, StopRound(running, turn.record.reason))


def try_to_form(turn: Turn) -> None:
    """Form the next world if nothing stands against it; else say what does, and when to look again."""
    awaited = _awaited(turn)
    if awaited:
        turn.reason = f"{turn.record.reason}; waiting for {_names(awaited)}"
        turn.wake_at(min(entry.due_s for entry in awaited))
        return
    if turn.record.restarts > turn.spec.max_restarts:
        _end_for_failures(turn)
        return
    ready = turn.ready()
    previous = turn.record.world.members if turn.record.world else ()
    size = next_size(turn.spec.nodes, turn.spec.fault_tolerance, len(previous), len(ready))
    if size.nodes == 0:
        _wait_for_nodes(turn, size.reason)
    elif not _grace_is_over(turn, size.nodes):
        turn.reason = f"{size.reason}; giving others {turn.spec.timeouts.join_grace_s:g} s to join the first world"
    else:
        _form(turn, ready, [member.node for member in previous], size.nodes, size.reason)


def consider_growth(turn: Turn) -> None:
    """Replace the running world by a larger one when ready newcomers allow it."""
    world = turn.record.world
    if world is None or turn.record.done or turn.spec.fault_tolerance is not FaultTolerance.ELASTIC:
        return
    newcomers = [entry for entry in turn.ready() if turn.member(entry) is None]
    size = turn.spec.nodes.fit(len(world.members) + len(newcomers))
    if not newcomers or size <= len(world.members):
        turn.grace_until_s = None
        return
    warming = any(e.attached and e.registered and e.status is NodeStatus.WARMING for e in turn.nodes.values())
    if warming and size < turn.spec.nodes.highest:
        if turn.grace_until_s is None:
            turn.grace_until_s = turn.now_s + turn.spec.timeouts.join_grace_s
        if turn.now_s < turn.grace_until_s:
            turn.wake_at(turn.grace_until_s)
            return
    stop_world(turn, f"{_names(newcomers)} joined: growing from {len(world.members)} to {size} nodes")
    try_to_form(turn)


def end_if_all_done(turn: Turn) -> None:
    """End the job with success once every member's workers have ended with status 0."""
    world = turn.record.world
    if world is not None and set(turn.record.done) >= {member.node for member in world.members}:
        _end(turn, ExitCode.OK, f"all {world.size} workers of round {world.round} ended with status 0")


def say_goodbye(turn: Turn) -> None:
    """After the end: go once every agent has heard of it and gone, or after a while."""
    ended_at_s = turn.now_s if turn.ended_at_s is None else turn.ended_at_s
    turn.ended_at_s = ended_at_s
    if not turn.nodes or turn.now_s >= ended_at_s + FAREWELL_S:
        turn.conclude()
    else:
        turn.wake_at(ended_at_s + FAREWELL_S)


def tell_outcome(turn: Turn, entry: NodeEntry, outcome: Finish) -> None:
    """Tell an attached node that the job is over; it is gone when its stream ends."""
    turn.tell(turn.update(entry, status=NodeStatus.LEAVING), outcome)


def _awaited(turn: Turn) -> list[NodeEntry]:
    """Living nodes that are not ready yet and for whom it is still worth waiting."""
    first = turn.record.world is None
    awaited = []
    for entry in turn.nodes.values():
        if not entry.registered or turn.now_s >= entry.due_s:
            continue
        stopping = entry.status is NodeStatus.STOPPING
        silent_member = entry.status is NodeStatus.READY and not entry.attached and turn.member(entry) is not None
        warming = entry.status is NodeStatus.WARMING and (first or turn.member(entry) is not None)
        if stopping or silent_member or warming:
            awaited.append(entry)
    return awaited


def _end_for_failures(turn: Turn) -> None:
    """The budget is spent. A member nobody has heard of since may be the cause of failures that only tell of lost
    peers: time alone does not prove otherwise, least of all after the Master has waited for the store."""
    unheard = [e for e in turn.nodes.values() if e.status is NodeStatus.STOPPING and turn.member(e) is not None]
    deadline_s = turn.forming_since_s + turn.spec.timeouts.recover_s
    if unheard and turn.now_s < deadline_s and all(failure.peer_loss for failure in turn.record.failures):
        turn.reason = f"{turn.record.reason}; waiting for word from {_names(unheard)}, which may be the cause"
        turn.wake_at(deadline_s)
        return
    budget = turn.spec.max_restarts
    spent = f"all {budget} restarts are used (--max-restarts={budget})" if budget else "--max-restarts=0"
    _end(turn, ExitCode.WORKER_FAILED, f"{turn.record.reason}; {spent}")


def _grace_is_over(turn: Turn, size: int) -> bool:
    """Only the very first world waits for more nodes than it needs, and only while it is below the maximum."""
    if turn.record.world is not None or size == turn.spec.nodes.highest:
        return True
    if turn.grace_until_s is None:
        turn.grace_until_s = turn.now_s + turn.spec.timeouts.join_grace_s
    if turn.now_s >= turn.grace_until_s:
        return True
    turn.wake_at(turn.grace_until_s)
    return False


def _wait_for_nodes(turn: Turn, missing: str) -> None:
    deadline_s = turn.forming_since_s + turn.spec.timeouts.recover_s
    turn.grace_until_s = None
    if turn.now_s >= deadline_s:
        limit = turn.spec.timeouts.recover_s
        waited = f"{missing} for {limit:g} s (--recover-timeout={limit:g})"
        _end(turn, ExitCode.NOT_ENOUGH_NODES, f"{waited}; {turn.record.reason}")
        return
    reason = f"{turn.record.reason}; {missing}"
    if reason != turn.reason:
        turn.note(Kind.WAITING, reason)
    turn.wake_at(deadline_s)


def _form(turn: Turn, ready: Sequence[NodeEntry], previous: Sequence[NodeId], size: int, why: str) -> None:
    entries = {entry.info.node: entry for entry in ready}
    candidates = [Candidate(e.info.node, e.joined, e.info.node_rank) for e in ready]
    members: list[Member] = []
    rank = 0
    for node in order(previous, candidates, size):
        info = entries[node].info
        members.append(Member(node, info.incarnation, info.host, info.slots, Rank(rank), entries[node].ports))
        rank += info.slots
    world = World(Round(turn.record.round + 1), tuple(members), turn.record.restarts)
    turn.write(phase=Phase.RUNNING, round=world.round, world=world, done=(), charged=False, reason=why)
    turn.note(Kind.WORLD_FORMED, f"round {world.round}: {count(len(members))}, {count(world.size, 'worker')} ({why})")
    turn.grace_until_s = None
    for member in members:
        entry = turn.update(entries[member.node], status=NodeStatus.RUNNING, due_s=float("inf"))
        turn.tell(entry, StartRound(world, turn.reason))


def _end(turn: Turn, code: ExitCode, reason: str) -> None:
    root_first = tuple(sorted(turn.record.failures, key=lambda failure: failure.peer_loss))
    outcome = Finish(int(code), reason, () if code is ExitCode.OK else root_first)
    turn.write(phase=Phase.ENDED, outcome=outcome, reason=reason)
    turn.note(Kind.JOB_ENDED, reason)
    for entry in list(turn.nodes.values()):
        if entry.attached:
            tell_outcome(turn, entry, outcome)
    say_goodbye(turn)


def _names(entries: Sequence[NodeEntry], limit: int = 5) -> str:
    names = [str(entry.info.node) for entry in entries[:limit]]
    more = len(entries) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
