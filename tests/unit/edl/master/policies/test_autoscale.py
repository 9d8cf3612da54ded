"""The autoscale policy against made-up curves of throughput, on a fake clock."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from edl.config import AutoscaleRules
from edl.master.policies.autoscale import (
    CERTAIN,
    HOLD_S,
    LOWER,
    NO_MEMORY,
    NOTHING_LEARNT,
    RETRY_S,
    SETTLE_S,
    AutoscaleMemory,
    CurrentWorld,
    Found,
    Learnt,
    handle_pace,
)

RULES = AutoscaleRules(enabled=True)
EVERY_S = 5.0
Curve = Callable[[int], float]


@dataclass
class Job:
    """A job that does what the policy asks for, and goes as quickly as its curve says."""

    curve: Curve
    nodes: int
    reach: int
    unit: int = 1
    lowest: int = 1
    highest: int = 16
    rules: AutoscaleRules = RULES
    noise: float = 0.0
    seed: int = 0
    advice: str = ""
    measure: str = "steps"
    change_s: float = 3.0
    memory: AutoscaleMemory = NO_MEMORY
    learnt: Learnt = NOTHING_LEARNT
    now_s: float = 1000.0
    round: int = 1
    changes: list[tuple[float, int]] = field(default_factory=list)
    slow: dict[str, float] = field(default_factory=dict)
    """Nodes that do a step in so many times the time; all wait for the slowest."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.placed = CurrentWorld(0, {}, 1, 1, 1, 1)

    def place(self) -> CurrentWorld:
        if self.round == self.placed.round and self.reach == self.placed.reach and self.measure == self.placed.measure:
            return self.placed
        slots = {f"n{i}": 2 for i in range(self.nodes)}
        fields = (self.round, slots, self.lowest, self.highest, self.unit, self.reach)
        self.placed = CurrentWorld(*fields, measure=self.measure, advice=self.advice)
        return self.placed

    def run(self, duration_s: float, quiet_s: float = float("inf")) -> Job:
        """For so long, or until nothing has been changed for ``quiet_s``."""
        until_s = self.now_s + duration_s
        began_s = self.now_s
        while self.now_s < until_s:
            last_s = self.changes[-1][0] if self.changes else began_s
            if self.now_s - last_s > quiet_s:
                break
            self.turn()
        return self

    def turn(self) -> None:
        self.now_s += EVERY_S
        place = self.place()
        drag = max((self.slow.get(node, 1.0) for node in place.slots), default=1.0)
        factor = max(0.05, self.rng.gauss(1.0, self.noise)) if self.noise else 1.0
        step_s = 2 * self.nodes / self.curve(self.nodes) * drag * factor
        for node in place.slots:
            look = handle_pace(self.memory, self.learnt, place, node, step_s, self.rules, self.now_s)
            self.memory, self.learnt = look.memory, look.learnt
            if look.size:
                self.resize(look.size)
                return

    def resize(self, nodes: int) -> None:
        assert self.lowest <= nodes <= min(self.highest, self.reach)
        assert nodes % self.unit == 0
        assert abs(nodes - self.nodes) == self.unit, "one step at a time"
        self.changes.append((self.now_s, nodes))
        self.nodes = nodes
        self.round += 1
        self.now_s += self.change_s


def linear(nodes: int) -> float:
    return 100.0 * nodes


def amdahl(serial: float) -> Curve:
    return lambda nodes: 100.0 / (serial + (1 - serial) / nodes)


def power(exponent: float) -> Curve:
    return lambda nodes: 70.0 * nodes**exponent


def saturating(most: int) -> Curve:
    return lambda nodes: 100.0 * min(nodes, most)


def cliff(at: int) -> Curve:
    """A second switch: everything beyond goes at half the speed."""
    return lambda nodes: 100.0 * nodes if nodes < at else 50.0 * nodes


def gain(curve: Curve, nodes: int, unit: int = 1) -> float:
    """Gain of the step up to this size."""
    low = nodes - unit
    return (curve(nodes) - curve(low)) / unit / (curve(low) / low)


def worth(curve: Curve, least: float, job: Job) -> int:
    """Largest size that can be reached by steps that are all worth it."""
    nodes = -(-job.lowest // job.unit) * job.unit
    while nodes + job.unit <= min(job.highest, job.reach) and gain(curve, nodes + job.unit, job.unit) >= least:
        nodes += job.unit
    return nodes


def verdict(learnt: Learnt, nodes: int) -> Found:
    return learnt.rung(nodes).found


class TestCurves:
    @pytest.mark.parametrize("start", [1, 3, 8])
    def test_linear_takes_all_there_are(self, start: int) -> None:
        job = Job(linear, start, reach=8).run(3600)
        assert job.nodes == 8

    @pytest.mark.parametrize("start", [1, 4, 5, 12])
    def test_saturating_stops_where_more_bring_nothing(self, start: int) -> None:
        job = Job(saturating(4), start, reach=12).run(3500)
        assert job.nodes == 4

    @pytest.mark.parametrize("start", [1, 3, 5])
    def test_a_cliff_is_not_stepped_over(self, start: int) -> None:
        job = Job(cliff(6), start, reach=12).run(3000)
        assert job.nodes == 5

    def test_beyond_a_cliff_it_stays_where_it_is_worth_it(self) -> None:
        """It climbs; it does not search for other hills. The documentation says so."""
        assert Job(cliff(6), 8, reach=12).run(3000).nodes == 12

    @pytest.mark.parametrize("start", [1, 2, 6, 12])
    def test_amdahl(self, start: int) -> None:
        job = Job(amdahl(0.2), start, reach=12)
        least, most = worth(job.curve, 0.6, job), worth(job.curve, 0.6 * LOWER, job)
        assert 1 < least < most < 12
        assert least <= job.run(3500).nodes <= most

    def test_units(self) -> None:
        job = Job(saturating(6), 2, reach=16, unit=2, lowest=2).run(3000)
        assert job.nodes == 6
        assert "2 more brought 0 % of an average node, less than 60 %" in job.memory.reason

    def test_a_slow_node_among_the_spares_is_left_out_again(self) -> None:
        job = Job(linear, 2, reach=4, slow={"n3": 3.0}).run(3000)
        assert job.nodes == 3
        assert len(job.changes) == 3
        assert verdict(job.learnt, 4) is Found.BAD


class TestRandom:
    """Thousands of jobs with curves, bounds, noise and rules of all kinds."""

    @staticmethod
    def drawn(seed: int) -> Job:
        rng = random.Random(seed)
        unit = rng.choice((1, 1, 1, 2))
        highest = rng.randrange(2, 7) * unit
        reach = rng.randrange(unit, highest + 1)
        kind = rng.randrange(4)
        curve: Curve = (
            linear,
            amdahl(rng.uniform(0.0, 0.6)),
            saturating(rng.randrange(1, highest + 1)),
            power(rng.uniform(0.2, 1.0)),
        )[kind]
        rules = AutoscaleRules(True, rng.choice((0.3, 0.6, 0.9)), rng.choice((0.0, 30.0, 60.0, 300.0)))
        start = rng.randrange(1, reach // unit + 1) * unit
        noise = rng.choice((0.0, 0.005, 0.02))
        return Job(curve, start, reach, unit, unit, highest, rules, noise, seed)

    @pytest.mark.parametrize("block", [pytest.param(n, marks=() if n < 4 else pytest.mark.soak) for n in range(20)])
    def test_converges_and_rests(self, block: int) -> None:
        for seed in range(block * 100, block * 100 + 100):
            job = self.drawn(seed)
            cooldown_s, efficiency = job.rules.cooldown_s, job.rules.efficiency
            job.run(RETRY_S - 100, quiet_s=cooldown_s + 240)
            told = f"seed {seed}: {job}"
            # Within the hysteresis, give or take one step; noise may turn a verdict that is close.
            doubt = 3 * CERTAIN if job.noise else 0.0
            least = worth(job.curve, efficiency + doubt, job)
            most = worth(job.curve, efficiency * LOWER - doubt, job)
            if cooldown_s <= 60:
                assert least - job.unit <= job.nodes <= most + job.unit, told
            # Every size is tried once, in both directions at most, and left once.
            assert len(job.changes) <= 2 * job.highest // job.unit, told
            times = [at_s for at_s, _ in job.changes]
            gaps = [after - before for before, after in itertools.pairwise(times)]
            assert all(gap >= max(cooldown_s, SETTLE_S + HOLD_S) for gap in gaps), told

    @pytest.mark.parametrize("seed", range(8))
    def test_days_of_noise_bring_few_changes(self, seed: int) -> None:
        """20 % of noise from one measurement to the next, right at the threshold."""
        curve: Curve = lambda nodes: 100.0 * nodes**0.73  # noqa: E731 - gains of 0.66 to 0.71
        job = Job(curve, 1, reach=4, highest=4, noise=0.2, seed=seed, rules=AutoscaleRules(True, 0.68, 10.0))
        job.run(8 * 3600)
        # The first climb and way back; then a step that was found bad is tried again after 1, 2 and 4 hours.
        assert len(job.changes) <= 2 * 3 + 2 * 3 * 3, job.changes


class TestRules:
    def test_nothing_before_the_world_has_settled(self) -> None:
        job = Job(linear, 2, reach=4)
        job.turn()
        assert "just begun" in job.memory.reason
        assert job.memory.count == 0
        job.run(SETTLE_S)
        assert job.memory.count > 0

    def test_slow_first_steps_do_not_count(self) -> None:
        job = Job(lambda _: 1.0, 2, reach=4)
        job.run(SETTLE_S)
        job.curve = linear
        job.run(40)
        assert job.memory.mean == pytest.approx(200.0, rel=0.2)

    def test_a_proposal_has_to_hold(self) -> None:
        job = Job(linear, 2, reach=4, rules=dataclasses.replace(RULES, cooldown_s=0.0))
        while not job.memory.proposal:
            job.turn()
        first_s = job.now_s
        assert job.memory.proposal == 3
        while not job.changes:
            job.turn()
        assert job.changes[0][0] - first_s >= HOLD_S

    def test_a_proposal_that_vanishes_is_not_acted_upon(self) -> None:
        job = Job(linear, 2, reach=4, lowest=2, rules=dataclasses.replace(RULES, cooldown_s=0.0))
        while not job.memory.proposal:
            job.turn()
        job.reach = 2
        job.run(300)
        assert (job.nodes, job.changes) == (2, [])
        assert "a 3rd would be tried, but no node is available" in job.memory.reason

    def test_the_cooldown_begins_with_any_change_of_size(self) -> None:
        job = Job(linear, 2, reach=8).run(55)
        assert (job.memory.proposal, job.changes) == (3, [])
        assert "60 s after the last change" in job.memory.reason
        job.nodes, job.round = 4, 2  # a node came
        job.run(60)
        assert job.changes == []
        job.run(30)
        assert job.nodes == 5

    def test_a_world_of_the_same_size_does_not(self) -> None:
        job = Job(linear, 2, reach=8).run(50)
        job.round = 2
        job.run(45)
        assert job.nodes == 3

    def test_a_bad_step_is_tried_again_later_and_ever_more_rarely(self) -> None:
        job = Job(saturating(2), 1, reach=4).run(RETRY_S * 0.9)
        assert job.nodes == 2
        assert [nodes for _, nodes in job.changes] == [2, 3, 2]
        job.run(RETRY_S * 0.5)
        assert [nodes for _, nodes in job.changes] == [2, 3, 2, 3, 2]
        job.run(RETRY_S * 1.2)
        assert len(job.changes) == 5
        job.curve = linear
        job.run(RETRY_S * 2)
        assert job.nodes == 4

    def test_a_job_that_has_changed_is_learnt_from_scratch(self) -> None:
        job = Job(saturating(2), 1, reach=4).run(1200)
        assert job.nodes == 2
        job.curve = lambda nodes: 40.0 * nodes
        job.run(1200)
        assert job.nodes == 4

    def test_other_settings_are_learnt_from_scratch(self) -> None:
        job = Job(saturating(2), 1, reach=4).run(1200)
        job.measure, job.curve = "batch 512", lambda nodes: 190.0 + nodes
        job.run(EVERY_S)
        assert job.learnt == Learnt("batch 512")

    def test_advice_is_shown_and_not_acted_upon(self) -> None:
        job = Job(linear, 2, reach=4, advice="statefulset/train (external) decides").run(600)
        assert (job.memory.proposal, job.changes) == (3, [])
        assert job.memory.reason.endswith("a 3rd is unknown: trying; statefulset/train (external) decides")

    def test_what_is_known_outlives_the_master(self) -> None:
        job = Job(saturating(3), 1, reach=6).run(1200)
        assert job.nodes == 3
        before = len(job.changes)
        job.memory, job.now_s = NO_MEMORY, 7.0  # another host's clock
        job.run(RETRY_S * 0.9)
        assert len(job.changes) == before
        job.run(RETRY_S * 0.3)
        assert len(job.changes) == before + 2

    def test_a_master_that_dies_in_a_trial(self) -> None:
        job = Job(saturating(3), 3, reach=4)
        while not job.changes:
            job.turn()
        job.memory, job.now_s = NO_MEMORY, 7.0
        job.run(200)
        assert (job.nodes, verdict(job.learnt, 4)) == (3, Found.BAD)

    def test_sizes_that_are_known_to_be_good_are_taken_up_again(self) -> None:
        job = Job(linear, 1, reach=4).run(1200)
        assert job.nodes == 4
        job.nodes, job.reach, job.round = 2, 2, job.round + 1  # two are lost
        job.run(300)
        job.reach = 4
        job.turn()
        assert "a 3rd brought 100 % of an average node: growing" in job.memory.reason
        job.run(400)
        assert job.nodes == 4

    @pytest.mark.parametrize("step_s", [0.0, -1.0, float("inf"), float("nan")])
    def test_nonsense_is_not_heard(self, step_s: float) -> None:
        job = Job(linear, 1, reach=4).run(50)
        look = handle_pace(job.memory, job.learnt, job.place(), "n0", step_s, RULES, job.now_s)
        assert look.memory.count == job.memory.count

    def test_strangers_are_not_heard(self) -> None:
        job = Job(linear, 1, reach=4).run(50)
        assert handle_pace(job.memory, job.learnt, job.place(), "n9", 1.0, RULES, job.now_s).memory.reported == {}


def test_the_reason_has_the_numbers() -> None:
    job = Job(lambda nodes: 100.0 * (1, 1.9, 2.6, 3.1, 3.5)[nodes - 1], 1, reach=5)
    job.rules = dataclasses.replace(RULES, efficiency=0.5)
    while job.nodes < 4:
        job.turn()
    job.turn()
    while not job.memory.proposal:
        job.turn()
    shown = "4 nodes: 310 worker steps/s, 3.1x of one (78 % a node); a 5th is unknown: trying"
    assert job.memory.reason.startswith(shown)
