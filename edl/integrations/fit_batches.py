"""The train loader of ``EDLModel.fit``: each worker's micro-batches of steps of a fixed number of samples."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
from paddle.io import BatchSampler, DataLoader, DistributedBatchSampler, IterableDataset

from edl.errors import StateError
from edl.integrations.step_indices import StepIndices
from edl.integrations.step_split import StepSplit
from edl.paddle.loading import on_demand
from edl.paddle.sampler import EDLDistributedSampler
from edl.worker.numbers import key

_KEPT = ("num_workers", "collate_fn", "places", "use_shared_memory", "timeout", "worker_init_fn", "return_list")
"""Options of a given loader that the new one takes over."""


@dataclass(frozen=True, slots=True)
class TrainData:
    """What ``fit`` trains on, in whatever form it was given."""

    dataset: Any
    order: EDLDistributedSampler
    """The order of all samples, for each epoch."""
    batch_size: int
    """Most samples of a worker at once."""
    drop_last: bool
    options: dict[str, Any]
    """Of the loader."""


def from_dataset(
    dataset: Any, *, batch_size: int, shuffle: bool, drop_last: bool, num_workers: int, places: Any
) -> TrainData:
    """The data of ``fit(dataset, ...)``, in the order that Paddle trains in. Raises ``StateError`` for an
    ``IterableDataset``."""
    if isinstance(dataset, IterableDataset):
        raise StateError(
            f"the train data set is a {type(dataset).__name__}, an IterableDataset, which has no places to continue "
            "from: use one with __len__ and __getitem__"
        )
    order = EDLDistributedSampler(dataset, 1, 0, shuffle=shuffle, counts=False)
    options = {"num_workers": num_workers, "places": places, "return_list": True}
    return TrainData(dataset, order, batch_size, drop_last, options)


def from_loader(loader: Any) -> TrainData:
    """The data of ``fit(loader)``. Raises ``StateError`` for a loader whose order cannot be divided."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(batches) not in (BatchSampler, DistributedBatchSampler):
        what = "a batch sampler of its own" if isinstance(loader, DataLoader) else "batches of its own"
        raise StateError(
            f"train_data has {what} ({type(loader if batches is None else batches).__name__}), which cannot be divided "
            "among another number of workers: give a paddle.io.Dataset, or a paddle.io.DataLoader with a batch_size or "
            "a BatchSampler"
        )
    if isinstance(batches, DistributedBatchSampler):
        if batches.nranks != 1:
            raise StateError(
                f"the DistributedBatchSampler of train_data is for {batches.nranks} workers: leave num_replicas and "
                "rank out, and create it after the EDLModel"
            )
        order = EDLDistributedSampler(loader.dataset, 1, 0, shuffle=batches.shuffle, counts=False)
    else:
        order = EDLDistributedSampler(loader.dataset, 1, 0, base=batches.sampler, counts=False)
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return TrainData(loader.dataset, order, batches.batch_size, batches.drop_last, options)


class FitBatches:
    """One worker's micro-batches in one world. It uses none of the script's random generators."""

    def __init__(self, data: TrainData, split: StepSplit) -> None:
        self.indices = StepIndices(data.order, split, data.drop_last)
        self._loader = DataLoader(data.dataset, batch_sampler=self.indices, **data.options)  # type: ignore[arg-type]

    def epoch(self, epoch: int, first: int) -> Generator[Any, None, None]:
        """The batches of an epoch, from a step on. Close it if it is not read to its end."""
        self.indices.set_epoch(epoch)
        self.indices.start = first
        if self._loader.num_workers == 0:
            # Paddle would load ahead on a thread, which shares the generators with the script.
            yield from on_demand(self._loader, iter(self.indices))
            return
        source = self._open(epoch, first)
        try:
            yield from source
        finally:
            source._try_shutdown_all()

    def _open(self, epoch: int, first: int) -> Any:
        """Paddle seeds its loading processes from numpy's global generator."""
        mine = key("loader", self.indices.sampler.seed, epoch, first, self.indices.split.rank)
        kept = np.random.get_state()
        np.random.seed(int.from_bytes(mine[:4], "little"))
        try:
            return iter(self._loader)
        finally:
            np.random.set_state(kept)
