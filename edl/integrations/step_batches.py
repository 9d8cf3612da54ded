"""A loader that gives each worker its part of steps of a fixed number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from edl.errors import StateError
from edl.integrations.step_indices import StepIndices
from edl.integrations.step_split import StepSplit
from edl.torch.sampler import EDLDistributedSampler
from edl.worker.numbers import key

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""Options of the given loader that the new one takes over."""


class StepBatches(StepIndices, Sampler[list[int]]):
    """``StepIndices`` as trainers look for it."""


class FixedStepLoader(DataLoader[Any]):
    """A ``DataLoader`` over ``StepBatches``."""

    @property
    def batches(self) -> StepBatches:
        """What determines the batches."""
        batches = self.batch_sampler
        assert isinstance(batches, StepBatches), "made by step_loader"  # noqa: S101
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch for the next iteration."""
        self.batches.set_epoch(epoch)


class BoundaryLoader(FixedStepLoader):
    """A loader that announces each step before it reads the step's first batch, and knows its position."""

    before_step: Callable[[], None] | None = None
    taken = 0
    """Batches of this epoch that it has yielded."""

    @property
    def steps_taken(self) -> int:
        """Steps of this epoch of which it has yielded batches; 0 at its end."""
        return 0 if self.taken >= len(self) else -(-self.taken // self.batches.split.accumulation)

    def weight(self) -> float:
        """The weight of the batch that it has yielded last; see ``StepSplit.weight``."""
        return self.batches.split.weight(self.taken - 1, self.batches.samples)

    def __iter__(self) -> Any:
        self.taken = self.batches.start * self.batches.split.accumulation
        source: Iterator[Any] | None = None
        while self.taken < len(self):
            if self.taken % self.batches.split.accumulation == 0 and self.before_step is not None:
                self.before_step()
            if source is None:
                source = super().__iter__()
            batch = next(source)
            self.taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The position, for a trainer's own checkpoints."""
        return {"steps": self.steps_taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration there."""
        self.batches.start = state["steps"]


def step_loader(given: DataLoader[Any], split: StepSplit, *, drop_last: bool, seed: int, step: int) -> FixedStepLoader:
    """A loader with the data set, the order and the options of a given one, and the batches of ``split``.

    ``seed`` and ``step``, the number of steps made so far, seed the loading processes. Raises ``StateError`` for a
    loader without an order that is the same for all workers.
    """
    return FixedStepLoader(given.dataset, **_options(given, split, drop_last, seed, step))


def boundary_loader(
    given: DataLoader[Any], split: StepSplit, *, drop_last: bool, seed: int, step: int
) -> BoundaryLoader:
    """As ``step_loader``; the loader announces each step."""
    return BoundaryLoader(given.dataset, **_options(given, split, drop_last, seed, step))


def _options(given: DataLoader[Any], split: StepSplit, drop_last: bool, seed: int, step: int) -> dict[str, Any]:
    order = EDLDistributedSampler(given.dataset, 1, 0, base=_sampler(given), seed=seed, counts=False)
    if order.grouped:
        raise StateError("the sampler of the train loader yields lists: give it one that yields single indices")
    generator = torch.Generator()  # else the loader would draw from the script's generator
    generator.manual_seed(int.from_bytes(key("loader", seed, step, split.rank)[:8], "little") >> 1)
    options = {name: getattr(given, name) for name in _KEPT if hasattr(given, name)}
    return {"batch_sampler": StepBatches(order, split, drop_last), "generator": generator, **options}


def _sampler(given: DataLoader[Any]) -> Any:
    """The sampler of single indices, under what a trainer has wrapped around it."""
    if isinstance(given.dataset, IterableDataset):
        raise StateError(
            f"the train data set is a {type(given.dataset).__name__}, an IterableDataset, which has no places to "
            "continue from: use one with __len__ and __getitem__"
        )
    batches: Any = given.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        raise StateError(
            f"the train loader has a batch sampler of its own ({type(batches).__name__}), whose batches cannot be "
            "divided among another number of workers: use a sampler and a batch size"
        )
    if hasattr(batches.sampler, "num_replicas"):
        raise StateError(
            f"the train loader has a {type(batches.sampler).__name__}, which is for one number of workers: use a "
            "sampler of the whole data set, such as RandomSampler; edl divides its order"
        )
    return batches.sampler
