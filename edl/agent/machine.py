"""The agent: a node's life as one pure function.

An agent starts and stops workers only on a Master's word, with three exceptions, all for safety: its lease has ended,
it is cut off from the store and from the Master for longer than a lease lasts (others may have formed a world without
it), or the person at the keyboard wants it to leave.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from typing import Any

from edl.agent.events import (
    Announce,
    Connected,
    Decision,
    Disconnected,
    Effect,
    Event,
    Exit,
    Fatal,
    Heard,
    Interrupted,
    LeaseGone,
    LeaseRenewed,
    Log,
    NurseryGone,
    Register,
    Registered,
    Say,
    SignalWorkers,
    Start,
    Tick,
    WakeAt,
    Warm,
    Warmed,
    WorkerEnded,
    WorkerFroze,
    WorkerThawed,
)
from edl.agent.state import AgentPhase, AgentState, Outcome, Worker, WorkerStatus
from edl.exit_codes import ExitCode
from edl.types import NodeId, Rank, Round
from edl.wire.messages import (
    Expelled,
    Failure,
    Finish,
    Leaving,
    StartRound,
    StopRound,
    WorkerFailed,
    WorkersDone,
    World,
)

SIGTERM, SIGKILL, SIGINT, SIGABRT = (
    int(number) for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGABRT)
)


class _Turn:
    """Working copy of the state within one step."""

    def __init__(self, state: AgentState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    def set(self, **changes: Any) -> None:
        self.state = dataclasses.replace(self.state, **changes)

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def log(self, text: str) -> None:
        self.set(reason=text)
        self.do(Log(text))

    def say(self, message: WorkerFailed | WorkersDone | Leaving) -> None:
        if self.state.connected:
            self.do(Say(message))

    def set_worker(self, local_rank: int, **changes: Any) -> None:
        self.set(
            workers=tuple(
                dataclasses.replace(worker, **changes) if worker.local_rank == local_rank else worker
                for worker in self.state.workers
            )
        )


def begin(state: AgentState) -> Decision:
    """First step: bring up the nursery."""
    return Decision(state, (Warm(),), "starting")


def step(state: AgentState, event: Event, now_s: float) -> Decision:
    """Take one event. After ``OVER`` nothing matters any more."""
    if state.phase is AgentPhase.OVER:
        return Decision(state, (), state.reason)
    turn = _Turn(state, now_s)
    handler: Callable[[_Turn, Any], None] = _HANDLERS[type(event)]
    handler(turn, event)
    _watch_deadlines(turn)
    return Decision(turn.state, tuple(turn.effects), turn.state.reason)


# --- nursery, lease, Master ------------------------------------------------------------------------------------------


def _warmed(turn: _Turn, event: Warmed) -> None:
    turn.set(warm=True)
    if turn.state.phase is AgentPhase.WARMING:
        turn.set(phase=AgentPhase.IDLE)
        _announce(turn)


def _connected(turn: _Turn, event: Connected) -> None:
    turn.set(connected=True, contact_s=turn.now_s)
    if not turn.state.registered:
        return  # a stream belongs to one incarnation, and the next one has no name yet
    turn.do(Say(turn.state.attach()))
    if turn.state.phase is AgentPhase.LEAVING:
        turn.say(Leaving(turn.state.reason))
        return
    for failure in turn.state.unsent:
        turn.say(WorkerFailed(failure))
    if turn.state.phase is AgentPhase.IDLE:
        _announce(turn)


def _disconnected(turn: _Turn, event: Disconnected) -> None:
    if turn.state.connected:
        turn.set(connected=False, contact_s=turn.now_s)


def _lease_renewed(turn: _Turn, event: LeaseRenewed) -> None:
    turn.set(contact_s=max(turn.state.contact_s, turn.now_s - event.age_s))


def _lease_gone(turn: _Turn, event: LeaseGone) -> None:
    _become_stranger(turn, "the lease of this node has ended")


def _registered(turn: _Turn, event: Registered) -> None:
    # A new incarnation begins with a clean slate: no Master will ever ask it about older rounds.
    turn.set(info=event.info, registered=True, contact_s=turn.now_s, seen_round=Round(0))
    turn.log(f"registered again as {event.info.node}")
    if turn.state.connected:
        turn.do(Say(turn.state.attach()))
    if turn.state.phase is AgentPhase.IDLE:
        _announce(turn)


def _become_stranger(turn: _Turn, why: str) -> None:
    """The job may go on without this node: no worker may survive that."""
    if turn.state.registered and turn.state.phase is not AgentPhase.LEAVING:
        turn.set(registered=False, connected=False)
        turn.log(why + (": stopping the workers" if turn.state.alive else ""))
        _stop_workers(turn)
        turn.do(Register())


def _announce(turn: _Turn) -> None:
    if turn.state.connected and turn.state.registered:
        turn.do(Announce())


# --- the Master's word -----------------------------------------------------------------------------------------------


def _heard(turn: _Turn, event: Heard) -> None:
    turn.set(contact_s=turn.now_s)
    leaving = turn.state.phase is AgentPhase.LEAVING
    match event.message:
        case StartRound(world=world, reason=reason) if not leaving:
            _start(turn, world, reason)
        case StopRound(round=number, reason=reason) if not leaving:
            _stop(turn, number, reason)
        case Expelled(reason=reason, exit_code=0) if not leaving:
            _become_stranger(turn, reason)
        case Expelled(reason=reason, exit_code=code) if not leaving:
            _leave(turn, Outcome(code, reason), SIGTERM)
        case Finish(exit_code=code, reason=reason, failures=failures) if not leaving:
            _leave(turn, Outcome(code, reason, failures), SIGTERM)
        case _:
            pass


def _start(turn: _Turn, world: World, reason: str) -> None:
    member = world.member(turn.state.info.node)
    mine = turn.state.registered and member is not None and member.incarnation == turn.state.info.incarnation
    if member is None or not mine or world.round <= turn.state.seen_round:
        return
    turn.set(seen_round=world.round)
    if turn.state.phase is not AgentPhase.IDLE:
        return  # not ready any more; the Master learns it from the round that the next Ready has seen
    workers = tuple(Worker(index, Rank(member.first_rank + index)) for index in range(member.slots))
    turn.set(phase=AgentPhase.RUNNING, world=world, workers=workers, unsent=(), killed=False, kill_at_s=None)
    turn.log(reason)
    turn.do(Start(world))


def _stop(turn: _Turn, number: Round, reason: str) -> None:
    if turn.state.phase is AgentPhase.IDLE:
        _announce(turn)
    elif turn.state.phase is AgentPhase.RUNNING and number >= turn.state.running_round:
        turn.log(reason)
        _stop_workers(turn)


def _stop_workers(turn: _Turn) -> None:
    """SIGTERM now, SIGKILL after the grace; a worker that cannot hear is killed at once."""
    if turn.state.phase is AgentPhase.RUNNING:
        turn.set(phase=AgentPhase.STOPPING, unsent=())
        _signal_alive(turn, SIGTERM)
        _rest_if_empty(turn)


def _leave(turn: _Turn, outcome: Outcome, number: int) -> None:
    """Stop the workers, then exit."""
    if turn.state.phase is not AgentPhase.STOPPING:
        _signal_alive(turn, number)
    turn.set(phase=AgentPhase.LEAVING, outcome=outcome, reason=outcome.reason)
    _rest_if_empty(turn)


def _signal_alive(turn: _Turn, number: int) -> None:
    frozen = tuple(worker.local_rank for worker in turn.state.alive if worker.frozen_since_s is not None)
    others = tuple(worker.local_rank for worker in turn.state.alive if worker.frozen_since_s is None)
    if frozen:
        turn.do(SignalWorkers(SIGKILL, frozen))
    if others:
        turn.do(SignalWorkers(number, others))
        turn.set(kill_at_s=turn.now_s + turn.state.timeouts.shutdown_s, killed=False)


def _rest_if_empty(turn: _Turn) -> None:
    """Once no worker is left: be ready again, or exit."""
    if turn.state.alive:
        return
    if turn.state.phase is AgentPhase.LEAVING and turn.state.outcome is not None:
        turn.set(phase=AgentPhase.OVER)
        turn.do(Exit(turn.state.outcome))
    elif turn.state.phase is AgentPhase.STOPPING:
        turn.set(phase=AgentPhase.IDLE if turn.state.warm else AgentPhase.WARMING, kill_at_s=None, workers=())
        if turn.state.warm:
            _announce(turn)


# --- workers ---------------------------------------------------------------------------------------------------------


def _ended(turn: _Turn, event: WorkerEnded) -> None:
    state = turn.state
    world = state.world
    worker = next((w for w in state.workers if w.local_rank == event.local_rank), None)
    if world is None or worker is None or event.round != world.round or worker.status is not WorkerStatus.ALIVE:
        return
    if state.phase is not AgentPhase.RUNNING:
        turn.set_worker(worker.local_rank, status=WorkerStatus.STOPPED)
        if not _expected_end(state, event.exit_code):
            # It ended of something else than our signal: maybe the very cause of the stop.
            turn.say(WorkerFailed(_failure(state, world, worker, event)))
        _rest_if_empty(turn)
    elif event.exit_code == 0:
        turn.set_worker(worker.local_rank, status=WorkerStatus.DONE)
        if turn.state.done:
            turn.say(WorkersDone(world.round))
    else:
        turn.set_worker(worker.local_rank, status=WorkerStatus.FAILED)
        failure = _failure(state, world, worker, event)
        turn.set(unsent=(*state.unsent, failure))
        if not turn.state.connected:  # else the Master says it to everybody
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
        exit_code=event.exit_code,
        what=worker.condemned or describe_exit(event.exit_code),
        exception=event.exception,
        traceback=event.traceback,
        tail=event.tail,
        peer_loss=event.peer_loss and not worker.condemned,
    )


def describe_exit(code: int) -> str:
    """An exit status in words: ``exit status 3`` or ``killed by SIGSEGV``."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _froze(turn: _Turn, event: WorkerFroze) -> None:
    if turn.state.world is not None and event.round == turn.state.world.round:
        turn.set_worker(event.local_rank, frozen_since_s=turn.now_s)
        if turn.state.phase in (AgentPhase.STOPPING, AgentPhase.LEAVING):
            turn.do(SignalWorkers(SIGKILL, (event.local_rank,)))


def _thawed(turn: _Turn, event: WorkerThawed) -> None:
    if turn.state.world is not None and event.round == turn.state.world.round:
        turn.set_worker(event.local_rank, frozen_since_s=None)


def _nursery_gone(turn: _Turn, event: NurseryGone) -> None:
    turn.set(warm=False)
    if turn.state.phase is AgentPhase.IDLE:
        turn.set(phase=AgentPhase.WARMING)
    turn.log(f"the process that starts workers is gone ({event.reason}): starting another")
    turn.do(Warm())


# --- leaving ---------------------------------------------------------------------------------------------------------


def _fatal(turn: _Turn, event: Fatal) -> None:
    turn.say(Leaving(event.outcome.reason))
    _leave(turn, event.outcome, SIGTERM)


def _interrupted(turn: _Turn, event: Interrupted) -> None:
    name = signal.Signals(event.signal).name
    code = ExitCode.INTERRUPTED if event.signal == SIGINT else ExitCode.TERMINATED
    if event.again or (turn.state.phase is AgentPhase.LEAVING and turn.state.killed):
        turn.log(f"{name} again: killing the workers and leaving at once")
        turn.do(SignalWorkers(SIGKILL))
        turn.set(phase=AgentPhase.OVER)
        turn.do(Exit(turn.state.outcome or Outcome(int(code), f"{name} twice")))
        return
    grace = f"; the workers have {turn.state.timeouts.shutdown_s:g} s" if turn.state.alive else ""
    turn.log(f"{name}: leaving the job{grace}")
    turn.say(Leaving(name))
    _leave(turn, Outcome(int(code), f"left the job on {name}"), event.signal)


# --- time ------------------------------------------------------------------------------------------------------------


def _tick(turn: _Turn, event: Tick) -> None:
    """Only time has passed; ``_watch_deadlines`` looks at every deadline."""


def _watch_deadlines(turn: _Turn) -> None:
    """Act on what is due and ask to be woken for the rest. Runs after every event."""
    if turn.state.phase is AgentPhase.OVER:
        return
    for deadline_s, act in _deadlines(turn):
        if deadline_s is not None and turn.now_s >= deadline_s:
            act()
    for deadline_s, _ in _deadlines(turn):  # again: to act on one may set another
        if deadline_s is not None:
            turn.do(WakeAt(deadline_s))


_Deadline = tuple[float | None, Callable[[], None]]


def _deadlines(turn: _Turn) -> list[_Deadline]:
    return [_kill_deadline(turn), *_thaw_deadlines(turn), _isolation_deadline(turn), _surrender_deadline(turn)]


def _kill_deadline(turn: _Turn) -> _Deadline:
    def act() -> None:
        turn.set(killed=True, kill_at_s=None)
        turn.log(f"workers still run {turn.state.timeouts.shutdown_s:g} s after the signal: killing them")
        turn.do(SignalWorkers(SIGKILL))

    stopping = turn.state.phase in (AgentPhase.STOPPING, AgentPhase.LEAVING)
    return (turn.state.kill_at_s if stopping and turn.state.alive else None), act


def _thaw_deadlines(turn: _Turn) -> list[_Deadline]:
    if turn.state.phase is not AgentPhase.RUNNING:
        return []
    limit_s = turn.state.timeouts.lease_ttl_s
    deadlines: list[_Deadline] = []
    for worker in turn.state.alive:
        if worker.frozen_since_s is not None and not worker.condemned:

            def act(worker: Worker = worker) -> None:
                what = f"was frozen (stopped by a signal) for {limit_s:g} s and killed"
                turn.set_worker(worker.local_rank, condemned=what)
                turn.do(SignalWorkers(SIGKILL, (worker.local_rank,)))

            deadlines.append((worker.frozen_since_s + limit_s, act))
    return deadlines


def _isolation_deadline(turn: _Turn) -> _Deadline:
    limit_s = turn.state.timeouts.lease_ttl_s

    def act() -> None:
        turn.log(f"no contact with the store or the Master for {limit_s:g} s: stopping the workers, others may go on")
        _stop_workers(turn)

    cut_off = not turn.state.connected and turn.state.phase is AgentPhase.RUNNING
    return (turn.state.contact_s + limit_s if cut_off else None), act


def _surrender_deadline(turn: _Turn) -> _Deadline:
    limit_s = turn.state.timeouts.recover_s

    def act() -> None:
        reason = f"neither the store nor a Master has been in reach for {limit_s:g} s (--recover-timeout={limit_s:g})"
        _leave(turn, Outcome(int(ExitCode.STORE_UNREACHABLE), reason), SIGTERM)

    waiting = not turn.state.connected and turn.state.phase in (AgentPhase.IDLE, AgentPhase.WARMING)
    return (turn.state.contact_s + limit_s if waiting else None), act


_HANDLERS: dict[type, Callable[[_Turn, Any], None]] = {
    Warmed: _warmed,
    Connected: _connected,
    Disconnected: _disconnected,
    Heard: _heard,
    LeaseRenewed: _lease_renewed,
    LeaseGone: _lease_gone,
    Registered: _registered,
    WorkerEnded: _ended,
    WorkerFroze: _froze,
    WorkerThawed: _thawed,
    NurseryGone: _nursery_gone,
    Fatal: _fatal,
    Interrupted: _interrupted,
    Tick: _tick,
}
