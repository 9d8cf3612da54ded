"""Commits and checkpoints within a history, against a reference that goes step by step."""

from __future__ import annotations

import dataclasses
import random

import pytest

from edl.errors import SettingError
from edl.master.goodput.slot_times import NS
from edl.master.goodput.slot_use import SlotUse
from edl.simulate import advice
from edl.simulate.accounts import SavingRules, account
from edl.simulate.faults import FaultProcess, FaultType, TimedFault, draw
from edl.simulate.history import RestoredFrom, SimulatedHistory, SlowWindow, TrainingSpell
from edl.simulate.scenario import SimulatedScenario
from edl.simulate.shape import ClusterShape, JobShape, PhaseTimes
from edl.simulate.virtual import simulate


def history_of(spells: list[TrainingSpell], slow: tuple[SlowWindow, ...] = ()) -> SimulatedHistory:
    training = sum((one.end_ns - one.begin_ns) * one.slots - one.spoilt_ns for one in spells)
    return SimulatedHistory(spells[-1].end_ns, 1, {SlotUse.USEFUL: training}, 0, tuple(spells), slow)


def some_spells(chance: random.Random) -> list[TrainingSpell]:
    found, at_s = [], 0
    for number in range(chance.randint(1, 8)):
        length_s = chance.randint(1, 400)
        source = RestoredFrom.SCRATCH if not number else chance.choice([RestoredFrom.MEMORY, RestoredFrom.STORAGE])
        planned = chance.random() < 0.2
        begin, end = at_s * NS, (at_s + length_s) * NS
        found.append(TrainingSpell(begin, end, end, chance.randint(1, 4), source, planned))
        at_s += length_s + chance.randint(0, 30)
    return found


def reference(spells: list[TrainingSpell], rules: SavingRules) -> tuple[int, int, int]:  # noqa: PLR0915 - one pass
    """Seconds of slot time: useful, redone, commit. Second by second, all times being whole seconds."""
    step, every = int(rules.step_s), round(rules.checkpoint_s / rules.step_s) * int(rules.step_s)
    cycle = rules.commit_steps * step
    at = memory = 0
    writes = [(0, 0)]
    due = every
    counted: list[int] = []  # slots of each second of work that counts
    redone = commit = 0
    for number, spell in enumerate(spells):
        before = spells[number - 1] if number else None
        if before is not None and not (before.planned and spell.restored is RestoredFrom.MEMORY):
            done = [work for work, at_s in writes if at_s * NS <= before.halted_ns]
            to = min(at, memory if spell.restored is RestoredFrom.MEMORY else max(done))
            redone += sum(counted[to:])
            del counted[to:]
            at, memory = to, min(memory, to)
            writes = [one for one in writes if one[0] <= to] or [(0, 0)]
            due = max(writes[-1][0] + every, to + step)
        now, end = spell.begin_ns // NS, spell.halted_ns // NS
        blocked = 0
        saves = False
        while now < end:
            if blocked:
                blocked -= 1
                commit += spell.slots
                now += 1
                if not blocked and saves:
                    writes = [writes[-1], (at, now + int(rules.write_s))]
                    memory, saves = at, False
                continue
            if saves:
                blocked = int(rules.blocks_s)
                continue
            counted.append(spell.slots)
            at += 1
            now += 1
            if cycle and at % cycle == 0:
                memory = at
            if at >= due:
                due += every
                if writes[-1][1] <= now:
                    saves = True
        if spell.planned:
            memory = at
    return sum(counted), redone, commit


@pytest.mark.parametrize("seed", range(150))
def test_against_a_reference(seed: int) -> None:
    chance = random.Random(seed)
    spells = some_spells(chance)
    rules = SavingRules(
        chance.choice([1.0, 3.0]),
        chance.choice([0, 1, 4]),
        0.0,
        chance.choice([10.0, 37.0, 120.0]),
        chance.choice([1.0, 6.0]),
        chance.choice([0.0, 25.0, 80.0]),
    )
    found = account(history_of(spells), rules)
    amounts = tuple(found.amounts[use] / NS for use in (SlotUse.USEFUL, SlotUse.REDONE, SlotUse.COMMIT))
    assert amounts == reference(spells, rules)


def test_commits_that_block() -> None:
    """Each second of training is followed by a quarter of a second that commits."""
    spell = TrainingSpell(0, 1000 * NS, 1000 * NS, 2, RestoredFrom.SCRATCH)
    found = account(history_of([spell]), SavingRules(1.0, 1, 0.25, 0.0))
    assert (found.amounts[SlotUse.COMMIT], found.amounts[SlotUse.USEFUL]) == (400 * NS, 1600 * NS)


def test_slow_storage_skips_checkpoints() -> None:
    spell = TrainingSpell(0, 1000 * NS, 1000 * NS, 1, RestoredFrom.SCRATCH)
    rules = SavingRules(1.0, 1, 0.0, 100.0, 0.0, 60.0)
    slow = (SlowWindow(250 * NS, 550 * NS, 5.0),)
    calm, busy = account(history_of([spell]), rules), account(history_of([spell], slow), rules)
    assert (calm.checkpoints, calm.skipped) == (10, 0)
    assert (busy.checkpoints, busy.skipped) == (8, 2)  # that at 300 s takes until 600 s


def test_the_best_interval_is_near_that_of_young() -> None:
    """Exponential faults, checkpoints that block, no commits in memory."""
    blocks_s, every_s, horizon_s = 20.0, 8000.0, 30 * 86_400.0
    cluster, job = ClusterShape(1, 1), JobShape(1, 1, memory=False)
    faults = draw([FaultProcess(FaultType.WORKER, every_s)], cluster, horizon_s, 1)
    history = simulate(cluster, job, PhaseTimes(), faults, horizon_s)
    found = advice.interval(history, SavingRules(1.0, 0, 0.0, 600.0, blocks_s, 0.0))
    expected_s = advice.young_s(blocks_s, every_s)
    assert expected_s == pytest.approx(565.7, abs=0.1)
    assert expected_s / 1.5 < found.best < expected_s * 1.5
    lost = {one.value: 1 - one.of_cluster for one in found.tried}
    assert lost[min(lost)] > 1.5 * lost[found.best]
    assert lost[max(lost)] > 1.5 * lost[found.best]
    # Blocking and repeating cost about sqrt(2 x blocks / every), and each load its minute.
    assert lost[found.best] == pytest.approx((2 * blocks_s / every_s) ** 0.5 + 61.0 / every_s, rel=0.15)


def test_commits_in_memory_make_the_interval_free() -> None:
    scenario = SimulatedScenario(ClusterShape(3), JobShape(2, 2), (FaultProcess(FaultType.WORKER, 5_000.0),))
    history = dataclasses.replace(scenario, horizon_s=50_000.0).run()
    found = advice.interval(history, SavingRules(blocks_s=10.0))
    assert not found.tried
    assert found.why.startswith("no checkpoint was read")


def test_without_checkpoints_some_are_recommended() -> None:
    job = JobShape(2, 2, memory=False)
    scenario = SimulatedScenario(ClusterShape(3), job, (FaultProcess(FaultType.WORKER, 5_000.0),))
    history = dataclasses.replace(scenario, horizon_s=50_000.0).run()
    found = advice.interval(history, SavingRules(checkpoint_s=0.0, blocks_s=10.0))
    assert found.tried[0].value == 0 < found.best
    assert advice.interval(history, SavingRules(checkpoint_s=0.0)).best == 60.0


def test_only_spares_with_which_the_scenario_is_possible_are_tried() -> None:
    faults = (FaultProcess(FaultType.RACK, 400_000.0, lasts_s=100.0),)
    recorded = (TimedFault(10.0, 6, FaultType.WORKER),)
    scenario = SimulatedScenario(ClusterShape(8, rack_nodes=5), JobShape(4, 4), faults, recorded, horizon_s=5_000.0)
    assert [one.value for one in advice.spares(scenario).tried] == [4.0, 8.0]
    assert [one.value for one in advice.spares(dataclasses.replace(scenario, recorded=())).tried] == [
        1.0,
        2.0,
        4.0,
        8.0,
    ]


def test_spares_are_worth_their_price_while_nodes_are_under_repair() -> None:
    faults = (FaultProcess(FaultType.NODE, 400_000.0, lasts_s=40_000.0),)
    scenario = SimulatedScenario(ClusterShape(8), JobShape(8, 8), faults, horizon_s=8 * 86_400.0)
    found = advice.spares(scenario)
    assert 1 <= found.best <= 4
    assert found.tried[0].of_cluster < 0.7


@pytest.mark.parametrize("wrong", [{"step_s": 0.0}, {"checkpoint_s": 0.5}, {"commit_steps": -1}, {"write_s": -1.0}])
def test_bad_rules(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingError):
        SavingRules(**wrong)  # type: ignore[arg-type]
