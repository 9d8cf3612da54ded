"""Pairs of an event and the state in which it occurred, to measure which transitions schedules have covered."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterable

from edl.agent.machine import events as ag
from edl.agent.machine.state import AgentPhase, AgentState
from edl.master import events as ms
from edl.master.state import MasterState, Phase
from edl.wire.messages import AgentMessage, MasterMessage

Pair = tuple[str, str, str]
"""Machine, state, event."""
ANY = "*"
"""In ``IMPOSSIBLE``: every state, or every event."""


def master_pair(state: MasterState, event: ms.Event) -> Pair:
    """The pair for an event of the Master's machine."""
    name = type(event.message).__name__ if isinstance(event, ms.NodeSaid) else type(event).__name__
    return "master", state.record.phase.value, name


def agent_pair(state: AgentState, event: ag.Event) -> Pair:
    """The pair for an event of the agent's machine."""
    name = type(event.message).__name__ if isinstance(event, ag.MasterSaid) else type(event).__name__
    return "agent", state.phase.value, name


def _names(events: object, wrapper: type, messages: object) -> list[str]:
    kinds = [kind for kind in typing.get_args(events) if kind is not wrapper]
    return [kind.__name__ for kind in (*kinds, *typing.get_args(messages))]


def every_pair() -> Iterable[Pair]:
    """All combinations of state and event, possible or not."""
    for phase, name in itertools.product(Phase, _names(ms.Event, ms.NodeSaid, AgentMessage)):
        yield "master", phase.value, name
    for state, name in itertools.product(AgentPhase, _names(ag.Event, ag.MasterSaid, MasterMessage)):
        yield "agent", state.value, name


IMPOSSIBLE: dict[Pair, str] = {
    ("master", ANY, "Attach"): "the Master's shell turns it into NodeAttached",
    ("master", ANY, "ServiceFromWorker"): "the Master's shell passes it to the service",
    ("agent", ANY, "ServiceToWorker"): "the agent's shell passes it to the worker",
    ("agent", "over", ANY): "the agent's shell handles no event after Exit",
    ("agent", "running", "Registered"): "losing the lease ends the round before the node registers again",
}
"""Pairs that must not occur, with the reason. Reaching one is a violation."""


def why_impossible(pair: Pair) -> str:
    """Why a pair cannot occur; empty if it may."""
    machine, state, event = pair
    rows = pair, (machine, state, ANY), (machine, ANY, event)
    return next((IMPOSSIBLE[row] for row in rows if row in IMPOSSIBLE), "")
