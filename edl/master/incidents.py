"""What the Master does when workers fail or hang: it charges the restart budget once, and stops the world.

A worker that loses its peer often ends before that peer's own end is reported. A failure that only reports a lost peer
is therefore held for a while before the world is stopped: the stop order could otherwise reach the peer while it is
exiting, and the cause would be recorded nowhere.
"""

from __future__ import annotations

from edl.master import alarms, checking
from edl.master.events import Kind
from edl.master.forming import QUICK_S, interrupt, stop_world
from edl.master.state import NodeEntry, Phase
from edl.master.turn import MasterTurn
from edl.rendezvous.phrases import listed
from edl.wire.messages import Hanging, HangLimit, WorkerFailed
from edl.wire.records import Failure

CAUSE_WAIT_S = 1.0
"""How long a lost peer's own end is waited for. A process closes its connections at the start of its exit, and ends
when its libraries and devices are shut down."""

LIFELESS_S = 40.0
"""How long a report counts that no worker of a node shows a sign of life. It is repeated every 10 s."""

MAX_FAILURES_KEPT = 12
"""Number of failures kept per incident, so that they fit into one value of the store."""


def worker_failed(turn: MasterTurn, entry: NodeEntry, message: WorkerFailed) -> None:
    """Handle a report of a failed worker. An agent repeats it when it attaches again."""
    failure = message.failure
    known = failure in turn.held or failure in turn.record.failures
    if failure.round != turn.record.round or turn.member(entry) is None or known:
        return
    checking.look_at_failure(turn, entry, failure)
    if turn.record.phase is Phase.FORMING:
        _add(turn, failure, planned_for_it=entry.draining)
        return
    turn.held = (*turn.held, failure)
    if len(turn.held) == 1:
        turn.held_until_s = turn.now_s + CAUSE_WAIT_S


def look_for_cause(turn: MasterTurn) -> None:
    """Stop the running world for the failures that are held, once their cause is among them or cannot be waited for."""
    if not turn.held:
        return
    unknown = all(failure.peer_loss for failure in turn.held)
    if unknown and turn.now_s < turn.held_until_s and _others_run(turn):
        turn.wake_at(turn.held_until_s)
        return
    failures, turn.held = turn.held, ()
    first = next((failure for failure in failures if not failure.peer_loss), failures[0])
    if turn.now_s - turn.formed_at_s < QUICK_S:
        turn.quick += 1
    _note_others(turn, [failure for failure in failures if failure is not first])
    _charge(turn, _describe(first), first.node, failures)


def add_held(turn: MasterTurn) -> None:
    """Add the failures that are held to the incident for which the world is being stopped."""
    held, turn.held = turn.held, ()
    for failure in held:
        _add(turn, failure)


def hanging(turn: MasterTurn, entry: NodeEntry, message: Hanging) -> None:
    """Stop the world, because workers of a node make no progress. If the limit was learnt, nobody has asked for that:
    then only if no worker of any node shows a sign of life."""
    if turn.record.phase is not Phase.RUNNING or message.round != turn.record.round or turn.member(entry) is None:
        return
    node, what, workers = entry.info.node, f"{message.what} on {entry.info.node}", message.workers
    if message.learnt:
        turn.update(entry, lifeless=message, lifeless_s=turn.now_s)
        everywhere = _lifeless_everywhere(turn)
        if not everywhere:
            return
        alarms.settle(turn)  # in the history, the suspicion comes before what is done about it
        others = len(everywhere) - 1
        what += f", and {others} other node{'' if others == 1 else 's'} without a sign of life" if others else ""
        workers = (*workers, *(worker for one in everywhere for worker in one.workers if worker.node != node))
    turn.quick = 0
    _charge(turn, what, node, workers, hang=True)


def hang_limit(turn: MasterTurn, entry: NodeEntry, message: HangLimit) -> None:
    """Handle a node's report of the limit that it has learnt, for the status."""
    turn.update(entry, hang_limit=message)


def _lifeless_everywhere(turn: MasterTurn) -> list[Hanging]:
    """The reports of all nodes of the running world with workers that these show no sign of life; empty if not all
    nodes report it."""
    world = turn.record.world
    found = []
    for member in world.members if world is not None else ():
        if member.node in turn.record.done:
            continue
        entry = turn.nodes.get(member.node)
        if entry is None or turn.member(entry) is None or entry.lifeless is None:
            return []
        if entry.lifeless.round != turn.record.round or turn.now_s - entry.lifeless_s > LIFELESS_S:
            return []
        found.append(entry.lifeless)
    return found


def _charge(turn: MasterTurn, what: str, node: str, failures: tuple[Failure, ...], hang: bool = False) -> None:
    """Charge a restart for an incident on this node, and stop the world; after a hang, with the workers' stacks."""
    used, budget = turn.record.restarts + 1, turn.spec.max_restarts
    what += f"; restart {used} of {budget}" if used <= budget else ""
    turn.write(restarts=used, charged=True, failures=_kept(failures))
    turn.note(Kind.WORKER_FAILED, what, node, severity="warning" if hang else "")
    stop_world(turn, what, hang)


def refund(turn: MasterTurn, reason: str) -> None:
    """Undo the charge for the current incident, which turned out to be caused by the loss of a node."""
    if turn.record.charged:
        turn.write(restarts=turn.record.restarts - 1, charged=False, reason=reason)


def refund_if_consequence(turn: MasterTurn, entry: NodeEntry, how: str = "had stopped its workers") -> None:
    """Undo the charge for the current incident if all its failures only report lost peers: a member has stopped its
    workers itself, and the failures are consequences of that."""
    consequence = all(failure.peer_loss for failure in turn.record.failures)
    if turn.record.phase is Phase.FORMING and consequence and turn.member(entry) is not None:
        refund(turn, f"node {entry.info.node} {how}")


def stopped_itself(turn: MasterTurn, entry: NodeEntry) -> None:
    """A node has killed its workers. If it is a member, the others cannot reach a step boundary."""
    if turn.member(entry) is not None:
        interrupt(turn)
        refund_if_consequence(turn, entry)


def _others_run(turn: MasterTurn) -> bool:
    """Whether a worker of the running world may not have ended yet."""
    world = turn.record.world
    members = world.members if world is not None else ()
    running = sum(member.slots for member in members if member.node not in turn.record.done)
    return not turn.spec.independent and len(turn.held) < running


def _add(turn: MasterTurn, failure: Failure, planned_for_it: bool = False) -> None:
    """Add a failure to an incident that has been charged, or to a planned change, which it turns into an incident.
    ``planned_for_it``: the change lets its node leave."""
    record = turn.record
    of_round = tuple(other for other in record.failures if other.round == failure.round)
    turn.write(failures=_kept((*of_round, failure)))
    if turn.at_boundary and not record.charged and not failure.peer_loss and not planned_for_it:
        # In a planned change, workers were still training up to a step boundary: not a consequence of the change.
        turn.write(restarts=record.restarts + 1, charged=True)
    turn.note(Kind.WORKER_FAILED, f"also {_describe(failure)}", failure.node)
    interrupt(turn)


def _note_others(turn: MasterTurn, others: list[Failure]) -> None:
    """Note failures beside the first; one entry for many consequences, which would fill the history."""
    for failure in others:
        if not failure.peer_loss:
            turn.note(Kind.WORKER_FAILED, f"also {_describe(failure)}", failure.node)
    lost = [failure for failure in others if failure.peer_loss]
    if len(lost) == 1:
        turn.note(Kind.WORKER_FAILED, f"{_describe(lost[0])} (it had lost a peer)", lost[0].node)
    elif lost:
        where = listed([f"{failure.rank} on {failure.node}" for failure in lost])
        turn.note(Kind.WORKER_FAILED, f"{len(lost)} workers ended that had lost a peer: {where}")


def _kept(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Limit the failures of an incident to ``MAX_FAILURES_KEPT``; consequences are left out first."""
    own_first = sorted(range(len(failures)), key=lambda index: failures[index].peer_loss)
    return tuple(failures[index] for index in sorted(own_first[:MAX_FAILURES_KEPT]))


def _describe(failure: Failure) -> str:
    cause = f": {failure.exception}" if failure.exception else ""
    return f"worker {failure.rank} on {failure.node} {failure.what}{cause}"
