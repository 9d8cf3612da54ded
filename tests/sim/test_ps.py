"""Random histories of parameter servers: nothing acknowledged is lost, nothing is applied twice, and it goes on."""

from __future__ import annotations

import pytest

from tests.sim.ps_world import PsSim

MEETING = range(16)
"""Histories in which everything is met."""
LOSING = (5, 17, 38)
"""Histories in which, with async copies, an owner dies with pushes that its copy has not."""
SOAK = 10_000


def play(seed: int, replication: str = "") -> PsSim:
    sim = PsSim(seed, replication)
    try:
        return sim.play()
    except Exception as error:  # noqa: BLE001 - whatever it is, the seed must be told
        again = f'python -c "from tests.sim.ps_world import PsSim; PsSim({seed}, {replication!r}).play()"'
        pytest.fail(f"replay with: {again}\n{type(error).__name__}: {error}\n{sim.trace}", pytrace=False)


@pytest.mark.timeout(36000)
def test_many_histories(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--soak"):
        pytest.skip("takes hours: run with --soak")
    events = pushes = masters = losing = 0
    for seed in range(SOAK):
        sim = play(seed)
        events, pushes = events + sim.net.events, pushes + sim.pushes
        masters, losing = masters + sim.master.life, losing + bool(sim.losses.seen)
        if (seed + 1) % 500 == 0:
            sums = f"{seed + 1} histories: {events:,} events, {pushes:,} acknowledged pushes, {masters:,} Masters"
            print(f"{sums}, {losing} with a loss that async copies allow", flush=True)


def test_histories_meet_what_they_are_for() -> None:
    sims = [play(seed) for seed in MEETING]
    assert sum(sim.pushes for sim in sims) > 4000
    assert sum(sim.master.life > 1 for sim in sims) > 20, "Masters are replaced"
    assert sum(sim.rollbacks > 0 for sim in sims) > 2, "rows are lost, and restored"
    assert sum(bool(sim.disk.complete) for sim in sims) > 10, "checkpoints are made"
    assert sum(sim.names > 4 for sim in sims) > 2, "pservers come and go"
    lost = sum(play(seed, "async").losses.seen for seed in LOSING)
    assert lost > 10, "deaths take along what async copies do not have yet"
    notes = [note for sim in sims for note in sim.master.notes]
    for story in (
        "its lease has ended",
        "refuses connections",
        "leaves",
        "is complete",
        "was abandoned",
        "continue without",
    ):
        assert any(story in note for note in notes), story
