"""Random histories of parameter servers: nothing acknowledged is lost, nothing is applied twice, and it goes on."""

from __future__ import annotations

import pytest

from tests.sim import ps_bugs
from tests.sim.ps_world import PsSim

MEETING = (2, 3, 6, 8, 9, 11, 12, 13, *range(15, 19), 21, *range(25, 29), 30, 31, 32, 34, 36, 37, 41, 43, 56, 64, 114)
"""Histories in which everything is met."""
LOSING = 25
"""A history in which, with async copies, an owner dies with pushes that its copy has not."""
KNOWN = [
    173,  # the check's own: a trainer that the Master had given up had a push applied that it did not hear of
    6,  # a release for newer orders was used up under older ones: its bucket was served by nobody
    64,  # a pserver that had looked for checkpoints was asked again in the same history, and never answered
    259,  # a bucket was handed over to a dead pserver, and the giver dropped its rows
    433,  # an image that came before the rows of the previous history were dropped went with them
    974,  # as 259
]
MOST = 60
"""Histories that a planted bug gets, after the one that is known to find it."""
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


@pytest.mark.parametrize("seed", KNOWN)
def test_known_seed(seed: int) -> None:
    play(seed)


@pytest.mark.slow
def test_histories_meet_what_they_are_for() -> None:
    sims = [play(seed) for seed in MEETING]
    assert sum(sim.pushes for sim in sims) > 1500
    assert sum(sim.master.life > 1 for sim in sims) > 10, "Masters are replaced"
    assert sum(sim.rollbacks > 0 for sim in sims) > 2, "rows are lost, and restored"
    assert sum(bool(sim.disk.complete) for sim in sims) > 5, "checkpoints are made"
    assert sum(sim.names > 4 for sim in sims) > 3, "pservers come and go"
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


def test_deaths_take_along_what_async_copies_do_not_have_yet() -> None:
    assert play(LOSING, "async").losses.seen > 0


def found(first: int) -> int:
    """Return the number of a history that goes wrong, -1 for none; ``first`` is one that did."""
    for seed in (first, *range(MOST)):
        try:
            PsSim(seed).play()
        except Exception:  # noqa: BLE001 - a violation, or whatever the bug leads to
            return int(seed)
    return -1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "first"),
    [
        (ps_bugs.fences_nobody, 1),
        (ps_bugs.acknowledges_alone, 0),
        (ps_bugs.believes_broken_copies, 4),
        (ps_bugs.tells_nobody, 2),
        (ps_bugs.goes_on_with_old_copies, 64),
        (ps_bugs.drops_what_came_early, 62),
        (ps_bugs.forgets_early_releases, 0),
        (ps_bugs.believes_old_words, 127),
        (ps_bugs.promotes_any_copy, 35),
        (ps_bugs.waits_for_the_dead, 1),
        (ps_bugs.moves_while_it_marks, 46),
        (ps_bugs.marks_without_trainers, 2),
        (ps_bugs.copies_rows_only, 17),
        # No history of some hundreds shows an owner that does not wait for the release of a bucket, a lagging backup
        # that a plan makes the owner, or a pserver that gets its old number back; test_bucket_machine.py,
        # test_placement.py and test_silence.py do.
        # In the shells:
        (ps_bugs.acknowledges_early, 0),
        (ps_bugs.dies_unheard, 1),
        (ps_bugs.retries_at_once, 15),
    ],
)
def test_planted_bug_is_found(bug: ps_bugs.Bug, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert found(first) >= 0, bug.__doc__
