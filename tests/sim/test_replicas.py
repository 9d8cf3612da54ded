"""Replicas of several workers in the simulator: ``Schedule.grouped``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from edl.config import Replicas
from edl.testing.sim.schedules import Schedule, play
from tests.sim.batches import play_all

BATCH = 80
BATCHES = 1
BATCHES_OF_SOAK = 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch", [pytest.param(n, marks=() if n < BATCHES else pytest.mark.soak) for n in range(BATCHES_OF_SOAK)]
)
def test_schedules(batch: int) -> None:
    play_all(Schedule.grouped, range(batch * BATCH, (batch + 1) * BATCH), worlds=2)


def _nodes_use_what_slots_they_have() -> Any:
    """A node with a dropped slot starts workers in all others."""
    return mock.patch.object(Replicas, "whole", lambda self, slots: slots)


@pytest.mark.parametrize("bug", [_nodes_use_what_slots_they_have])
def test_a_planted_bug_is_found(bug: Callable[[], Any]) -> None:
    with bug():
        assert any(play(Schedule.grouped(seed)).violation for seed in range(200))
