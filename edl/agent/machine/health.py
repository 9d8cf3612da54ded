"""Probes of this node, in the agent's machine: one at a time, as the Master orders, and none while workers train."""

from __future__ import annotations

from edl.agent.machine.events import HealthProbed, ProbeHealth, StopProbe
from edl.agent.machine.state import AgentPhase
from edl.agent.machine.turn import AgentTurn
from edl.wire.health import CheckHealth, HealthChecked


def ordered(turn: AgentTurn, order: CheckHealth) -> None:
    """The Master orders a probe, or repeats an order whose answer it has missed."""
    state = turn.state
    answer = state.health_answer
    if answer is not None and (answer.number, answer.stage) == (order.number, order.stage):
        turn.say(answer)
        return
    running = state.health_order
    same = running is not None and (running.number, running.stage) == (order.number, order.stage)
    if same or state.phase is AgentPhase.RUNNING or not state.warm:
        return  # without a fork server: the order is repeated when this node is ready again
    turn.set(health_order=order, health_answer=None)
    turn.do(ProbeHealth(order))


def probed(turn: AgentTurn, event: HealthProbed) -> None:
    """The probe has ended. Without a result, the order may be repeated."""
    order, found = turn.state.health_order, event.found
    if order is None or (order.number, order.stage) != (event.number, event.stage):
        return  # it was stopped
    turn.set(health_order=None, health_answer=found)
    if found is not None:
        turn.say(found)


def answer_again(turn: AgentTurn) -> None:
    """Tell a Master the last result; it may be that of a check in progress."""
    found: HealthChecked | None = turn.state.health_answer
    if found is not None:
        turn.say(found)


def stop(turn: AgentTurn) -> None:
    """End the probe: workers are about to start."""
    if turn.state.health_order is not None:
        turn.set(health_order=None)
        turn.do(StopProbe())
