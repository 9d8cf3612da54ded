"""Each event in each state, also where no schedule has brought the two together: late, repeated, of another node.

Schedules collect states and events of real jobs; then each event is handled in each state. It may be out of place, but
it must not make the machine fail, nor change a phase in a way that the tables do not show. A node's status is another
matter: it follows what the node says, which may contradict what is known when the two come from different jobs.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest

import edl.agent.shell
import edl.master.shell
from edl.agent.machine import events as ag
from edl.agent.machine import machine as agent
from edl.master import events as ms
from edl.master import machine as master
from edl.master.state import NodeStatus
from edl.testing.sim.pairs import Pair, agent_pair, every_pair, master_pair, why_impossible
from edl.testing.sim.schedules import KINDS, play
from edl.wire.alarm import Alarm
from edl.wire.messages import Hanging, HangLimit, Underway
from tests.sim.test_transitions import allowed
from tests.sim.transitions import recorded

SEEDS = 20
KEPT = 4
"""States kept of each phase, and events of each kind."""


class Samples:
    """States by phase, and events by name, of one kind of machine. Later ones replace earlier ones now and then."""

    def __init__(self) -> None:
        self.states: dict[str, list[tuple[Any, float]]] = defaultdict(list)
        self.events: dict[str, list[Any]] = defaultdict(list)
        self._rng = random.Random(0)

    def take(self, pair: Pair, state: Any, event: Any, now_s: float) -> None:
        """Keep the state and the event, perhaps."""
        self._keep(self.states[pair[1]], (state, now_s))
        self._keep(self.events[pair[2]], event)

    def _keep(self, kept: list[Any], new: Any) -> None:
        if len(kept) < KEPT:
            kept.append(new)
        elif self._rng.random() < 0.02:
            kept[self._rng.randrange(KEPT)] = new


def _add_rare_to_agent(events: dict[str, list[Any]]) -> None:
    """Events that no schedule has."""
    events["Suspected"] = [ag.Suspected(Alarm("hang", text="for 300 s")), ag.Suspected(None)]
    events["HangLimitChanged"] = [ag.HangLimitChanged(HangLimit(300.0, 20, 20))]


def _add_rare(events: dict[str, list[Any]]) -> None:
    """Events that no schedule has."""
    said = [event for event in events["Underway"] if isinstance(event.message, Underway)]
    events["Hanging"] = [ms.NodeSaid(one.node, one.incarnation, Hanging(one.message.round, "slot 0")) for one in said]
    events["HangLimit"] = [ms.NodeSaid(one.node, one.incarnation, HangLimit(300.0, 20, 20)) for one in said]
    events["Unfit"] = [ms.Unfit(one.node, one.incarnation, 0, "too hot") for one in said]
    events["Flawed"] = [ms.Flawed("data", "shard 1 was skipped"), ms.Flawed("data", "")]
    events["Failed"] = [ms.Failed("the shards cannot be listed")]


@pytest.fixture(scope="module")
def samples() -> dict[str, Samples]:
    """States and events from schedules of every kind."""
    agents, masters = Samples(), Samples()

    def step(state: Any, event: Any, now_s: float) -> Any:
        agents.take(agent_pair(state, event), state, event, now_s)
        return agent.step(state, event, now_s)

    def step_all(state: Any, events: Iterable[Any], now_s: float) -> Any:
        some = tuple(events)
        for event in some:
            masters.take(master_pair(state, event), state, event, now_s)
        return master.step_all(state, some, now_s)

    with (
        mock.patch.object(edl.agent.shell, "step", step),
        mock.patch.object(edl.master.shell, "step_all", step_all),
        mock.patch.object(edl.master.shell, "step", lambda state, event, now_s: step_all(state, (event,), now_s)),
    ):
        for draw in KINDS.values():
            for seed in range(SEEDS):
                assert not play(draw(seed)).violation
    _add_rare(masters.events)
    _add_rare_to_agent(agents.events)
    return {"agent": agents, "master": masters}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("agent", agent.step), ("master", master.step)])
def test_no_event_is_too_much_for_a_state(name: str, step: Any, samples: dict[str, Samples]) -> None:
    states, events = samples[name].states, samples[name].events
    pairs = [pair for pair in every_pair() if pair[0] == name and not why_impossible(pair)]
    assert {(pair[1], pair[2]) for pair in pairs} <= {(phase, event) for phase in states for event in events}
    table = allowed()
    for pair in pairs:
        for state, now_s in states[pair[1]]:
            for event in events[pair[2]]:
                with recorded() as changes:
                    step(state, event, now_s)
                phases = {change for change in changes if not isinstance(change[0], NodeStatus)}
                assert phases <= table, (pair, state, event)
