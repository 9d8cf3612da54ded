"""The agent: a node's life as one pure function.

An agent starts and stops workers only on the Master's orders, with three exceptions for safety: its lease has ended; it
has had no contact with the store or the Master for longer than a lease (other nodes may have formed a world without
it); or a signal asked it to leave. If the launcher itself is frozen, the fork server stops the workers
(``edl.agent.entitlement``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from edl.agent.machine import boundaries, health, independent, leaving, rounds
from edl.agent.machine.deadlines import watch_deadlines
from edl.agent.machine.diagnosis import is_usage_error
from edl.agent.machine.events import (
    AlarmsChanged,
    Connected,
    Decision,
    Disconnected,
    Event,
    Fatal,
    ForkServerReady,
    HangLimitChanged,
    HealthProbed,
    Interrupted,
    KeepingChanged,
    LeaseGone,
    LeaseRenewed,
    LoadCheckpoint,
    LoggingChanged,
    MasterSaid,
    Noticed,
    Register,
    Registered,
    Report,
    SavesFlushed,
    SendCopies,
    SignalWorkers,
    StateChanged,
    Suspected,
    Tick,
    Warm,
    WorkerEnded,
    WorkerEntered,
    WorkerFroze,
    WorkerGaveUp,
    WorkerHere,
    WorkerParked,
    WorkerThawed,
    WorkerUnderway,
    Write,
)
from edl.agent.machine.state import AgentPhase, AgentState, Outcome, Worker, WorkerStatus
from edl.agent.machine.turn import SIGINT, SIGKILL, SIGTERM, AgentTurn
from edl.exit_codes import START_OVER, ExitCode
from edl.types import NodeId, Round
from edl.wire.health import CheckHealth
from edl.wire.messages import (
    Alarms,
    Depart,
    Dismissed,
    Expelled,
    Finish,
    Hold,
    Idle,
    KeepWith,
    Leaving,
    LoadState,
    NotKept,
    NotLogged,
    Prestart,
    StartRound,
    StopRound,
    Switch,
    UseSlots,
    WorkerFailed,
)
from edl.wire.process_events import ForkServerLost, WorkersStopped
from edl.wire.records import Failure, World


def begin(state: AgentState) -> Decision:
    """The first step: start the fork server."""
    return Decision(state, (Warm(),), "starting")


def step(state: AgentState, event: Event, now_s: float) -> Decision:
    """Handle one event. After ``OVER``, events are ignored."""
    if state.phase is AgentPhase.OVER:
        return Decision(state, (), state.reason)
    turn = AgentTurn(state, now_s)
    handler: Callable[[AgentTurn, Any], None] = _HANDLERS[type(event)]
    handler(turn, event)
    watch_deadlines(turn)
    return turn.decision()


# --- fork server, lease, Master ---------------------------------------------------------------------------------------


def _warmed(turn: AgentTurn, event: ForkServerReady) -> None:
    turn.set(warm=True)
    if turn.state.phase is AgentPhase.WARMING:
        rounds.get_ready(turn)


def _connected(turn: AgentTurn, event: Connected) -> None:
    turn.set(connected=True, contact_s=turn.now_s)
    if not turn.state.registered:
        return  # a stream belongs to one incarnation, and the new one is not registered yet
    turn.say(turn.state.attach())
    if turn.state.phase is AgentPhase.LEAVING:
        turn.say(Leaving(turn.state.reason))
        return
    _wait_to_leave(turn)
    for failure in turn.state.unsent:
        turn.say(WorkerFailed(failure))
    _tell_where(turn)


def _wait_to_leave(turn: AgentTurn) -> None:
    if turn.state.draining is not None and turn.state.drain_by_s is not None:
        turn.say(Leaving(turn.state.draining.reason, max(0.1, turn.state.drain_by_s - turn.now_s)))


def _tell_where(turn: AgentTurn) -> None:
    """Tell a Master what ``Attach`` does not contain."""
    if turn.state.not_kept:
        turn.say(NotKept(turn.state.not_kept))
    if turn.state.not_logged:
        turn.say(NotLogged(turn.state.not_logged))
    _tell_alarms(turn)
    if turn.state.hang_limit is not None:
        turn.say(turn.state.hang_limit)
    health.answer_again(turn)
    if turn.state.phase is AgentPhase.IDLE:
        turn.announce()
    elif turn.state.phase is AgentPhase.PREPARING:
        rounds.say_preparing(turn)
    elif turn.state.underway:
        rounds.say_underway(turn)


def _disconnected(turn: AgentTurn, event: Disconnected) -> None:
    if turn.state.connected:
        turn.set(connected=False, contact_s=turn.now_s)
        boundaries.lose_master(turn)
        if turn.state.word_by_s is not None:
            leaving.unheard(turn)


def _lease_renewed(turn: AgentTurn, event: LeaseRenewed) -> None:
    turn.set(contact_s=max(turn.state.contact_s, turn.now_s - event.age_s))


def _lease_gone(turn: AgentTurn, event: LeaseGone) -> None:
    turn.set(contact_s=turn.now_s)  # this answer came from the store
    _become_stranger(turn, "the lease of this node has ended")


def _registered(turn: AgentTurn, event: Registered) -> None:
    # A new incarnation starts from scratch: no Master will ask it about older rounds.
    turn.set(info=event.info, registered=True, contact_s=turn.now_s, seen_round=Round(0))
    turn.log(f"registered again as {event.info.node}")
    if turn.state.connected:
        turn.say(turn.state.attach())
        _wait_to_leave(turn)
        _tell_where(turn)


def _become_stranger(turn: AgentTurn, why: str) -> None:
    """Leave the current incarnation: the job may continue without this node, so no worker may survive."""
    if turn.state.registered and turn.state.phase is not AgentPhase.LEAVING:
        turn.set(registered=False, connected=False)
        turn.log(why + (": stopping the workers" if turn.state.alive else ""))
        rounds.break_off(turn)
        turn.do(Register())


# --- messages from the Master ----------------------------------------------------------------------------------------


def _heard(turn: AgentTurn, event: MasterSaid) -> None:
    turn.set(contact_s=turn.now_s)
    if turn.state.phase is AgentPhase.LEAVING and not isinstance(event.message, Dismissed):
        return
    match event.message:
        case StartRound(world=world, reason=reason):
            health.stop(turn)
            (independent if turn.state.independent else rounds).start(turn, world, reason)
        case StopRound() as order:
            (independent if turn.state.independent else rounds).stop(turn, order)
        case Hold() as order:
            boundaries.hold(turn, order)
        case Switch() as order:
            boundaries.switch(turn, order)
        case Prestart():
            rounds.prestart(turn)
        case LoadState():
            turn.do(LoadCheckpoint())
        case KeepWith() as peer:
            turn.do(SendCopies(peer))
        case Idle(reason=reason, save=save):
            rounds.idle(turn)
            if save.commit:
                turn.do(Write(save, reason))
        case CheckHealth() as order:
            health.ordered(turn, order)
        case UseSlots() as order:
            rounds.use_slots(turn, order)
        case Depart() | Dismissed() | Expelled() | Finish():
            _part(turn, event.message)


def _part(turn: AgentTurn, order: Depart | Dismissed | Expelled | Finish) -> None:
    """Handle an order to leave the job, for good or to register again."""
    match order:
        case Depart():
            leaving.depart(turn, order)
        case Dismissed():
            leaving.dismissed(turn, order)
        case Expelled(reason=reason, exit_code=0):
            _become_stranger(turn, reason)
        case Expelled(reason=reason, exit_code=code):
            turn.leave(Outcome(code, reason), SIGTERM)
        case Finish(exit_code=code, reason=reason, failures=failures):
            turn.leave(Outcome(code, reason, failures, job_over=True), SIGTERM)


# --- workers ---------------------------------------------------------------------------------------------------------


def _process(turn: AgentTurn, round: Round, slot: int) -> Worker | None:
    """The worker that an event is about, if that process still fills the slot."""
    worker = turn.worker(slot)
    return worker if worker is not None and worker.born == round and worker in turn.state.alive else None


def _worker(turn: AgentTurn, round: Round, slot: int) -> Worker | None:
    """Like ``_process``, but ignores a process that is being replaced."""
    worker = _process(turn, round, slot)
    return worker if worker is not None and not worker.being_replaced else None


def _ended(turn: AgentTurn, event: WorkerEnded) -> None:
    state, worker = turn.state, _process(turn, event.round, event.slot)
    if worker is None:
        return
    if worker.being_replaced:
        rounds.start_replacement(turn, worker)
        return
    what = worker.condemned or describe_exit(event.exit_code)
    if worker.status is not WorkerStatus.ALIVE or state.world is None:
        rounds.ended_outside(turn, worker, what)
        turn.exit_if_empty()
    elif state.independent and event.exit_code == START_OVER and independent.may_renew(turn, worker):
        independent.renew(turn, worker)
    elif state.phase is not AgentPhase.RUNNING and not state.between:
        turn.set_worker(worker.slot, status=WorkerStatus.STOPPED, gone=what)
        of_itself = not _expected_end(state, event.exit_code) or (event.exception and not event.peer_loss)
        if of_itself and not worker.condemned:
            # The worker did not die from our signal, so it may be the root cause of the stop. A worker whose error only
            # mentions a lost peer is a consequence.
            _fail(turn, worker, _failure(state, state.world, worker, event))
        rounds.rest_if_free(turn)
    elif event.exit_code == 0:
        turn.set_worker(worker.slot, status=WorkerStatus.DONE)
        rounds.look_whether_done(turn)
    else:
        turn.set_worker(worker.slot, status=WorkerStatus.FAILED, gone=what)
        _fail(turn, worker, _failure(state, state.world, worker, event))


def _fail(turn: AgentTurn, worker: Worker, failure: Failure) -> None:
    """Report a failed worker, to the next Master as well, unless the round has been interrupted."""
    if turn.state.unbroken:
        turn.set(unsent=(*turn.state.unsent, failure))
    if not turn.state.connected:  # else the Master reports it to all nodes
        turn.log(f"worker {worker.rank} (local rank {worker.local_rank}) {failure.what}")
    turn.say(WorkerFailed(failure))


def _expected_end(state: AgentState, code: int) -> bool:
    if code in (0, -SIGTERM, -SIGINT, 128 + SIGTERM, 128 + SIGINT):
        return True
    return code == -SIGKILL and (state.killed or state.timeouts.shutdown_s == 0)


def _failure(state: AgentState, world: World, worker: Worker, event: WorkerEnded) -> Failure:
    return Failure(
        node=NodeId(state.info.node),
        round=world.round,
        rank=worker.rank,
        local_rank=worker.local_rank,
        slot=worker.slot,
        exit_code=event.exit_code,
        what=worker.condemned or describe_exit(event.exit_code),
        exception=event.exception,
        traceback=event.traceback,
        tail=event.tail,
        peer_loss=event.peer_loss and not worker.condemned,
        host=event.host,
        pid=event.pid,
        time_s=event.time_s,
        error_file=event.error_file,
        final=worker.final or (int(ExitCode.WORKER_FAILED) if is_usage_error(event.exit_code, event.tail) else 0),
    )


def describe_exit(code: int) -> str:
    """An exit status as text: ``ended with exit status 3`` or ``was killed by SIGSEGV``."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _froze(turn: AgentTurn, event: WorkerFroze) -> None:
    if _worker(turn, event.round, event.slot):
        turn.set_worker(event.slot, frozen_since_s=turn.now_s)
        if turn.state.phase in (AgentPhase.STOPPING, AgentPhase.LEAVING):
            turn.do(SignalWorkers(SIGKILL, (event.slot,)))


def _thawed(turn: AgentTurn, event: WorkerThawed) -> None:
    if _worker(turn, event.round, event.slot):
        turn.set_worker(event.slot, frozen_since_s=None)


def _entered(turn: AgentTurn, event: WorkerEntered) -> None:
    worker = _worker(turn, event.round, event.slot)
    if worker is not None:
        rounds.entered(turn, worker, event.rejoins and not turn.state.independent, event.why_not)


def _parked(turn: AgentTurn, event: WorkerParked) -> None:
    worker = _worker(turn, event.round, event.slot)
    if worker is not None:
        rounds.parked(turn, worker, event.left)


def _underway(turn: AgentTurn, event: WorkerUnderway) -> None:
    worker = _worker(turn, event.round, event.slot)
    if worker is not None and not turn.state.independent:
        rounds.underway(turn, worker, event)


def _here(turn: AgentTurn, event: WorkerHere) -> None:
    worker = _worker(turn, event.round, event.slot)
    if worker is not None:
        boundaries.here(turn, worker, event.hold, event.commit)


def _gave_up(turn: AgentTurn, event: WorkerGaveUp) -> None:
    if _worker(turn, event.round, event.slot):
        turn.set_worker(event.slot, final=event.exit_code)


def _state_changed(turn: AgentTurn, event: StateChanged) -> None:
    if turn.state.phase is AgentPhase.IDLE:
        turn.announce()


def _report(turn: AgentTurn, event: Report) -> None:
    turn.say(event.message)


def _flushed(turn: AgentTurn, event: SavesFlushed) -> None:
    if event.round == turn.state.running_round and turn.state.done:
        rounds.flushed(turn, event.pending, event.unsaved)


def _keeping_changed(turn: AgentTurn, event: KeepingChanged) -> None:
    if event.why != turn.state.not_kept:
        turn.set(not_kept=event.why)
        turn.log(f"commits are not kept in memory: {event.why}" if event.why else "commits are kept in memory again")
        turn.say(NotKept(event.why))


def _alarms_changed(turn: AgentTurn, event: AlarmsChanged) -> None:
    if event.alarms != turn.state.alarms:
        turn.set(alarms=event.alarms)
        _tell_alarms(turn)


def _suspected(turn: AgentTurn, event: Suspected) -> None:
    if event.alarm != turn.state.suspicion:
        turn.set(suspicion=event.alarm)
        turn.log(f"workers may hang: {event.alarm.text}" if event.alarm is not None else "the workers do not hang")
        _tell_alarms(turn)


def _tell_alarms(turn: AgentTurn) -> None:
    """Tell the Master all alarms of this node, once its watchdogs have looked."""
    if turn.state.alarms is not None:
        suspicion = (turn.state.suspicion,) if turn.state.suspicion is not None else ()
        turn.say(Alarms((*turn.state.alarms, *suspicion)))


def _hang_limit_changed(turn: AgentTurn, event: HangLimitChanged) -> None:
    turn.set(hang_limit=event.limit)
    turn.say(event.limit)


def _logging_changed(turn: AgentTurn, event: LoggingChanged) -> None:
    if event.why != turn.state.not_logged:
        turn.set(not_logged=event.why)
        turn.say(NotLogged(event.why))


def _workers_stopped(turn: AgentTurn, event: WorkersStopped) -> None:
    """This node killed its workers: the others continue without it, and no restart is charged."""
    turn.log(event.reason)
    turn.set(stopped_itself=turn.state.unbroken)
    rounds.break_off(turn)
    turn.set(killed=True)


def _fork_server_lost(turn: AgentTurn, event: ForkServerLost) -> None:
    turn.set(warm=False, health_order=None)
    if turn.state.phase in (AgentPhase.IDLE, AgentPhase.PREPARING):
        turn.set(phase=AgentPhase.WARMING)
    turn.log(f"the fork server has died ({event.reason}): starting another")
    turn.do(Warm())


# --- leaving ---------------------------------------------------------------------------------------------------------


def _fatal(turn: AgentTurn, event: Fatal) -> None:
    turn.say(Leaving(event.outcome.reason))
    turn.leave(event.outcome, SIGTERM)


def _tick(turn: AgentTurn, event: Tick) -> None:
    """Only time has passed; ``watch_deadlines`` checks all deadlines."""


_HANDLERS: dict[type, Callable[[AgentTurn, Any], None]] = {
    ForkServerReady: _warmed,
    Connected: _connected,
    Disconnected: _disconnected,
    MasterSaid: _heard,
    LeaseRenewed: _lease_renewed,
    LeaseGone: _lease_gone,
    Registered: _registered,
    WorkerEnded: _ended,
    WorkerEntered: _entered,
    WorkerParked: _parked,
    WorkerUnderway: _underway,
    WorkerHere: _here,
    WorkerGaveUp: _gave_up,
    StateChanged: _state_changed,
    Report: _report,
    SavesFlushed: _flushed,
    AlarmsChanged: _alarms_changed,
    Suspected: _suspected,
    HangLimitChanged: _hang_limit_changed,
    HealthProbed: health.probed,
    KeepingChanged: _keeping_changed,
    LoggingChanged: _logging_changed,
    WorkerFroze: _froze,
    WorkerThawed: _thawed,
    WorkersStopped: _workers_stopped,
    ForkServerLost: _fork_server_lost,
    Fatal: _fatal,
    Interrupted: leaving.interrupted,
    Noticed: leaving.noticed,
    Tick: _tick,
}
