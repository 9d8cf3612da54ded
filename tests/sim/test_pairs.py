"""Pairs of state and event that are declared impossible, and schedules in bursts that reach what others do not."""

from __future__ import annotations

import pytest

from edl.testing.sim import pairs
from edl.testing.sim.pairs import ANY, IMPOSSIBLE, every_pair, why_impossible
from edl.testing.sim.schedules import Schedule, play


def test_each_declared_row_is_a_pair_of_the_machines() -> None:
    every = set(every_pair())
    for row in IMPOSSIBLE:
        assert any(all(part in (ANY, name) for part, name in zip(row, pair, strict=True)) for pair in every), row


def test_reaching_an_impossible_pair_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pairs.IMPOSSIBLE, ("agent", "idle", "StartRound"), "for this test")
    assert "agent idle StartRound is declared impossible: for this test" in play(Schedule.draw(5)).violation


def test_bursts_of_faults() -> None:
    for seed in range(15):
        result = play(Schedule.bursting(seed))
        assert not result.violation, (seed, result.violation)
        assert not [pair for pair in result.pairs if why_impossible(pair)]
