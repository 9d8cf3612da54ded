"""A loader that gives each worker its part of steps of a fixed number of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from edl.errors import StateError
from edl.integrations.step_split import StepSplit
from edl.torch.sampler import EDLDistributedSampler
from edl.worker.numbers import key

_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""Options of the given loader that the new one takes over."""


class StepBatches(Sampler[list[int]]):
    """Lists of indices: the micro-batches of one worker, from the beginning of an epoch."""

    def __init__(self, order: EDLDistributedSampler, split: StepSplit, drop_last: bool) -> None:
        self._order = order
        self._split = split
        self._drop_last = drop_last

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self._order.set_epoch(epoch)

    def __len__(self) -> int:
        return self._split.batches(self._order.places(), self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order.order()
        for places in self._split.places(len(order), self._drop_last):
            yield order.take(range(places[0], places[-1] + 1))


class FixedStepLoader(DataLoader[Any]):
    """A ``DataLoader`` over ``StepBatches``."""

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch for the next iteration."""
        batches = self.batch_sampler
        assert isinstance(batches, StepBatches), "made by step_loader"  # noqa: S101
        batches.set_epoch(epoch)


def step_loader(given: DataLoader[Any], split: StepSplit, *, drop_last: bool, seed: int, step: int) -> FixedStepLoader:
    """A loader with the data set, the order and the options of a given one, and the batches of ``split``.

    ``seed`` and ``step``, the number of steps made so far, seed the loading processes. Raises ``StateError`` for a
    loader without an order that is the same for all workers.
    """
    order = EDLDistributedSampler(given.dataset, 1, 0, base=_sampler(given), seed=seed, counts=False)
    if order.grouped:
        raise StateError("the sampler of the train loader yields lists: give it one that yields single indices")
    generator = torch.Generator()  # else the loader would draw from the script's generator
    generator.manual_seed(int.from_bytes(key("loader", seed, step, split.rank)[:8], "little") >> 1)
    options = {name: getattr(given, name) for name in _KEPT if hasattr(given, name)}
    return FixedStepLoader(
        given.dataset, batch_sampler=StepBatches(order, split, drop_last), generator=generator, **options
    )


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
