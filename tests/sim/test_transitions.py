"""The machines keep to the transitions that their tables show, and the tables show no others."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping

import pytest

from edl.agent.machine.state import NEXT_PHASES as AGENT_PHASES
from edl.agent.machine.state import AgentPhase
from edl.master.state import NEXT_PHASES, NEXT_STATUSES, NodeStatus, Phase
from tests.sim.transitions import Change, changes_in

TABLES: tuple[Mapping[enum.Enum, frozenset[enum.Enum]], ...] = (NEXT_PHASES, NEXT_STATUSES, AGENT_PHASES)  # type: ignore[assignment]
SEEDS, SEEDS_OF_SOAK = 12, 300


def allowed() -> set[Change]:
    return {(before, after) for table in TABLES for before, following in table.items() for after in following}


def test_each_state_is_in_its_table() -> None:
    assert [set(table) for table in TABLES] == [set(Phase), set(NodeStatus), set(AgentPhase)]
    assert not [pair for pair in allowed() if pair[0] is pair[1] or type(pair[0]) is not type(pair[1])]


@pytest.mark.slow
def test_schedules_keep_to_the_tables() -> None:
    assert set(changes_in(range(SEEDS))) <= allowed()


@pytest.mark.soak
def test_the_tables_show_what_happens_and_nothing_else() -> None:
    seen = set(changes_in(range(SEEDS_OF_SOAK)))
    assert seen == allowed(), itertools.chain(seen - allowed(), allowed() - seen)
