"""Simulated jobs with ranks that are slow for a while: the Master reports them, and drops their slots where it may."""

from __future__ import annotations

import pytest

from edl.testing.sim.pacing import PACE_SEEDS
from edl.testing.sim.schedules import KINDS, play

SEEDS = range(PACE_SEEDS, 160, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "excluded"), [("plain", False), ("slotted", True), ("bursting", True)])
def test_schedules_meet_stragglers(kind: str, excluded: bool) -> None:
    traced: list[str] = []
    for seed in SEEDS:
        result = play(KINDS[kind](seed), traced.append)
        assert not result.violation, (seed, result.violation)
    text = "\n".join(traced)
    assert "straggler (slot" in text
    assert ("dropped: is a straggler" in text) is excluded
