"""The agent's deadlines, checked after every event."""

from __future__ import annotations

from collections.abc import Callable

from edl.agent.machine import leaving, rounds
from edl.agent.machine.events import Exit, SignalWorkers, WakeAt
from edl.agent.machine.state import AgentPhase, Leave, Outcome, Worker
from edl.agent.machine.turn import BURY_S, SIGKILL, SIGTERM, AgentTurn
from edl.exit_codes import ExitCode
from edl.wire.messages import Leaving

Deadline = tuple[float | None, Callable[[], None]]


def watch_deadlines(turn: AgentTurn) -> None:
    """Act on expired deadlines and request a wake-up for the next ones. Runs after every event."""
    if turn.state.phase is AgentPhase.OVER:
        return
    for deadline_s, act in _deadlines(turn):
        if deadline_s is not None and turn.now_s >= deadline_s:
            act()
    for deadline_s, _ in _deadlines(turn):  # again, since acting on one may set another
        if deadline_s is not None:
            turn.do(WakeAt(deadline_s))


def _deadlines(turn: AgentTurn) -> list[Deadline]:
    return [
        _kill(turn),
        _shed(turn),
        _park(turn),
        *_thaw(turn),
        _isolation(turn),
        _doubt(turn),
        _surrender(turn),
        _drain(turn),
        (turn.state.word_by_s, lambda: leaving.unheard(turn)),
        _bury(turn),
    ]


def _kill(turn: AgentTurn) -> Deadline:
    def act() -> None:
        turn.set(killed=True, kill_at_s=None)
        turn.log(f"workers still run {turn.state.timeouts.shutdown_s:g} s after the signal: killing them")
        left = turn.state.in_world if turn.state.phase is AgentPhase.STOPPING else turn.state.alive
        turn.do(SignalWorkers(SIGKILL, tuple(worker.slot for worker in left)))

    stopping = turn.state.phase in (AgentPhase.STOPPING, AgentPhase.LEAVING)
    stopping = stopping or (turn.state.phase is AgentPhase.PREPARING and turn.state.idling)
    return (turn.state.kill_at_s if stopping and turn.state.alive else None), act


def _bury(turn: AgentTurn) -> Deadline:
    def act() -> None:
        pending = f"{len(turn.state.alive)} killed workers have not ended within {BURY_S:g} s"
        turn.log(f"{pending}, perhaps because a driver or a file system hangs: leaving all the same")
        turn.set(phase=AgentPhase.OVER)
        turn.do(Exit(turn.state.outcome or Outcome(int(ExitCode.TERMINATED), turn.state.reason)))

    leaving = turn.state.phase is AgentPhase.LEAVING and turn.state.alive
    return (turn.state.bury_by_s if leaving else None), act


def _shed(turn: AgentTurn) -> Deadline:
    def act() -> None:
        turn.set(shed_by_s=None)
        turn.do(SignalWorkers(SIGKILL, tuple(worker.slot for worker in turn.state.shed)))

    return (turn.state.shed_by_s if turn.state.shed else None), act


def _park(turn: AgentTurn) -> Deadline:
    def act() -> None:
        turn.set(park_by_s=None)
        if turn.state.leave is Leave.AT_BOUNDARY:
            turn.log(f"no step boundary within {turn.state.timeouts.boundary_s:g} s: interrupting the round")
            rounds.break_off(turn)
            return
        late = tuple(worker for worker in turn.state.in_world if worker.rejoins)
        if not late:
            return  # all have parked; workers that cannot park got SIGTERM
        what = f"did not leave its round within {turn.state.timeouts.rejoin_s:g} s"
        turn.log(f"{rounds.count_of(late)} {what}: restarting instead")
        for worker in late:
            turn.set_worker(worker.slot, condemned=what)
        turn.end_workers(late, SIGTERM, what)

    return (turn.state.park_by_s if turn.state.phase is AgentPhase.STOPPING else None), act


def _thaw(turn: AgentTurn) -> list[Deadline]:
    if turn.state.phase is not AgentPhase.RUNNING and not turn.state.between:
        return []
    limit_s = turn.state.timeouts.lease_ttl_s
    deadlines: list[Deadline] = []
    for worker in turn.state.in_world:
        if worker.frozen_since_s is not None and not worker.condemned:

            def act(worker: Worker = worker) -> None:
                what = f"was frozen (stopped by a signal) for {limit_s:g} s and killed"
                turn.set_worker(worker.slot, condemned=what)
                turn.do(SignalWorkers(SIGKILL, (worker.slot,)))

            deadlines.append((worker.frozen_since_s + limit_s, act))
    return deadlines


def _isolation(turn: AgentTurn) -> Deadline:
    limit_s = turn.state.info.lease_within(turn.state.timeouts.lease_ttl_s)

    def act() -> None:
        turn.log(f"no contact with the store or the Master for {limit_s:g} s: stopping the workers")
        if turn.state.draining is not None:
            turn.leave(turn.state.draining, SIGTERM)
            return
        rounds.break_off(turn)

    isolated = not turn.state.connected and turn.state.unbroken
    return (turn.state.contact_s + limit_s if isolated else None), act


def _doubt(turn: AgentTurn) -> Deadline:
    def act() -> None:
        turn.log("no Master has announced the agreed step boundary: interrupting the round")
        rounds.break_off(turn)

    return (turn.state.doubt_by_s if turn.state.in_doubt else None), act


def _surrender(turn: AgentTurn) -> Deadline:
    limit_s = turn.state.timeouts.recover_s

    def act() -> None:
        reason = f"neither the store nor a Master was reachable for {limit_s:g} s (--recover-timeout={limit_s:g})"
        turn.leave(Outcome(int(ExitCode.STORE_UNREACHABLE), reason), SIGTERM)

    resting = (AgentPhase.IDLE, AgentPhase.WARMING, AgentPhase.PREPARING)
    waiting = not turn.state.connected and turn.state.phase in resting
    return (turn.state.contact_s + limit_s if waiting else None), act


def _drain(turn: AgentTurn) -> Deadline:
    def act() -> None:
        if turn.state.draining is not None:
            turn.log("no world formed without this node in time: leaving anyway")
            turn.say(Leaving(turn.state.draining.reason))  # otherwise the others would wait for its lease to end
            turn.leave(turn.state.draining, SIGTERM)

    leaving = turn.state.phase is AgentPhase.LEAVING
    return (None if leaving else turn.state.drain_by_s), act
