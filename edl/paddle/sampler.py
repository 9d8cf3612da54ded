"""``EDLDistributedSampler`` and ``EDLBatchSampler`` for Paddle."""

from __future__ import annotations

import random  # noqa: TID251  a base sampler may draw from it; it is made to depend on seed and epoch
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle.io import BatchSampler, Sampler

from edl.arithmetic.plan import PAD
from edl.errors import StateError
from edl.worker import sampler as core
from edl.worker.feeding import Batches

_SMALL = 2**31
"""Smaller indices are stored in four bytes."""


class EDLDistributedSampler(core.CoreSampler, Sampler[Any]):
    """Each worker's part of an epoch, for worlds that change. ``EDLBatchSampler`` makes batches from it.

    ``num_replicas`` and ``rank`` follow the job unless they are given.

    - ``tail``: how to end an epoch that cannot be divided evenly. ``"pad"`` repeats samples from the beginning of the
      order, ``"drop"`` leaves some out, ``"exact"`` returns each sample once, unevenly.
    - ``order``: ``"framework"`` is that of ``paddle.io.DistributedBatchSampler`` (with seed 0) and takes 4 bytes of
      memory per sample; ``"computed"`` takes none.
    - ``base``: another sampler, whose indices (or lists of indices, which stay together) are distributed.
    - ``counts=False``: only ``advance()`` moves the position.

    State: ``State(sampler=sampler)``. Raises ``StateError`` for unsupported options.
    """

    framework = "paddle"

    def __init__(self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True,
                 seed: int = 0, *, tail: str = PAD, order: str = "framework", base: Any = None,
                 counts: bool = True) -> None:  # fmt: skip
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed, tail=tail, order=order, base=base,
                         counts=counts)  # fmt: skip

    def _shuffled(self, length: int, epoch: int) -> Any:
        indices = np.arange(length, dtype=np.int32 if length < _SMALL else np.int64)
        np.random.RandomState((self.seed + epoch) % 2**32).shuffle(indices)
        return indices

    @contextmanager
    def _seeded(self, epoch: int) -> Iterator[None]:
        seed = (self.seed + epoch) % 2**32
        kept, python, own = np.random.get_state(), random.getstate(), paddle.get_rng_state()
        paddle.seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(kept)
            random.setstate(python)
            paddle.set_rng_state(own)


class EDLBatchSampler(Batches, BatchSampler):  # type: ignore[misc]
    """``paddle.io.DistributedBatchSampler`` for worlds that change: the same batches while the world stays the same
    (with ``shuffle``, only if the number of samples is a multiple of the number of workers, since Paddle also shuffles
    its padding).

    ``batch_size`` is the size per worker. If the job prescribes ``--global-batch`` or ``--local-batch``, these
    determine the size of the batches. ``drop_last`` leaves out a last step that is smaller than the others.
    ``sampler``: an ``EDLDistributedSampler`` in place of ``dataset`` and its options.

    Pass it to ``edl.DataLoader(dataset, batch_sampler=…)``, or iterate over it. Raises ``StateError`` for unsupported
    options.
    """

    def __init__(self, dataset: Any = None, batch_size: int = 1, num_replicas: int | None = None,
                 rank: int | None = None, shuffle: bool = False, drop_last: bool = False, *,
                 sampler: EDLDistributedSampler | None = None, seed: int = 0, **options: Any) -> None:  # fmt: skip
        if sampler is None:
            sampler = EDLDistributedSampler(dataset, num_replicas, rank, shuffle, seed, **options)
        elif not isinstance(sampler, EDLDistributedSampler):
            raise StateError(
                f"sampler: a {type(sampler).__name__} does not know how many workers there are; wrap it, "
                "EDLDistributedSampler(dataset, base=sampler)"
            )
        elif options or num_replicas is not None or shuffle:
            raise StateError("sampler=… with options that belong to it: give them to the EDLDistributedSampler")
        Batches.__init__(self, sampler, batch_size, drop_last, True)
        self.dataset = sampler.dataset
        self.shuffle = sampler.shuffle
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return self.counted()

    def __len__(self) -> int:
        return Batches.__len__(self)

    @property
    def epoch(self) -> int:
        """The epoch of the sampler."""
        return self.sampler.epoch
