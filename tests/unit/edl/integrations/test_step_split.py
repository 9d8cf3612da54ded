"""How the samples of a step are divided among workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.errors import StateError
from edl.integrations.step_split import StepSplit


def of_all(global_batch: int, micro_batch: int, world: int) -> list[StepSplit]:
    return [StepSplit(global_batch, micro_batch, rank, world) for rank in range(world)]


splits = st.builds(
    lambda parts, world, micro: of_all(parts * world, micro, world),
    st.integers(1, 12), st.integers(1, 6), st.integers(1, 5),
)  # fmt: skip


@given(splits, st.integers(0, 200))
def test_all_workers_make_the_same_number_of_batches(workers: list[StepSplit], samples: int) -> None:
    for drop_last in (False, True):
        counts = {len(list(one.places(samples, drop_last))) for one in workers}
        assert counts == {workers[0].batches(samples, drop_last)}


@given(splits, st.integers(0, 200))
def test_together_they_take_each_sample_of_a_step_once(workers: list[StepSplit], samples: int) -> None:
    size, micros = workers[0].global_batch, workers[0].accumulation
    mine = [list(one.places(samples, True)) for one in workers]
    for step in range(samples // size):
        taken = [place for batches in mine for batch in batches[step * micros : (step + 1) * micros] for place in batch]
        assert sorted(taken) == list(range(step * size, (step + 1) * size))


@given(splits, st.integers(0, 200))
def test_no_batch_is_empty_or_too_large(workers: list[StepSplit], samples: int) -> None:
    for one in workers:
        assert all(1 <= len(batch) <= one.micro_batch for batch in one.places(samples, False))


@given(splits, st.integers(1, 200))
def test_the_last_step_of_an_epoch_has_the_rest(workers: list[StepSplit], samples: int) -> None:
    taken = [place for one in workers for batch in one.places(samples, False) for place in batch]
    assert set(taken) == set(range(samples))
    rest = samples % workers[0].global_batch
    if rest == 0 or rest >= workers[0].world * -(-rest // (workers[0].micro_batch * workers[0].world)):
        assert len(taken) == samples, "nothing twice where each worker has something to take"


def test_an_example() -> None:
    two = [list(one.places(11, False)) for one in of_all(8, 2, 2)]
    assert two == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9, 10]]]


def test_samples_that_do_not_divide_evenly() -> None:
    assert [list(one.places(8, False)) for one in of_all(8, 4, 3)] == [[[0, 1]], [[2, 3, 4]], [[5, 6, 7]]]


@pytest.mark.parametrize(("global_batch", "micro_batch", "world"), [(4, 1, 5), (5, 1, 4), (1, 8, 2)])
def test_a_batch_that_is_too_small_for_the_world_is_refused(global_batch: int, micro_batch: int, world: int) -> None:
    with pytest.raises(StateError, match=f"a global batch of {global_batch} cannot be divided among {world} workers"):
        StepSplit(global_batch, micro_batch, 0, world)


@given(splits, st.integers(1, 200), st.data())
def test_the_weights_make_the_mean_over_the_samples_of_each_step(
    workers: list[StepSplit], samples: int, data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.integers(-1000, 1000), min_size=samples, max_size=samples))
    size, micros, world = workers[0].global_batch, workers[0].accumulation, workers[0].world
    batches = [list(one.places(samples, False)) for one in workers]
    for step in range(workers[0].steps(samples, False)):
        total = 0.0
        for one, mine in zip(workers, batches, strict=True):
            for number in range(step * micros, min((step + 1) * micros, len(mine))):
                mean = sum(values[place] for place in mine[number]) / len(mine[number])
                total += one.weight(number, samples) * mean / micros / world  # what a trainer does with the losses
        expected = values[step * size : (step + 1) * size]
        assert total == pytest.approx(sum(expected) / len(expected), rel=1e-9, abs=1e-6)


def test_where_all_batches_are_equal_nothing_is_weighted() -> None:
    assert {one.weight(number, 16) for one in of_all(8, 2, 2) for number in range(4)} == {1.0}


def test_the_steps_of_an_epoch() -> None:
    one = StepSplit(8, 2, 0, 1)
    assert (one.steps(17, False), one.steps(17, True), one.steps(16, False), one.steps(7, True)) == (3, 2, 2, 0)
