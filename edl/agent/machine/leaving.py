"""How a node leaves: on a signal, on a notice, or because the Master says so; and with which exit status.

If its workers train with others, they go on to a boundary at which the others go on without them. A node whose place
is not needed, or is filled, is told so (``Dismissed``) and ends with ``--drained-exit-code``; one that the job waits
for, or that does not get away in time, ends as on SIGTERM.
"""

from __future__ import annotations

import dataclasses
import signal

from edl.agent.machine.events import Exit, Interrupted, Noticed, SignalWorkers
from edl.agent.machine.state import AgentPhase, Leave, Outcome
from edl.agent.machine.turn import SIGINT, SIGKILL, SIGTERM, Turn
from edl.exit_codes import ExitCode
from edl.rendezvous.parting import DRAIN_SHARE
from edl.wire.messages import Depart, Dismissed, Leaving
from edl.wire.wishes import Care

ANSWER_S = 5.0
"""How long one that runs no worker waits for the Master's word, at most."""


def interrupted(turn: Turn, event: Interrupted) -> None:
    """A signal to leave by."""
    name = signal.Signals(event.signal).name
    code = ExitCode.INTERRUPTED if event.signal == SIGINT else ExitCode.TERMINATED
    if event.again or (turn.state.phase is AgentPhase.LEAVING and turn.state.killed):
        turn.log(f"{name} again: killing the workers and leaving at once")
        turn.do(SignalWorkers(SIGKILL))
        turn.set(phase=AgentPhase.OVER)
        turn.do(Exit(turn.state.outcome or Outcome(int(code), f"{name} twice")))
        return
    leave(turn, Outcome(int(code), f"left the job on {name}"), name, 0.0, event.signal)


def noticed(turn: Turn, event: Noticed) -> None:
    """Whoever owns this host is going to take it away."""
    leave(turn, Outcome(int(ExitCode.TERMINATED), f"left the job: {event.reason}"), event.reason, event.deadline_s)


def depart(turn: Turn, order: Depart) -> None:
    """The Master wants this node to leave."""
    outcome = Outcome(int(ExitCode.TERMINATED), f"left the job: {order.reason}", save=order.care is not Care.NO)
    if turn.state.draining is not None:
        turn.set(draining=dataclasses.replace(turn.state.draining, save=outcome.save))  # the newest wish counts
    leave(turn, outcome, order.reason, order.deadline_s)


def leave(turn: Turn, outcome: Outcome, why: str, deadline_s: float, number: int = SIGTERM) -> None:
    """Leave in good order. ``deadline_s``: time there is, 0 for ``--shutdown-timeout``. ``number``: the signal that
    workers get which cannot be held at a boundary."""
    state = turn.state
    if state.phase is AgentPhase.LEAVING:
        turn.leave(state.outcome or outcome, number)
        return
    limit_s = deadline_s or state.timeouts.shutdown_s
    if deadline_s:
        turn.set(gone_by_s=min(turn.now_s + deadline_s, state.gone_by_s or float("inf")))
    if state.draining is not None and state.drain_by_s is not None and number != SIGINT:
        turn.set(drain_by_s=min(state.drain_by_s, turn.now_s + limit_s * DRAIN_SHARE))
        return  # it is on its way, and the Master knows
    drain_s = _drain_s(turn, limit_s, number)
    if drain_s > 0:
        by_s = turn.now_s + drain_s
        where = "at the next step boundary, " if state.in_world else ""
        turn.log(f"{why}: leaving the job {where}in {by_s - turn.now_s:g} s at the latest")
        turn.set(draining=outcome, drain_by_s=by_s)
        turn.say(Leaving(why, drain_s))
        return
    grace = f"; the workers have {state.timeouts.shutdown_s:g} s" if state.alive else ""
    turn.log(f"{why}: leaving the job{grace}")
    turn.say(Leaving(why))
    if state.connected and state.registered and state.in_world and limit_s > 0 and number != SIGINT:
        turn.set(word_by_s=turn.now_s + min(limit_s, ANSWER_S))  # workers may be gone before the answer is here
    turn.leave(outcome, number)


def _drain_s(turn: Turn, limit_s: float, number: int) -> float:
    """How long to wait for the others, or for the Master's word; 0: not at all."""
    state = turn.state
    if not state.connected or not state.registered or limit_s <= 0:
        return 0.0
    parting = state.phase is AgentPhase.STOPPING and state.leave is Leave.AT_BOUNDARY
    if state.underway or parting:
        return limit_s * DRAIN_SHARE
    resting = state.phase in (AgentPhase.IDLE, AgentPhase.PREPARING, AgentPhase.WARMING) and not state.in_world
    if not resting or number == SIGINT:
        return 0.0
    # One that has had a part in a world may have the state that the next one begins from.
    return limit_s * DRAIN_SHARE if state.rejoins and state.world is not None else min(limit_s * DRAIN_SHARE, ANSWER_S)


def dismissed(turn: Turn, order: Dismissed) -> None:
    """The Master's last word to a node that wants to leave."""
    state = turn.state
    if state.phase is AgentPhase.LEAVING:
        # Its workers are on their way out. If it had waited in vain before, this comes too late.
        if state.outcome is not None and state.draining is None:
            turn.set(outcome=_closed(turn, state.outcome, order))
        unheard(turn)
        return
    turn.log(order.reason)
    outcome = state.draining or Outcome(int(ExitCode.TERMINATED), order.reason)
    turn.leave(_closed(turn, outcome, order), SIGTERM)


def unheard(turn: Turn) -> None:
    """There is nothing more to hear: go once the workers are gone."""
    turn.set(word_by_s=None)
    turn.exit_if_empty()


def _closed(turn: Turn, outcome: Outcome, order: Dismissed) -> Outcome:
    outcome = dataclasses.replace(outcome, save=outcome.save and order.save)
    if order.needed or outcome.exit_code != ExitCode.TERMINATED:
        return outcome
    return dataclasses.replace(outcome, exit_code=turn.state.drained_exit_code, drained=True)


def saving_time_s(outcome: Outcome, gone_by_s: float | None, now_s: float, limit_s: float) -> float:
    """How long a launcher that ends may take to bring its newest commit where it survives: until the host is taken
    away, ``limit_s`` at most. 0: it does not, since others do it, or its workers were through."""
    through = outcome.exit_code in (ExitCode.OK, ExitCode.INCOMPLETE) and not outcome.drained
    if not outcome.save or through:
        return 0.0
    return limit_s if gone_by_s is None else min(limit_s, max(0.0, gone_by_s - now_s))
