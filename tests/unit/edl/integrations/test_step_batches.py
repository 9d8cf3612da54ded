"""The loader under a trainer: the same order and batches as Accelerate's, whatever the world's size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from edl.errors import StateError
from edl.integrations.step_batches import BoundaryLoader, boundary_loader, step_loader
from edl.integrations.step_split import StepSplit

pytestmark = pytest.mark.torch


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def batches(given: Any, world: int, rank: int, *, global_batch: int = 8, epoch: int = 0, micro: int = 2) -> Any:
    loader = step_loader(given, StepSplit(global_batch, micro, rank, world), drop_last=False, seed=7, step=0)
    loader.set_epoch(epoch)
    found = [batch.tolist() for batch in loader]
    assert len(loader) == len(found)
    return found


def per_step(given: Any, world: int, epoch: int) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    micros = StepSplit(8, 2, 0, world).accumulation
    ranks = [batches(given, world, rank, epoch=epoch) for rank in range(world)]
    steps = range(0, len(ranks[0]), micros)
    return [
        sorted(sample for one in ranks for batch in one[first : first + micros] for sample in batch) for first in steps
    ]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_batches_are_those_of_accelerate(world: int, epoch: int) -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    data = Numbers(48)
    sampler = accelerate.SeedableRandomSampler(data, data_seed=7)
    for rank in range(world):
        sampler.set_epoch(epoch)
        theirs = accelerate.BatchSamplerShard(BatchSampler(sampler, 2, False), world, rank)
        expected = list(theirs)
        given = DataLoader(
            data, batch_sampler=accelerate.BatchSamplerShard(BatchSampler(sampler, 2, False), world, rank)
        )
        assert batches(given, world, rank, epoch=epoch) == expected


@pytest.mark.parametrize("sampler", ["random", "weighted", "sequential"])
def test_each_step_has_the_same_samples_in_every_world(sampler: str) -> None:
    data = Numbers(52)
    made: dict[str, Any] = {
        "random": RandomSampler(data),
        "weighted": WeightedRandomSampler([1.0 + index for index in range(52)], 52),
        "sequential": SequentialSampler(data),
    }
    given = DataLoader(data, batch_size=2, sampler=made[sampler])
    for epoch in (0, 1):
        alone = per_step(given, 1, epoch)
        assert all(per_step(given, world, epoch) == alone for world in (2, 3, 4))
    assert (per_step(given, 1, 0) == per_step(given, 1, 1)) == (sampler == "sequential")


def test_it_draws_nothing_from_the_generator_of_the_script() -> None:
    given = DataLoader(Numbers(48), batch_size=2, shuffle=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    batches(given, 2, 0)
    assert torch.equal(torch.get_rng_state(), before)


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (DataLoader(Stream(), batch_size=2), "an IterableDataset"),
        (DataLoader(Numbers(8), batch_sampler=OwnBatches(SequentialSampler(Numbers(8)), 2, False)), "of its own"),
        (DataLoader(Numbers(8), batch_size=None), "batch sampler of its own"),
        (DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), 2, 0)), "a DistributedSampler"),
        (DataLoader(Numbers(8), sampler=BatchSampler(SequentialSampler(Numbers(8)), 2, False)), "yields lists"),
    ],
)
def test_what_cannot_be_divided_is_refused(given: Any, text: str) -> None:
    with pytest.raises(StateError, match=text):
        step_loader(given, StepSplit(8, 2, 0, 2), drop_last=False, seed=0, step=0)


def announcing(world: int = 1, samples: int = 22) -> BoundaryLoader:
    given = DataLoader(Numbers(samples), batch_size=2, shuffle=True)
    return boundary_loader(given, StepSplit(8, 2, 0, world), drop_last=False, seed=0, step=0)


def test_each_step_is_announced_before_it_is_read() -> None:
    loader, seen = announcing(), []
    loader.before_step = lambda: seen.append(loader.steps_taken)
    for _ in loader:
        seen.append(-1)
    assert seen == [0, *[-1] * 4, 1, *[-1] * 4, 2, *[-1] * 3]
    assert loader.steps_taken == 0, "the epoch is over"


def test_a_loader_of_another_world_continues_and_begins_the_next_epoch_at_its_beginning() -> None:
    expected = [batch.tolist() for batch in announcing(world=2)]
    first, second = announcing(), announcing(world=2)
    iteration = iter(first)
    for _ in range(4):  # one step
        next(iteration)
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == expected[2:]
    assert [batch.tolist() for batch in second] == expected


def test_an_epoch_may_have_fewer_steps() -> None:
    loader = announcing()
    whole = [batch.tolist() for batch in loader]
    loader.batches.limit = 2
    assert (len(loader), loader.batches.steps) == (8, 2)
    assert [batch.tolist() for batch in loader] == whole[:8]
    assert loader.state_dict() == {"steps": 0}, "the epoch is over"
