"""Step boundaries, as the Master agrees on them with the workers of this node."""

from __future__ import annotations

from edl.agent.machine import rounds
from edl.agent.machine.events import TellWorkers
from edl.agent.machine.state import AgentPhase, Leave, Worker, WorkerStatus
from edl.agent.machine.turn import AgentTurn
from edl.wire import local
from edl.wire.messages import Boundary, Hold, Switch
from edl.wire.purpose import Purpose


def hold(turn: AgentTurn, order: Hold) -> None:
    """Ask all workers for their newest commit, and keep them from passing their next step boundary."""
    if order.round != turn.state.running_round or not turn.state.underway:
        return  # the Master stops waiting after a while, and interrupts
    turn.set(hold=order.hold, binding=order.binding, doubt_by_s=None)
    for worker in turn.state.in_world:
        turn.set_worker(worker.slot, here=None)
    ranks = tuple(worker.slot for worker in turn.state.in_world)
    turn.do(TellWorkers(local.HoldAtBoundary(int(order.round), order.hold), ranks))


def here(turn: AgentTurn, worker: Worker, number: int, commit: int) -> None:
    """Note a worker's answer to ``HoldAtBoundary``; after the last one, tell the Master."""
    state = turn.state
    if number != state.hold or worker.status is not WorkerStatus.ALIVE:
        return
    turn.set_worker(worker.slot, here=commit)
    answers = [other.here for other in turn.state.in_world]
    known = [answer for answer in answers if answer is not None]
    if len(known) == len(answers):
        turn.say(Boundary(state.running_round, number, max(known)))


def switch(turn: AgentTurn, order: Switch) -> None:
    """The step boundary is agreed: let the workers train up to it. Commit 0 means that there is none."""
    state = turn.state
    if order.round != state.running_round or state.phase is not AgentPhase.RUNNING:
        return
    if order.purpose is Purpose.SET:
        _set(turn, order)
        return
    if order.hold != state.hold:
        return
    if not order.commit:
        release(turn)
        return
    ranks = tuple(worker.slot for worker in state.in_world)
    turn.do(TellWorkers(local.Target(order.hold, order.commit, order.purpose.value, order.reason), ranks))
    turn.unhold()
    if order.purpose is not Purpose.SAVE:
        turn.log(order.reason)  # it names the commit
        turn.set(phase=AgentPhase.STOPPING, leave=Leave.AT_BOUNDARY)
        turn.set(park_by_s=turn.now_s + state.timeouts.boundary_s)
        rounds.rest_if_free(turn)


def _set(turn: AgentTurn, order: Switch) -> None:
    """Tell the workers the commit from which new settings hold."""
    state = turn.state
    ranks = tuple(worker.slot for worker in state.in_world)
    target = local.Target(state.hold, order.commit, order.purpose.value, order.reason, order.settings)
    turn.do(TellWorkers(target, ranks))
    turn.unhold()


def lose_master(turn: AgentTurn) -> None:
    """The Master that held the workers is lost: release them, unless a boundary may already have been agreed."""
    if turn.state.in_doubt:
        turn.set(doubt_by_s=turn.now_s + turn.state.timeouts.boundary_s)
    else:
        release(turn)


def release(turn: AgentTurn) -> None:
    """The agreement was abandoned: let the workers continue."""
    if turn.state.hold:
        ranks = tuple(worker.slot for worker in turn.state.in_world)
        turn.do(TellWorkers(local.Release(turn.state.hold), ranks))
        turn.unhold()
