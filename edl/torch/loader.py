"""``DataLoader`` and ``shard_iterable`` for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data as data
from torch.utils.data import IterableDataset

from edl.arithmetic.plan import PAD
from edl.errors import StateError
from edl.torch.random_state import reseed
from edl.torch.sampler import EDLBatchSampler, EDLDistributedSampler
from edl.worker.feeding import (
    BatchIterator,
    CollateWithNumbers,
    CoreStream,
    Feed,
    WithoutShares,
    check_batch_size,
    endless,
    split_collated,
)
from edl.worker.numbers import key
from edl.worker.sampler import Position, Walk
from edl.worker.steps import Share


class DataLoader(data.DataLoader[Any]):
    """``torch.utils.data.DataLoader`` that tracks which batches the script has received: its state is the position in
    the epoch, and prefetched batches are not counted as consumed.

    The arguments are torch's. ``sampler`` is an ``EDLDistributedSampler``; without one it is created from ``dataset``,
    ``shuffle`` and ``seed``. ``dataset`` may be the result of ``shard_iterable``. ``drop_last`` leaves out a last step
    that is smaller than the others.

    ``batch_size`` is the size per worker. If the job prescribes ``--global-batch`` or ``--local-batch``, these
    determine the size of the batches. Raises ``StateError`` for unsupported arguments.

    It uses none of the script's random generators. With ``num_workers`` the generators of the loading processes are
    seeded before each batch, from the sampler's seed, the epoch and the batch's position in it.
    """

    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool | None = None, sampler: Any = None,
                 batch_sampler: Any = None, num_workers: int = 0, collate_fn: Callable[[list[Any]], Any] | None = None,
                 pin_memory: bool = False, drop_last: bool = False, timeout: float = 0, worker_init_fn: Any = None,
                 multiprocessing_context: Any = None, generator: Any = None, *, seed: int = 0, **more: Any,
                 ) -> None:  # fmt: skip
        _refuse(dataset, shuffle, sampler, batch_sampler, more)
        if batch_sampler is None:
            check_batch_size(batch_size)
        elif batch_size != 1 or drop_last:
            raise StateError("batch_size and drop_last belong to the batch_sampler: give them to the EDLBatchSampler")
        self._stream = dataset if isinstance(dataset, ShardedIterable) else None
        self.share: Share | None = None
        """The share of the last returned batch in its step."""
        self._seeds = torch.Generator() if generator is None else None
        """Source of the loading processes' own seeds, instead of torch's global generator."""
        self._seed = seed
        generator = generator or self._seeds
        arguments: dict[str, Any] = {
            "num_workers": num_workers, "pin_memory": pin_memory, "timeout": timeout, "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context, "generator": generator, **more,
        }  # fmt: skip
        self._feed: Feed | None = None
        self._batches: EDLBatchSampler | None = None
        if self._stream is not None:
            collate: Any = CollateWithNumbers(collate_fn or data.default_collate)
            super().__init__(dataset, batch_size=None, collate_fn=collate, **arguments)
        else:
            if batch_sampler is None:
                if sampler is None:
                    sampler = EDLDistributedSampler(dataset, shuffle=bool(shuffle), seed=seed)
                batch_sampler = EDLBatchSampler(sampler, batch_size, drop_last)
            self._batches = batch_sampler
            self._feed = Feed(batch_sampler, _Indices.marked)
            super().__init__(dataset, batch_sampler=self._feed, collate_fn=collate_fn, **arguments)
            batch_size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
            # Scripts read this to call set_epoch; torch itself uses batch_sampler.
            self.__dict__["sampler"] = batch_sampler.sampler
        self.__dict__.update(batch_size=batch_size, drop_last=drop_last)
        self._position: Position = batch_sampler.sampler if self._stream is None else self._stream

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration continues; increases when an iteration has reached its end."""
        return self._position.epoch

    def __len__(self) -> int:
        """Number of batches per worker in a whole epoch. Waits for a world, as ``context()`` does."""
        return super().__len__() if self._feed is None else len(self._feed)

    def __iter__(self) -> Any:
        """The rest of the epoch from the current position, in the current world."""
        return WithoutShares(self._batches_of(whole_steps=False), self._seen)

    def shares(self) -> Iterator[tuple[Any, Share]]:
        """The rest of the epoch: each micro-batch with its share, step after step. A step counts as consumed when its
        last micro-batch has been returned."""
        return self._batches_of(whole_steps=True)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, as ``EDLDistributedSampler.set_epoch`` does."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position, as in the sampler's ``state_dict``."""
        return self._position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position, as the sampler's ``load_state_dict`` does."""
        self._position.load_state_dict(state)

    def _batches_of(self, *, whole_steps: bool) -> BatchIterator:
        if self._feed is not None:
            return BatchIterator(self._position, self._feed.prepare, self._open, self._close, self._feed.known,
                           whole_steps=whole_steps)  # fmt: skip
        return BatchIterator(
            self._position, self._arm, self._open, self._close, split_collated, whole_steps=whole_steps
        )

    def _arm(self, walk: Walk) -> int:
        assert self._stream is not None and self.batch_size, "a stream's loader"  # noqa: S101
        plan = endless(walk.place, self.batch_size, tail=self._stream.tail, whole=self.drop_last, blocks=False)
        self._stream.arm(plan, walk.place.rank, self._seed)
        return plan.size

    def _open(self) -> Iterator[Any]:
        if self._seeds is not None:
            where = self._position
            mine = key("loader", getattr(where, "seed", self._seed), where.epoch, where.standing, where.place().rank)
            self._seeds.manual_seed(int.from_bytes(mine[:8], "little") >> 1)
        found = super().__iter__()
        if self._stream is not None:
            self._stream.arm(None)
        return found

    def _close(self, source: Any, _finished: bool) -> None:
        if self.num_workers and not self.persistent_workers and hasattr(source, "_shutdown_workers"):
            source._shutdown_workers()

    def _seen(self, share: Share) -> None:
        self.share = share


class _Indices(list[Any]):
    """The indices of a batch. A loading process that receives them from its queue seeds its generators with their
    key."""

    key = b""

    @classmethod
    def marked(cls, key: bytes, indices: list[int]) -> _Indices:
        """Create indices with this key."""
        made = cls(indices)
        made.key = key
        return made

    def __reduce__(self) -> Any:
        return _arrived, (self.key, list(self))


def _arrived(key: bytes, indices: list[int]) -> list[int]:
    if data.get_worker_info() is not None:
        reseed(key)
    return indices


def _refuse(dataset: Any, shuffle: bool | None, sampler: Any, batch_sampler: Any, more: dict[str, Any]) -> None:
    if isinstance(dataset, IterableDataset) and not isinstance(dataset, ShardedIterable):
        raise StateError("edl.DataLoader with an IterableDataset: wrap it with edl.shard_iterable(dataset)")
    if isinstance(dataset, ShardedIterable) and more.get("persistent_workers"):
        raise StateError("persistent_workers=True with shard_iterable: its processes would not receive the position")
    if not more.get("in_order", True):
        raise StateError("in_order=False: consumed samples could not be described by a position")
    if sampler is not None and not isinstance(sampler, EDLDistributedSampler):
        raise StateError(
            f"sampler: a {type(sampler).__name__} does not know how many workers there are; wrap it, "
            "EDLDistributedSampler(dataset, base=sampler)"
        )
    if batch_sampler is not None and not isinstance(batch_sampler, EDLBatchSampler):
        raise StateError(
            f"batch_sampler: a {type(batch_sampler).__name__} does not know how many workers there are; wrap it, "
            "sampler=EDLDistributedSampler(dataset, base=batch_sampler), with batch_size=1 for one of its batches each"
        )
    if isinstance(dataset, ShardedIterable) and (shuffle or sampler is not None or batch_sampler is not None):
        raise StateError("shuffle, sampler or batch_sampler with shard_iterable: the order is that of the stream")
    if (sampler is not None and shuffle) or (batch_sampler is not None and (sampler is not None or shuffle)):
        raise StateError("give one of shuffle, sampler and batch_sampler")


class ShardedIterable(CoreStream, IterableDataset[Any]):
    """The stream that ``shard_iterable`` returns."""

    def __iter__(self) -> Iterator[Any]:
        info = data.get_worker_info()
        return self.items(0, 1) if info is None else self.items(info.id, info.num_workers, reseed)


def shard_iterable(dataset: Any, *, transform: Callable[[Any], Any] | None = None, tail: str = PAD,
                   num_replicas: int | None = None, rank: int | None = None,
                   model_parallel: int = 1) -> ShardedIterable:  # fmt: skip
    """Distribute a finite or infinite stream over the workers, for ``edl.DataLoader``. ``model_parallel``: number of
    consecutive ranks that work on the same items.

    ``dataset`` must yield the same items in the same order in every process. Each loading process reads all of it, and
    applies ``transform`` only to the items that it returns. If ``dataset`` has ``iter_from(position)``, that is called
    instead of skipping consumed items; if it has ``set_epoch``, that is called before each epoch.
    """
    return ShardedIterable(dataset, num_replicas, rank, tail=tail, transform=transform, model_parallel=model_parallel)
