"""The limit that is learnt from a job's pauses: wrong suspicions are counted over thousands of random jobs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest

from edl.agent.workers.hang_limit import FACTOR, GROWTH, KEPT, NEEDED, QUANTILE, LimitLearner

FLOOR_S = 300.0
SEEDS = 1000
PAUSES = 150

Job = Callable[[random.Random], Iterator[float]]


def irregular(rng: random.Random) -> Iterator[float]:
    """Steps of very different length: in one of a thousand, fifty times the usual one."""
    usual_s, spread = rng.uniform(0.1, 120.0), rng.uniform(0.1, 1.3)
    while True:
        yield rng.lognormvariate(math.log(usual_s), spread)


def evaluating(rng: random.Random) -> Iterator[float]:
    """An evaluation after every so many steps."""
    step_s, every, evaluation_s = rng.uniform(0.1, 30.0), rng.randint(10, 80), rng.uniform(10.0, 2000.0)
    number = 0
    while True:
        number += 1
        yield evaluation_s * rng.uniform(0.8, 1.2) if number % every == 0 else step_s * rng.uniform(0.9, 1.3)


def growing(rng: random.Random) -> Iterator[float]:
    """Longer sequences, larger batches, fewer nodes: steps that take longer and longer."""
    step_s, growth = rng.uniform(0.1, 60.0), rng.uniform(1.0, 1.06)
    while True:
        step_s *= growth
        yield step_s * rng.uniform(0.9, 1.1)


def interrupted(rng: random.Random) -> Iterator[float]:
    """Few pauses of any length: a checkpoint on a slow disk, a compilation, a file system that does not answer."""
    step_s = rng.uniform(0.1, 60.0)
    while True:
        yield rng.uniform(60.0, 7200.0) if rng.random() < 0.01 else step_s * rng.uniform(0.9, 1.1)


def changing(rng: random.Random) -> Iterator[float]:
    """Worlds of other sizes with the same global batch."""
    work_s, nodes = rng.uniform(1.0, 600.0), rng.randint(1, 16)
    while True:
        if rng.random() < 0.03:
            nodes = rng.randint(1, 16)
        yield work_s / nodes * rng.uniform(0.9, 1.1)


JOBS: dict[str, Job] = {job.__name__: job for job in (irregular, evaluating, growing, interrupted, changing)}
WRONG = {"irregular": 9, "evaluating": 734, "growing": 0, "interrupted": 659, "changing": 49}
"""Wrong suspicions in ``SEEDS`` jobs of each kind, as docs/hangs.md states them: alarms, not restarts."""


def wrong_suspicions(pauses: list[float]) -> list[tuple[float, float]]:
    """The limit and the length of each pause that was longer, although all of them ended well."""
    learner, found = LimitLearner(FLOOR_S), []
    for pause_s in pauses:
        limit_s = learner.learnt.limit_s
        if limit_s and pause_s >= limit_s:
            found.append((limit_s, pause_s))
        learner.paused(pause_s)
    return found


@pytest.mark.parametrize("kind", JOBS)
def test_a_wrong_suspicion_is_never_repeated_at_that_length(kind: str) -> None:
    suspicions = 0
    for seed in range(SEEDS):
        job = JOBS[kind](random.Random(f"{kind} {seed}"))
        pauses = [next(job) for _ in range(PAUSES)]
        found = wrong_suspicions(pauses)
        suspicions += len(found)
        for (_, before_s), (limit_s, _) in itertools.pairwise(found):
            assert limit_s >= GROWTH * before_s
        if found:
            assert len(found) <= 1 + math.log(max(pauses) / FLOOR_S, GROWTH)
    assert suspicions == WRONG[kind]


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_is_the_largest_of_three(seed: int) -> None:
    rng = random.Random(seed)
    job = JOBS[rng.choice(list(JOBS))](rng)
    learner, pauses = LimitLearner(FLOOR_S), list[float]()
    for _ in range(KEPT + 300):
        pauses.append(next(job))
        learner.paused(pauses[-1])
        if len(pauses) % 40 == 0:
            last = sorted(pauses[-KEPT:])
            usual_s = last[int(QUANTILE * len(last))]
            assert learner.learnt.limit_s == max(FLOOR_S, FACTOR * usual_s, GROWTH * max(pauses))


def test_nothing_is_suspicious_before_enough_is_known() -> None:
    learner = LimitLearner(FLOOR_S)
    for number in range(NEEDED):
        assert (learner.learnt.limit_s, learner.learnt.pauses) == (0.0, number)
        assert learner.start_limit_s(5) == 0.0
        learner.paused(1.0)
    assert learner.learnt.limit_s == FLOOR_S
    assert learner.start_limit_s(5) == 5 * FLOOR_S


def test_a_start_that_took_long_may_take_long_again() -> None:
    learner = LimitLearner(FLOOR_S)
    for _ in range(NEEDED):
        learner.paused(1.0)
    learner.started(4000.0)
    assert learner.start_limit_s(5) == 8000.0
    assert learner.learnt.limit_s == FLOOR_S, "a start says nothing about steps"
