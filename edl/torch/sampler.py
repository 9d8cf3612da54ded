"""``EDLDistributedSampler`` and ``EDLBatchSampler`` for PyTorch."""

from __future__ import annotations

import os
import random  # noqa: TID251  a base sampler may draw from it; it is made to depend on seed and epoch
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Sampler

from edl.arithmetic.plan import DROP, PAD
from edl.errors import StateError
from edl.wire.local import AGENT_VARIABLE
from edl.worker import sampler as core
from edl.worker.feeding import Batches

_SMALL = 2**31
"""Smaller indices are stored in four bytes."""


class EDLDistributedSampler(core.CoreSampler, Sampler[Any]):
    """``torch.utils.data.DistributedSampler`` for worlds that change: the same order for the same options while
    the world stays the same, and a position that any other world can continue from.

    ``num_replicas`` and ``rank`` follow the job unless they are given. ``drop_last=True`` is ``tail="drop"``.

    - ``tail``: how to end an epoch that cannot be divided evenly. ``"pad"`` repeats samples from the beginning of the
      order, ``"drop"`` leaves some out, ``"exact"`` returns each sample once, unevenly.
    - ``order``: ``"framework"`` is torch's own and takes 4 bytes of memory per sample; ``"computed"`` takes none.
    - ``base``: another sampler, whose indices (or lists of indices, which stay together) are distributed.
    - ``counts=False``: only ``advance()`` moves the position.
    - ``model_parallel``: number of consecutive ranks that work on the same samples, such as a tensor-parallel group.

    State: ``State(sampler=sampler)``. Raises ``StateError`` for unsupported options.
    """

    framework = "torch"

    def __init__(self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True,
                 seed: int = 0, drop_last: bool = False, *, tail: str | None = None, order: str = "framework",
                 base: Any = None, counts: bool = True, model_parallel: int = 1) -> None:  # fmt: skip
        if drop_last and tail not in (None, DROP):
            raise StateError(f"drop_last=True with tail={tail!r}: leave one of them out")
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed,
                         tail=tail or (DROP if drop_last else PAD), order=order, base=base, counts=counts,
                         model_parallel=model_parallel)  # fmt: skip

    def place(self) -> core.WorldPlace:
        """The worker's place in the job's world; without a launcher, in torch's default group."""
        alone = self._fixed is None and AGENT_VARIABLE not in os.environ  # noqa: TID251
        if alone and torch.distributed.is_available() and torch.distributed.is_initialized():
            return self.replica(core.WorldPlace(torch.distributed.get_rank(), torch.distributed.get_world_size(), 0))
        return super().place()

    def _shuffled(self, length: int, epoch: int) -> Any:
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        kind = torch.int32 if length < _SMALL else torch.int64
        return torch.randperm(length, generator=generator, dtype=kind, device="cpu")

    @contextmanager
    def _seeded(self, epoch: int) -> Iterator[None]:
        seed = self.seed + epoch
        kept, python = torch.get_rng_state(), random.getstate()
        numpy = sys.modules.get("numpy")
        kept_numpy = numpy.random.get_state() if numpy is not None else None
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        for generator in _generators(self.base):
            generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_rng_state(kept)
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(kept_numpy)


def _generators(sampler: Any) -> Iterator[torch.Generator]:
    """The generators of a sampler, and of the samplers that it contains."""
    seen: list[Any] = []
    waiting = [sampler]
    while waiting:
        one = waiting.pop()
        if any(one is other for other in seen):
            continue
        seen.append(one)
        if isinstance(one, torch.Generator):
            yield one
        elif isinstance(one, Sampler):
            waiting += vars(one).values()


class EDLBatchSampler(Batches, Sampler[list[int]]):
    """Batches of indices: each worker's part of each step as prescribed by the job (``--global-batch``), or
    ``batch_size`` per worker. ``drop_last`` leaves out a last step that is smaller than the others.

    Pass it to ``edl.DataLoader(dataset, batch_sampler=…)``, or iterate over it.
    """

    def __init__(self, sampler: EDLDistributedSampler, batch_size: int, drop_last: bool = False) -> None:
        if not isinstance(sampler, EDLDistributedSampler):
            raise StateError(
                f"EDLBatchSampler takes an EDLDistributedSampler, not a {type(sampler).__name__}: wrap it, "
                "EDLDistributedSampler(dataset, base=sampler)"
            )
        super().__init__(sampler, batch_size, drop_last, False)
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return self.counted()
