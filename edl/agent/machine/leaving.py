"""How a node leaves the job, on a signal, on a preemption notice or on the Master's order, and with which exit status.

If its workers train with others, they continue to a step boundary at which the others go on without them. A node that
is not needed any more, or has been replaced, is dismissed by the Master (``Dismissed``) and exits with
``--drained-exit-code``. A node that the job waits for, or that cannot leave in time, exits as on SIGTERM.
"""

from __future__ import annotations

import dataclasses
import signal

from edl.agent.machine.events import Exit, Interrupted, Noticed, SignalWorkers
from edl.agent.machine.state import AgentPhase, Leave, Outcome
from edl.agent.machine.turn import SIGINT, SIGKILL, SIGTERM, AgentTurn
from edl.exit_codes import ExitCode
from edl.rendezvous.parting import DRAIN_SHARE
from edl.wire.messages import Depart, Dismissed, Leaving
from edl.wire.scale_requests import DrainMode

ANSWER_S = 5.0
"""Maximum seconds that a node without workers waits for the Master's answer."""


def interrupted(turn: AgentTurn, event: Interrupted) -> None:
    """Handle a signal to leave."""
    name = signal.Signals(event.signal).name
    code = ExitCode.INTERRUPTED if event.signal == SIGINT else ExitCode.TERMINATED
    if event.again or (turn.state.phase is AgentPhase.LEAVING and turn.state.killed):
        turn.log(f"{name} again: killing the workers and leaving at once")
        turn.do(SignalWorkers(SIGKILL))
        turn.set(phase=AgentPhase.OVER)
        turn.do(Exit(turn.state.outcome or Outcome(int(code), f"{name} twice")))
        return
    leave(turn, Outcome(int(code), f"left the job on {name}"), name, 0.0, event.signal)


def noticed(turn: AgentTurn, event: Noticed) -> None:
    """Handle a preemption notice."""
    leave(turn, Outcome(int(ExitCode.TERMINATED), f"left the job: {event.reason}"), event.reason, event.deadline_s)


def depart(turn: AgentTurn, order: Depart) -> None:
    """Leave on the Master's order."""
    outcome = Outcome(int(ExitCode.TERMINATED), f"left the job: {order.reason}", save=order.mode is not DrainMode.NO)
    if turn.state.draining is not None:
        turn.set(draining=dataclasses.replace(turn.state.draining, save=outcome.save))  # the latest request counts
    leave(turn, outcome, order.reason, order.deadline_s)


def leave(turn: AgentTurn, outcome: Outcome, why: str, deadline_s: float, number: int = SIGTERM) -> None:
    """Leave gracefully. ``deadline_s``: seconds available, 0 for ``--shutdown-timeout``. ``number``: the signal for
    workers that cannot be held at a step boundary."""
    state = turn.state
    limit_s = deadline_s or state.timeouts.shutdown_s
    if deadline_s:
        turn.set(gone_by_s=min(turn.now_s + deadline_s, state.gone_by_s or float("inf")))
    if state.phase is AgentPhase.LEAVING:
        return
    if state.draining is not None and state.drain_by_s is not None and number != SIGINT:
        turn.set(drain_by_s=min(state.drain_by_s, turn.now_s + limit_s * DRAIN_SHARE))
        return  # it is already leaving, and the Master knows
    drain_s = _drain_s(turn, limit_s, number)
    if drain_s > 0:
        by_s = turn.now_s + drain_s
        where = "at the next step boundary, " if state.in_world else ""
        turn.log(f"{why}: leaving the job {where}within {by_s - turn.now_s:g} s")
        turn.set(draining=outcome, drain_by_s=by_s)
        if state.connected:  # else the next Master hears it first
            turn.say(Leaving(why, drain_s))
        return
    grace = f"; the workers have {state.timeouts.shutdown_s:g} s" if state.alive else ""
    turn.log(f"{why}: leaving the job{grace}")
    turn.say(Leaving(why))
    if state.connected and state.registered and state.in_world and limit_s > 0 and number != SIGINT:
        turn.set(word_by_s=turn.now_s + min(limit_s, ANSWER_S))  # workers may have ended before the answer arrives
    turn.leave(outcome, number)


def _drain_s(turn: AgentTurn, limit_s: float, number: int) -> float:
    """Seconds to wait for the others or for the Master's answer; 0: do not wait."""
    state = turn.state
    if not state.registered or limit_s <= 0:
        return 0.0
    parting = state.phase is AgentPhase.STOPPING and state.leave is Leave.AT_BOUNDARY
    if not state.connected:  # the Master may have just gone, and its successor lets the others go on without this node
        return limit_s * DRAIN_SHARE if (state.underway or parting) and number != SIGINT else 0.0
    if state.underway or parting:
        return limit_s * DRAIN_SHARE
    resting = state.phase in (AgentPhase.IDLE, AgentPhase.PREPARING, AgentPhase.WARMING) and not state.in_world
    if not resting or number == SIGINT:
        return 0.0
    # A node that was in a world may hold the state from which the next one begins.
    return limit_s * DRAIN_SHARE if state.rejoins and state.world is not None else min(limit_s * DRAIN_SHARE, ANSWER_S)


def dismissed(turn: AgentTurn, order: Dismissed) -> None:
    """Handle the Master's final answer to a leaving node."""
    state = turn.state
    if state.phase is AgentPhase.LEAVING:
        # Its workers are already ending. If it stopped waiting for this answer, the answer is too late.
        if state.outcome is not None and state.draining is None:
            turn.set(outcome=_closed(turn, state.outcome, order))
        unheard(turn)
        return
    turn.log(order.reason)
    outcome = state.draining or Outcome(int(ExitCode.TERMINATED), order.reason)
    turn.leave(_closed(turn, outcome, order), SIGTERM)


def unheard(turn: AgentTurn) -> None:
    """Stop waiting for the Master's answer: exit once the workers have ended."""
    turn.set(word_by_s=None)
    turn.exit_if_empty()


def _closed(turn: AgentTurn, outcome: Outcome, order: Dismissed) -> Outcome:
    outcome = dataclasses.replace(outcome, save=outcome.save and order.save)
    if order.needed or outcome.exit_code != ExitCode.TERMINATED:
        return outcome
    return dataclasses.replace(outcome, exit_code=turn.state.drained_exit_code, drained=True)


def saving_time_s(outcome: Outcome, gone_by_s: float | None, now_s: float, limit_s: float) -> float:
    """Seconds that an ending launcher may spend on saving its newest commit: until the host is taken away, at most
    ``limit_s``. 0 if other nodes save it, or its workers were finished."""
    through = outcome.exit_code in (ExitCode.OK, ExitCode.INCOMPLETE) and not outcome.drained
    if not outcome.save or through:
        return 0.0
    return limit_s if gone_by_s is None else min(limit_s, max(0.0, gone_by_s - now_s))
