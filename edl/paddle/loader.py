"""``DataLoader`` and ``shard_iterable`` for Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any

import numpy as np
import paddle.io as io
from paddle.io.dataloader.collate import default_collate_fn

from edl.arithmetic.plan import PAD
from edl.errors import StateError
from edl.paddle.loading import on_demand
from edl.paddle.random_state import reseed
from edl.paddle.sampler import EDLBatchSampler
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
from edl.worker.session import keeps_numbers
from edl.worker.steps import Share


class DataLoader(io.DataLoader):
    """``paddle.io.DataLoader`` that tracks which batches the script has received: its state is the position in the
    epoch, and prefetched batches are not counted as consumed.

    The arguments are Paddle's. ``batch_sampler`` is an ``EDLBatchSampler``; without one it is created from ``dataset``,
    ``batch_size``, ``shuffle``, ``drop_last`` and ``seed``. ``dataset`` may be the result of ``shard_iterable``.

    ``batch_size`` is the size per worker. If the job prescribes ``--global-batch`` or ``--local-batch``, these
    determine the size of the batches. Raises ``StateError`` for unsupported arguments.

    It uses none of the script's random generators. With ``num_workers`` the generators of the loading processes are
    seeded before each batch, from the sampler's seed, the epoch and the batch's position in it. Without
    ``num_workers``, and with a ``RandomState`` in the ``State``, a batch is loaded when it is requested, not prefetched
    on a thread.
    """

    def __init__(self, dataset: Any, feed_list: Any = None, places: Any = None, return_list: bool = True,
                 batch_sampler: Any = None, batch_size: int = 1, shuffle: bool = False, drop_last: bool = False,
                 collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int = 0, *, seed: int = 0,
                 **more: Any) -> None:  # fmt: skip
        _refuse(dataset, shuffle, batch_sampler, more)
        if batch_sampler is None:
            check_batch_size(batch_size)
        elif batch_size != 1 or drop_last:
            raise StateError("batch_size and drop_last belong to the batch_sampler: give them to the EDLBatchSampler")
        self._stream = dataset if isinstance(dataset, ShardedIterable) else None
        self.share: Share | None = None
        """The share of the last returned batch in its step."""
        self._feed: Feed | None = None
        self._unfinished = False
        self._seed = seed
        arguments: dict[str, Any] = {
            "feed_list": feed_list, "places": places, "return_list": return_list, "num_workers": num_workers,
            **more,
        }  # fmt: skip
        if self._stream is not None:
            arguments.update(batch_size=None, collate_fn=CollateWithNumbers(collate_fn or default_collate_fn))
            super().__init__(dataset, **arguments)
            self._position: Position = self._stream
        else:
            if batch_sampler is None:
                batch_sampler = EDLBatchSampler(dataset, batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
            self._feed = Feed(batch_sampler, _Indices.marked)
            super().__init__(dataset, **arguments, batch_sampler=self._feed, collate_fn=collate_fn)  # type: ignore[arg-type]
            self._position = batch_sampler.sampler
            batch_size = batch_sampler.batch_size
        self._size = batch_size
        self._whole = drop_last

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration continues; increases when an iteration has reached its end."""
        return self._position.epoch

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        assert self._stream is not None, "a stream's loader"  # noqa: S101
        plan = endless(walk.place, self._size, tail=self._stream.tail, whole=self._whole, blocks=True)
        self._stream.arm(plan, walk.place.rank, self._seed)
        return plan.size

    def _open(self) -> Iterator[Any]:
        if self._unfinished and self._iterator is not None:
            # Paddle's loader cannot reuse loading processes whose last iteration was interrupted.
            self._close(self._iterator, False)
        self._unfinished = True
        if self.num_workers == 0 and keeps_numbers():
            # A stream needs no indices.
            found = on_demand(self, repeat([None]) if self._feed is None else iter(self._feed))
        else:
            found = self._ahead()
        if self._stream is not None:
            self._stream.arm(None)
        return found

    def _ahead(self) -> Iterator[Any]:
        """Paddle's own iteration, which takes the seed of its loading processes from numpy's global generator; that is
        restored."""
        where = self._position
        mine = key("loader", getattr(where, "seed", self._seed), where.epoch, where.standing, where.place().rank)
        kept = np.random.get_state()
        np.random.seed(int.from_bytes(mine[:4], "little"))
        try:
            found: Iterator[Any] = super().__iter__()
        finally:
            np.random.set_state(kept)
        return found

    def _close(self, source: Any, finished: bool) -> None:
        if finished and self._iterator is source:
            self._unfinished = False
        elif hasattr(source, "_try_shutdown_all"):
            source._try_shutdown_all()
            self._iterator = None

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
    if io.get_worker_info() is not None:
        reseed(key)
    return indices


def _refuse(dataset: Any, shuffle: bool, batch_sampler: Any, more: Mapping[str, Any]) -> None:
    if isinstance(dataset, io.IterableDataset) and not isinstance(dataset, ShardedIterable):
        raise StateError("edl.DataLoader with an IterableDataset: wrap it with edl.shard_iterable(dataset)")
    if isinstance(dataset, ShardedIterable) and more.get("persistent_workers"):
        raise StateError("persistent_workers=True with shard_iterable: its processes would not receive the position")
    if batch_sampler is not None and not isinstance(batch_sampler, EDLBatchSampler):
        raise StateError(
            f"batch_sampler: a {type(batch_sampler).__name__} does not know how many workers there are; take "
            "EDLBatchSampler(dataset, batch_size), or wrap it: EDLBatchSampler(sampler=EDLDistributedSampler(dataset, "
            "base=batch_sampler)) hands out one of its batches each"
        )
    if isinstance(dataset, ShardedIterable) and (shuffle or batch_sampler is not None):
        raise StateError("shuffle or batch_sampler with shard_iterable: the order is that of the stream")
    if batch_sampler is not None and shuffle:
        raise StateError("give one of shuffle and batch_sampler")


class ShardedIterable(CoreStream, io.IterableDataset[Any]):
    """The stream that ``shard_iterable`` returns."""

    def __iter__(self) -> Iterator[Any]:
        info = io.get_worker_info()
        return self.items(0, 1) if info is None else self.items(info.id, info.num_workers, reseed)


def shard_iterable(dataset: Any, *, transform: Callable[[Any], Any] | None = None, tail: str = PAD,
                   num_replicas: int | None = None, rank: int | None = None) -> ShardedIterable:  # fmt: skip
    """Distribute a finite or infinite stream over the workers, for ``edl.DataLoader``.

    ``dataset`` must yield the same items in the same order in every process. Each loading process reads all of it, and
    applies ``transform`` only to the items that it returns. If ``dataset`` has ``iter_from(position)``, that is called
    instead of skipping consumed items; if it has ``set_epoch``, that is called before each epoch.
    """
    return ShardedIterable(dataset, num_replicas, rank, tail=tail, transform=transform)
