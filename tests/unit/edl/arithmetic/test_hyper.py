"""Batches, weights and LR factors: the arithmetic that every worker and the Master share."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction

import pytest

from edl.arithmetic.hyper import (
    StepPlan,
    describe,
    environment,
    factor_at,
    from_environment,
    lr_rule,
    settle,
    step_plan,
)
from edl.arithmetic.plan import split
from edl.config import MOST_SAMPLES, HyperPolicy, LrRule
from edl.errors import SettingError, StateError
from edl.wire.records import NO_SETTINGS, Settings


def settings(**fields: int) -> Settings:
    return Settings(number=1, **fields)  # type: ignore[arg-type]


def all_sizes(plan: StepPlan) -> list[tuple[int, ...]]:
    return [plan.sizes(rank) for rank in range(len(plan.local))]


@pytest.mark.parametrize(
    ("total", "parts", "expected"),
    [(10, 3, (4, 3, 3)), (2, 5, (1, 1, 0, 0, 0)), (0, 2, (0, 0)), (7, 1, (7,))],
)
def test_parts_differ_by_at_most_one_and_the_larger_come_first(
    total: int, parts: int, expected: tuple[int, ...]
) -> None:
    assert split(total, parts) == expected


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_global_batch_that_does_not_divide_is_split_unevenly() -> None:
    plan = step_plan(settings(global_batch=50, local_batch=8), batch_size=32, workers=3)
    assert (plan.local, plan.micros, plan.micro_batch) == ((17, 17, 16), 3, 6)
    assert all_sizes(plan) == [(6, 6, 5), (6, 6, 5), (6, 5, 5)]
    assert [plan.offset(rank) for rank in range(3)] == [0, 17, 34]


def test_without_a_global_batch_each_worker_keeps_its_own() -> None:
    assert step_plan(NO_SETTINGS, batch_size=32, workers=4) == StepPlan(128, (32,) * 4, 1, 32)
    assert step_plan(settings(local_batch=16), batch_size=32, workers=4) == StepPlan(64, (16,) * 4, 1, 16)


def test_the_scripts_own_batch_size_is_what_a_worker_takes_at_once() -> None:
    plan = step_plan(settings(global_batch=64), batch_size=8, workers=2)
    assert (plan.local, plan.micros) == ((32, 32), 4)
    assert step_plan(settings(global_batch=64), batch_size=0, workers=2).micros == 1


def test_workers_without_a_sample_take_stand_ins() -> None:
    plan = step_plan(settings(global_batch=3), batch_size=8, workers=5)
    assert plan.local == (1, 1, 1, 0, 0)
    assert all_sizes(plan) == [(1,), (1,), (1,), (0,), (0,)]


def test_logical_ranks_live_on_the_workers_and_are_cut_the_same_wherever_they_are() -> None:
    held = settings(global_batch=40, local_batch=3, logical_ranks=5)
    for workers in range(1, 6):
        plan = step_plan(held, 8, workers)
        found: dict[int, list[int]] = {}
        for rank in range(workers):
            for size, logical in zip(plan.sizes(rank), plan.logical(rank), strict=True):
                assert (size == 0) == (logical == -1)
                found.setdefault(logical, []).append(size)
        found.pop(-1, None)
        assert found == {logical: [3, 3, 2] for logical in range(5)}
        assert plan.global_batch == sum(plan.local) == 40


def test_logical_ranks_without_a_global_batch_have_the_scripts_batch_each() -> None:
    for workers in (1, 2, 4):
        plan = step_plan(settings(logical_ranks=4), 8, workers)
        assert (plan.global_batch, plan.micros, plan.micro_batch) == (32, 4 // workers, 8)


def test_the_weights_of_every_step_add_up_to_one_exactly() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        workers = draw.randint(1, 40)
        logical = draw.choice((0, 0, draw.randint(workers, 60)))
        total = draw.randint(1, 700) if not logical else logical * draw.randint(1, 20)
        held = settings(
            global_batch=draw.choice((0, total)),
            local_batch=draw.choice((0, draw.randint(1, 64))),
            logical_ranks=logical,
        )
        plan = step_plan(held, draw.randint(1, 64), workers)
        sizes = all_sizes(plan)
        weights = [Fraction(size, plan.global_batch) for rank in sizes for size in rank]
        assert sum(weights) == 1
        assert [sum(rank) for rank in sizes] == list(plan.local)
        assert {len(rank) for rank in sizes} == {plan.micros}
        assert max(map(max, sizes)) == plan.micro_batch
        assert not held.local_batch or plan.micro_batch <= held.local_batch
        if not logical:
            assert max(plan.local) - min(plan.local) <= 1
        assert all(plan.offset(rank) == sum(plan.local[:rank]) for rank in range(workers))


@pytest.mark.parametrize(
    ("held", "batch_size", "workers", "says"),
    [
        (NO_SETTINGS, 0, 2, "the batch size is not known"),
        (NO_SETTINGS, -3, 2, "batch_size=-3"),
        (settings(logical_ranks=4, global_batch=8), 2, 5, "--logical-ranks=4 cannot be placed on 5 workers"),
        (settings(logical_ranks=4, global_batch=10), 2, 2, "10 samples cannot be split evenly over 4 logical ranks"),
        (NO_SETTINGS, 8, 0, "a world of 0 workers"),
    ],
)
def test_steps_that_are_not_possible(held: Settings, batch_size: int, workers: int, says: str) -> None:
    with pytest.raises(StateError, match=says):
        step_plan(held, batch_size, workers)


# --- policies --------------------------------------------------------------------------------------------------------


def test_nothing_is_prescribed_unless_somebody_asks() -> None:
    assert settle(HyperPolicy(warmup=5, reference=3), NO_SETTINGS, 4, 0) is NO_SETTINGS
    assert not HyperPolicy(warmup=5).prescribes
    assert HyperPolicy(rule=LrRule.SQRT).prescribes


def test_the_global_batch_is_kept_and_the_lr_with_it() -> None:
    policy = HyperPolicy(global_batch=512, rule=LrRule.LINEAR)
    first = settle(policy, NO_SETTINGS, 4, 0)
    assert (first.number, first.global_batch, first.size, first.reference, first.factor) == (1, 512, 512, 512, 1.0)
    second = settle(policy, first, 3, 10, was=4)
    assert (second.number, second.factor, second.ramp_begin) == (2, 1.0, 10)
    assert settle(policy, second, 3, 20, was=3) is second


@pytest.mark.parametrize(
    ("rule", "factor"),
    [(LrRule.NONE, 1.0), (LrRule.LINEAR, 4.0), (LrRule.SQRT, 2.0), (LrRule.ADASCALE, 1.0), (LrRule.USER, 1.0)],
)
def test_rules(rule: LrRule, factor: float) -> None:
    assert lr_rule(rule, 2, 8) == lr_rule(rule.value, 2, 8) == factor
    assert settle(HyperPolicy(rule=rule, reference=2, scale=0.5), NO_SETTINGS, 8, 0).factor == factor / 2


def test_logical_ranks_keep_the_size_whatever_the_workers() -> None:
    policy = HyperPolicy(logical_ranks=8, rule=LrRule.LINEAR, reference=4)
    first = settle(policy, NO_SETTINGS, 8, 0)
    assert settle(policy, first, 3, 10, was=8).factor == first.factor == 2.0


def test_a_changed_factor_comes_in_over_the_warm_up() -> None:
    policy = HyperPolicy(rule=LrRule.LINEAR, warmup=10, reference=2)
    first = settle(policy, NO_SETTINGS, 2, 0)
    assert (first.factor, first.ramp_steps) == (1.0, 0)
    second = settle(policy, first, 4, 100, was=2)
    assert [factor_at(second, commit) for commit in (90, 100, 105, 110, 1000)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    third = settle(policy, second, 2, 105, was=4)
    assert [factor_at(third, commit) for commit in (105, 110, 115)] == [1.5, 1.25, 1.0]


def test_a_job_that_begins_at_another_size_warms_up_from_the_scripts_own_lr() -> None:
    policy = HyperPolicy(rule=LrRule.LINEAR, warmup=10, reference=1)
    assert [factor_at(settle(policy, NO_SETTINGS, 4, 0), commit) for commit in (0, 10)] == [1.0, 4.0]
    resumed = settle(policy, NO_SETTINGS, 4, 5000)
    assert factor_at(resumed, 5000) == 4.0, "nobody knows what it was, so it is not disturbed"
    by_hand = settle(policy, NO_SETTINGS, 4, 5000, was=4)
    assert factor_at(by_hand, 5000) == 1.0, "nothing was prescribed until now"


def test_a_ramp_goes_on_through_a_change_of_something_else() -> None:
    policy = HyperPolicy(global_batch=64, scale=3.0, warmup=10)
    first = settle(HyperPolicy(global_batch=64), NO_SETTINGS, 4, 0)
    ramp = settle(policy, first, 4, 100, was=4)
    other = settle(policy, ramp, 3, 104, was=4)
    assert other.number == ramp.number + 1
    for commit in range(104, 115):
        assert factor_at(other, commit) == pytest.approx(factor_at(ramp, commit), rel=1e-15)


def test_a_world_that_begins_before_the_ramp_did_begins_it_again() -> None:
    policy = HyperPolicy(scale=3.0, warmup=10)
    ramp = settle(policy, settings(), 4, 100, was=4)
    back = settle(policy, ramp, 4, 90, was=4)
    assert [factor_at(back, commit) for commit in (90, 95, 100)] == [1.0, 2.0, 3.0]
    at_once = settle(dataclasses.replace(policy, warmup=0), settings(), 4, 100, was=4)
    assert settle(dataclasses.replace(policy, warmup=0), at_once, 4, 90, was=4) is at_once
    assert factor_at(at_once, 90) == 3.0


def test_whatever_happens_factors_are_continuous_and_numbers_rise_with_every_change() -> None:
    draw = random.Random(2)
    for _ in range(300):
        policy = HyperPolicy(
            global_batch=draw.choice((0, 60)), rule=draw.choice(list(LrRule)), warmup=draw.choice((5, 20)), reference=4
        )
        held, workers, commit = settle(policy, NO_SETTINGS, 4, 0), 4, 0
        for _ in range(20):
            commit += draw.randint(0, 15)
            was, workers = workers, draw.choice((workers, draw.randint(1, 9)))
            if draw.random() < 0.3:
                policy = dataclasses.replace(policy, scale=draw.choice((0.5, 1.0, 2.0)))
            after = settle(policy, held, workers, commit, was)
            assert factor_at(after, commit) == pytest.approx(factor_at(held, commit), rel=1e-12)
            assert (after is held) or after.number == held.number + 1
            assert settle(policy, after, workers, commit + draw.randint(0, 3), workers) is after
            assert factor_at(after, after.ramp_begin + after.ramp_steps) == after.factor
            steps = [factor_at(after, commit + step) for step in range(after.ramp_steps + 2)]
            assert steps in (sorted(steps), sorted(steps, reverse=True))
            held = after


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"global_batch": -1}, "--global-batch=-1: must be from 0"),
        ({"local_batch": MOST_SAMPLES + 1}, "--local-batch=1000000001: must be from 0"),
        ({"scale": 0.0}, "--lr-scale=0: must be more than 0"),
        ({"scale": float("nan")}, "--lr-scale=nan: must be more than 0"),
        ({"scale": float("inf")}, "--lr-scale=inf: must be more than 0, and finite"),
        ({"global_batch": 10, "logical_ranks": 4}, "--global-batch=10: cannot be split evenly over --logical-ranks=4"),
    ],
)
def test_policies_that_are_not_possible(fields: dict[str, float], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        HyperPolicy(**fields)  # type: ignore[arg-type]


# --- environment -----------------------------------------------------------------------------------------------------


def test_the_environment_of_a_worker() -> None:
    held = settle(HyperPolicy(global_batch=50, local_batch=8, scale=0.3), NO_SETTINGS, 3, 0)
    assert environment(held, 3, 2) == {
        "EDL_SETTINGS": "1",
        "EDL_GLOBAL_BATCH": "50",
        "EDL_LOCAL_BATCH": "16",
        "EDL_MICRO_BATCH": "6",
        "EDL_ACCUMULATION": "3",
        "EDL_LOGICAL_RANKS": "",
        "EDL_LR_FACTOR": "0.3",
    }


def test_what_is_not_prescribed_is_empty_there() -> None:
    nothing = environment(NO_SETTINGS, 3, 2)
    told = {"EDL_SETTINGS": "0", "EDL_ACCUMULATION": "1", "EDL_LR_FACTOR": "1.0"}
    assert nothing == {**dict.fromkeys(nothing, ""), **told}
    crowded = environment(settings(global_batch=8, logical_ranks=2), 3, 2)
    assert crowded["EDL_LOCAL_BATCH"] == "", "workers say what is wrong, not the launcher"


@pytest.mark.parametrize("batch_size", [3, 64])
@pytest.mark.parametrize("local", [0, 8])
@pytest.mark.parametrize("logical", [0, 5])
def test_the_environment_leads_to_the_same_steps(local: int, logical: int, batch_size: int) -> None:
    held = settings(global_batch=50, local_batch=local, logical_ranks=logical)
    read = from_environment(environment(held, 4, 1))
    assert step_plan(read, batch_size, 4) == step_plan(held, batch_size, 4)


def test_the_environment_tells_the_settings_number_and_lr_factor() -> None:
    held = Settings(number=7, factor=0.25)
    read = from_environment(environment(held, 4, 1))
    assert (read.number, factor_at(read, 0)) == (7, 0.25)


def test_an_environment_that_says_nothing_or_nonsense() -> None:
    assert from_environment({}) is NO_SETTINGS
    assert from_environment({"EDL_GLOBAL_BATCH": "64"}) is NO_SETTINGS, "that is the launcher's option"
    assert from_environment({"EDL_SETTINGS": "2", "EDL_LR_FACTOR": "fast", "EDL_MICRO_BATCH": "-1"}).factor == 1.0


def test_in_words() -> None:
    held = settle(HyperPolicy(global_batch=64, local_batch=8, logical_ranks=4), NO_SETTINGS, 2, 0)
    assert describe(held) == "global batch 64, local batch 8, 4 logical ranks, LR factor 1 (no rule)"
    ramp = settle(HyperPolicy(rule=LrRule.ADASCALE, scale=0.5, warmup=7), settings(), 2, 3, was=2)
    assert describe(ramp) == "LR factor 0.5 times the workers' own factor (adascale), from 1 until commit 10"
