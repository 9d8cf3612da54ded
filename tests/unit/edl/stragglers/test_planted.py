"""Thousands of random jobs: planted stragglers are found, with their cause; healthy jobs are not accused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.edl.stragglers.synchronous_job import WINDOWS, Model, named_in

JOBS = 40
"""For each case; a case has another seed for each job."""
CHUNKS = [pytest.param(number, marks=() if number < 1 else pytest.mark.soak) for number in range(20)]


def drawn(seed: int, starved: float = 0.0, steps: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    return Model(
        rng,
        ranks=int(rng.choice([2, 2, 3, 4, 8, 16])),
        steps=steps or int(rng.integers(3, 50)),
        noise=float(rng.uniform(0.01, 0.2)),
        starved=starved,
        transfer=float(rng.uniform(0.01, 1.0)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("starved", [0.0, 0.1, 0.3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_healthy_job_is_not_accused(chunk: int, starved: float) -> None:
    """Not even on a busy machine, where each rank waits for a CPU for up to twice the time that it computes, in bursts
    of four times a step's part. With ``--soak`` 4800 jobs of 60 windows."""
    for seed in range(chunk * JOBS, (chunk + 1) * JOBS):
        found = named_in(drawn(seed, starved), 60)
        assert not found, (seed, starved, found)


@pytest.mark.parametrize("kind", ["slow", "data", "stopped"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_straggler_is_found_at_once_on_a_quiet_machine(chunk: int, kind: str) -> None:
    """It takes 1.8 to 4 times as long as the others; with ``--soak`` 2400 jobs."""
    for seed in range(chunk * JOBS, (chunk + 1) * JOBS):
        model = drawn(seed, steps=20)
        rank, extra = int(model.rng.integers(model.ranks)), float(model.rng.uniform(0.8, 3.0))
        getattr(model, kind)[rank] = extra / (1 + extra) if kind == "stopped" else extra
        found = named_in(model, 4 * WINDOWS)
        assert set(found) == {rank}, (seed, found)
        assert found[rank][1] == ("compute" if kind == "slow" else kind)
        assert found[rank][0] == WINDOWS or kind == "stopped"  # which is seen by samples


@pytest.mark.parametrize("kind", ["slow", "data", "stopped"])
def test_a_straggler_is_found_on_a_busy_machine(kind: str) -> None:
    for seed in range(JOBS):
        model = drawn(seed, starved=0.5, steps=20)
        model.ranks = min(model.ranks, 4)
        rank = int(model.rng.integers(model.ranks))
        getattr(model, kind)[rank] = 0.6 if kind == "stopped" else 3.0
        found = named_in(model, 8 * WINDOWS)
        assert set(found) == {rank}, (seed, found)
        assert found[rank][1] == ("compute" if kind == "slow" else kind)


def test_half_of_the_ranks_may_be_slow() -> None:
    """Such as a slow node of two."""
    for seed in range(JOBS):
        model = Model(np.random.default_rng(seed), ranks=8, steps=20, slow={4: 1.0, 5: 1.0, 6: 1.0, 7: 1.0})
        assert set(named_in(model, WINDOWS + 4)) == {4, 5, 6, 7}


@pytest.mark.parametrize("fixed", [0.0, 0.5, 1.0])
def test_batches_of_different_sizes_are_no_reason(fixed: float) -> None:
    """Neither with time in proportion to the samples, nor with time that does not depend on them."""
    for seed in range(JOBS):
        rng = np.random.default_rng(seed)
        samples = [int(one) for one in rng.integers(4, 13, int(rng.choice([2, 3, 4, 8])))]
        model = Model(rng, len(samples), 20, samples=samples, fixed=fixed)
        assert not named_in(model, 30), (seed, samples)


def test_a_straggler_with_a_smaller_batch_is_found() -> None:
    for seed in range(JOBS):
        model = Model(np.random.default_rng(seed), 4, 20, samples=[8, 8, 7, 8], slow={2: 1.0})
        assert set(named_in(model, WINDOWS + 2)) == {2}
