"""Whole simulated jobs: nothing of the slot time is lost or counted twice, and the goodput is what theory says."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from edl.errors import SettingError
from edl.master import events as ev
from edl.master.goodput.slot_times import NS
from edl.master.goodput.slot_use import SlotUse
from edl.master.invariants import state_violations, step_violations
from edl.master.machine import step_all
from edl.master.state import MasterState
from edl.simulate.accounts import SavingRules, SimulatedAccount, account
from edl.simulate.faults import TRAITS, FaultDuration, FaultProcess, FaultType, TimedFault, draw
from edl.simulate.history import RestoredFrom, SimulatedHistory
from edl.simulate.shape import ClusterShape, JobShape, PhaseTimes
from edl.simulate.virtual import simulate

DAY_S = 86_400.0
QUICK = PhaseTimes(noticed_worker_s=0.0, stop_s=0.0, connect_s=60.0, restore_s=0.0, start_s=0.0, boot_s=0.0, hold_s=0.0)


def checked(state: MasterState, events: Sequence[ev.Event], now_s: float) -> ev.Decision:
    """The Master's step, held to its invariants."""
    decision = step_all(state, events, now_s)
    assert not list(state_violations(decision.state))
    assert not list(step_violations(state, decision))
    return decision


def assert_exact(history: SimulatedHistory, found: SimulatedAccount) -> None:
    """All nodes' time is accounted for, to the nanosecond, and the spells are the training that the Master counted."""
    whole = history.nodes * history.duration_ns
    assert sum(history.uses.values()) + history.repair_ns == whole
    assert sum(found.amounts.values()) + found.repair_ns == whole
    assert all(amount >= 0 for amount in found.amounts.values())
    assert sum((one.end_ns - one.begin_ns) * one.slots - one.spoilt_ns for one in history.spells) == history.training_ns


def some_job(seed: int) -> tuple[SimulatedHistory, SimulatedAccount]:
    """A small job under faults of all kinds."""
    chance = random.Random(seed)
    nodes = chance.randint(3, 9)
    replica = chance.choice([1, 1, 2])
    least = chance.randint(replica, nodes - 1) // replica * replica or replica
    cluster = ClusterShape(nodes, 8, chance.choice([0, 2]) or 3, 4, racks_known=chance.random() < 0.5)
    job = JobShape(
        least,
        chance.randint(least, nodes),
        replica,
        replica,
        chance.choice([0, 1, replica]),
        memory=chance.random() < 0.7,
        in_process=chance.random() < 0.7,
    )
    processes = [
        FaultProcess(
            kind,
            chance.uniform(0.2, 3) * 20_000,
            chance.choice([0.7, 1.0, 2.0]),
            0.0 if traits.duration is FaultDuration.NONE else 900.0,
            3.0 if traits.slows else None,
            varies=True,
        )
        for kind, traits in TRAITS.items()
    ]
    faults = draw(processes, cluster, DAY_S, seed)
    history = simulate(cluster, job, PhaseTimes(), faults, DAY_S, checked)
    saving = SavingRules(
        chance.choice([0.5, 7.0]), chance.choice([0, 1, 5]), 0.1, 300.0, chance.choice([0, 20.0]), 40.0
    )
    return history, account(history, saving)


@pytest.mark.parametrize("seed", range(8))
def test_every_nanosecond_is_counted_once(seed: int) -> None:
    history, found = some_job(seed)
    assert not history.ended
    assert history.worlds > 3
    assert_exact(history, found)


def test_the_same_seed_gives_the_same_history() -> None:
    assert some_job(3) == some_job(3)


def test_without_faults_all_but_the_start_is_useful() -> None:
    history = simulate(ClusterShape(4), JobShape(4, 4), PhaseTimes(), (), DAY_S)
    found = account(history, SavingRules())
    assert_exact(history, found)
    times = PhaseTimes()
    begun_ns = round((times.boot_s + times.start_s + times.connect_s) * NS)
    assert found.amounts[SlotUse.USEFUL] == 4 * (history.duration_ns - begun_ns)


@pytest.mark.parametrize("seed", range(2))
def test_one_failing_node_is_down_for_the_share_that_theory_says(seed: int) -> None:
    """Exponential faults and a fixed recovery: a renewal process. The world trains for ``every`` on average, then pays
    the fixed time. Of n cycles, the standard error of the share is about share x (1 - share) / sqrt(n)."""
    every_s, horizon_s = 1500.0, 8 * DAY_S
    cluster, job = ClusterShape(1, 1), JobShape(1, 1)
    faults = draw([FaultProcess(FaultType.WORKER, every_s)], cluster, horizon_s, seed)
    history = simulate(cluster, job, QUICK, faults, horizon_s)
    found = account(history, SavingRules(0.001))
    expected = every_s / (every_s + QUICK.connect_s)
    # Faults that come while no worker runs hit nothing; the next one is memoryless.
    error = expected * (1 - expected) / math.sqrt(history.worlds)
    assert abs(found.goodput - expected) < 4 * error + 1e-4
    assert history.worlds > 300


def test_a_silent_node_stalls_the_others_until_it_is_noticed() -> None:
    fault = TimedFault(1000.0, 1, FaultType.NODE, 500.0)
    history = simulate(ClusterShape(3), JobShape(2, 3), PhaseTimes(noticed_node_s=3.0), (fault,), 2000.0)
    found = account(history, SavingRules(0.001))
    assert_exact(history, found)
    # Two nodes wait for 3 s, the silent one for half of it: then its stream breaks, and it counts as lost.
    assert found.stalled_ns == round((3.0 + 3.0 + 1.5) * NS)
    assert found.amounts[SlotUse.LOST] == round(1.5 * NS)
    assert 0 <= found.amounts[SlotUse.REDONE] - found.stalled_ns <= 3 * NS / 1000, "and less than a step each"
    assert found.repair_ns == round((500.0 - 3.0) * NS)


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    fault = TimedFault(1000.0, 1, FaultType.NODE, 5000.0)
    with_spare = simulate(ClusterShape(4), JobShape(3, 3), PhaseTimes(), (fault,), 9000.0)
    without = simulate(ClusterShape(3), JobShape(3, 3), PhaseTimes(), (fault,), 9000.0)
    assert (with_spare.waits, without.waits) == (0, 1)
    assert 4900 * NS < without.waiting_ns == without.longest_wait_ns < 5100 * NS


@pytest.mark.parametrize(("known", "source"), [(True, RestoredFrom.MEMORY), (False, RestoredFrom.STORAGE)])
def test_copies_on_other_racks_survive_a_rack(known: bool, source: RestoredFrom) -> None:
    """Each node holds a part of the state, and the copy of another one's."""
    cluster = ClusterShape(6, 8, 3, racks_known=known)
    fault = TimedFault(1000.0, 0, FaultType.RACK, 100.0)
    history = simulate(cluster, JobShape(3, 6, state_nodes=0), PhaseTimes(), (fault,), 3000.0)
    assert history.spells[1].restored is source


def test_a_world_with_fewer_nodes_than_a_state_is_spread_over() -> None:
    """Its nodes hold all parts between them: nothing is loaded from storage."""
    faults = [TimedFault(1000.0 * (one + 1), one, FaultType.NODE, 1e6) for one in range(4)]
    history = simulate(ClusterShape(8), JobShape(4, 8, state_nodes=8), PhaseTimes(), faults, 6000.0)
    assert [spell.slots for spell in history.spells] == [8, 7, 6, 5, 4]
    assert {spell.restored for spell in history.spells[1:]} == {RestoredFrom.MEMORY}


def test_a_job_without_commits_in_memory_returns_to_its_checkpoint() -> None:
    fault = TimedFault(1000.0, 0, FaultType.WORKER)
    history = simulate(ClusterShape(2), JobShape(2, 2, memory=False), PhaseTimes(), (fault,), 3000.0)
    found = account(history, SavingRules(1.0, 0, 0.0, 300.0, 0.0, 10.0))
    assert found.rollbacks[RestoredFrom.STORAGE] == 1
    assert 90 <= found.lost_steps <= 100  # trained for about 995 s, the last checkpoint was at 900


def test_a_store_that_does_not_answer_delays_recovery_and_not_training() -> None:
    quiet = (TimedFault(500.0, 0, FaultType.STORE, 400.0),)
    calm = account(simulate(ClusterShape(2), JobShape(2, 2), PhaseTimes(), (), 2000.0), SavingRules())
    away = account(simulate(ClusterShape(2), JobShape(2, 2), PhaseTimes(), quiet, 2000.0), SavingRules())
    assert calm.amounts == away.amounts
    both = (*quiet, TimedFault(600.0, 0, FaultType.WORKER))
    hit = account(simulate(ClusterShape(2), JobShape(2, 2), PhaseTimes(), both, 2000.0), SavingRules())
    assert hit.stalled_ns == 2 * 300 * NS


def test_stragglers_slow_the_world_while_they_are_members() -> None:
    faults = (TimedFault(1000.0, 0, FaultType.STRAGGLER, 500.0, 2.0),)
    found = account(simulate(ClusterShape(2), JobShape(2, 2), PhaseTimes(), faults, 3000.0), SavingRules())
    assert found.slowed_ns == pytest.approx(2 * 250 * NS, abs=10)


def test_a_drained_node_costs_no_step() -> None:
    faults = (TimedFault(1000.0, 0, FaultType.DRAIN, 500.0),)
    history = simulate(ClusterShape(3), JobShape(2, 3), PhaseTimes(), faults, 3000.0)
    found = account(history, SavingRules(0.001))
    assert_exact(history, found)
    assert (found.lost_steps, found.amounts[SlotUse.REDONE]) == (0, 0)
    assert history.repair_ns > 490 * NS


def test_a_fault_of_a_node_that_does_not_exist() -> None:
    fault = TimedFault(1.0, 7, FaultType.NODE)
    with pytest.raises(SettingError, match="unit of a node fault=7: must be from 0 to 1"):
        simulate(ClusterShape(2), JobShape(2, 2), PhaseTimes(), (fault,), 10.0)
