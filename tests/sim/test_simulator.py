"""Random schedules on the real machines: what must hold at every step, and that every job comes to an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from edl.config import FaultTolerance, JobSpec, NodeRange
from edl.testing.__main__ import main
from edl.testing.sim.faults import SERVICES, SIZES, SLOTS, Fault, FaultKind, FaultPlan
from edl.testing.sim.injection import play_out
from edl.testing.sim.pairs import every_pair
from edl.testing.sim.schedules import BOUNDS, Result, Schedule, play
from edl.testing.sim.world import SimWorld
from edl.types import JobId
from tests.sim.batches import play_all, played
from tests.sim.planted import BUGS, Planted, seeds_needed
from tests.sim.shell_bugs import BUGS as SHELL_BUGS

BATCH = 100
SCHEDULES = 2400
"""With ``--soak``; the first two batches always run."""
OF_SERVICES = {"Flawed", "Failed", "ServiceFromWorker", "ServiceToWorker"}
OF_OTHER_SCHEDULES = {"ScaleRequested", "Unfit", "Depart", "Idle", "UseSlots", "Attach"}
"""Those of ``Schedule.resized`` and ``Schedule.slotted``; an ``Attach`` comes as ``NodeAttached``."""
SEEDS = Path(__file__).with_name("seeds.txt")


def known_seeds() -> list[int]:
    """Schedules that have found something before."""
    lines = SEEDS.read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def check(result: Result) -> None:
    if result.violation:
        pytest.fail(
            f"replay with: python -m edl.testing --seed={result.seed} --trace\n{result.violation}", pytrace=False
        )


@pytest.mark.parametrize("seed", known_seeds())
def test_known_seed(seed: int) -> None:
    check(play(Schedule.draw(seed)))


@pytest.mark.parametrize(
    "batch", [pytest.param(n, marks=() if n < 1 else pytest.mark.soak) for n in range(SCHEDULES // BATCH)]
)
def test_schedules(batch: int) -> None:
    play_all(Schedule.draw, range(batch * BATCH, (batch + 1) * BATCH), worlds=1.5)


def test_schedules_meet_every_variant() -> None:
    specs = [Schedule.draw(seed).spec for seed in range(SCHEDULES)]
    assert {(spec.nodes, spec.fault_tolerance) for spec in specs} == {(b, f) for b in BOUNDS for f in FaultTolerance}
    assert {0, 1, 2, 3, 5} <= {spec.max_restarts for spec in specs}
    kinds = {fault.kind for seed in range(SCHEDULES) for fault in Schedule.draw(seed).plan.faults}
    assert kinds == set(FaultKind) - set(SIZES) - set(SLOTS) - set(SERVICES)


def test_the_same_seed_is_the_same_history() -> None:
    histories: list[list[str]] = [[], []]
    for history in histories:
        play(Schedule.draw(5), history.append)
    assert histories[0] == histories[1]
    assert len(histories[0]) > 100


def test_a_fault_that_finds_nothing_to_strike_passes() -> None:
    world = SimWorld(1, JobSpec(JobId("empty"), NodeRange(1, 1)))
    play_out(world, FaultPlan(tuple(Fault(0.1, kind, 0.1) for kind in FaultKind), 1.0))
    assert not world.checks.worlds
    world.close()


@pytest.mark.slow
def test_schedules_meet_every_event() -> None:
    """But for those that come from services, and from checks of cards that no part of edl makes yet."""
    draw = Schedule.draw
    met = {(machine, event) for seed in range(150) for machine, _, event in played(draw, seed).pairs}
    never = {event for machine, _, event in every_pair() if (machine, event) not in met}
    assert never <= {*OF_SERVICES, *OF_OTHER_SCHEDULES}


@pytest.mark.slow
@pytest.mark.parametrize("planted", [*BUGS.values(), *SHELL_BUGS.values()], ids=[*BUGS, *SHELL_BUGS])
def test_planted_bug_is_found(planted: Planted) -> None:
    seeds, violation = seeds_needed(planted)
    print(f"found after {seeds} schedules: {violation}")
    assert seeds, violation


def test_command_line_counts_and_replays() -> None:
    ran = CliRunner().invoke(main, ["--runs=3", "--first-seed=5"])
    assert ran.exit_code == 0
    assert ran.stdout.startswith("3 schedules, ")
    assert ran.stdout.endswith("; 0 violations\n")
    replayed = CliRunner().invoke(main, ["--seed=5", "--trace"])
    assert replayed.exit_code == 0
    assert "seed 5: --nnodes=1:6, recover," in replayed.stdout
    assert "round 1: " in replayed.stdout


def test_command_line_says_how_to_replay_what_it_found() -> None:
    with BUGS["world_above_maximum"].plant():
        ran = CliRunner().invoke(main, ["--runs=3"])
    assert ran.exit_code == 1
    assert "python -m edl.testing --kind=plain --seed=1 --trace    # at " in ran.stdout
