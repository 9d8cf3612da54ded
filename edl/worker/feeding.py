"""Batches for the loaders of both frameworks, and the bookkeeping of what the script has received."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from edl.arithmetic.hyper import step_plan
from edl.arithmetic.plan import EpochPlan, Micro
from edl.errors import StateError
from edl.wire.records import Settings
from edl.worker import hyper
from edl.worker import session as sessions
from edl.worker.numbers import key
from edl.worker.sampler import (
    CoreSampler,
    EpochOrder,
    Position,
    Walk,
    WorldPlace,
    check_repeatable,
    check_tail,
    fetches_ahead,
)
from edl.worker.steps import Share

Open = Callable[[], Iterator[Any]]
Mark = Callable[[bytes, list[int]], list[int]]
"""Makes a batch of indices that carries its random-number key to the process that loads it."""
Close = Callable[[Iterator[Any], bool], None]
"""Takes the result of ``Open``, and whether it was exhausted."""
_ENDLESS = 1 << 62
"""Length of a stream whose end is unknown."""


def settings() -> Settings:
    """The prescribed settings of the next step."""
    return hyper.current()


def _sizes() -> tuple[int, int, int]:
    """The settings that determine how steps are divided. A change of only the learning rate changes nothing here."""
    now = settings()
    return now.global_batch, now.local_batch, now.logical_ranks


def check_batch_size(batch_size: Any) -> None:
    """Raise ``StateError`` for an invalid batch size."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise StateError(
            f"batch_size={batch_size!r}: it must be an integer of at least 1, the samples that one worker takes at once"
        )


def epoch_plan(
    place: WorldPlace, length: int, batch_size: int, *, tail: str, whole: bool, blocks: bool, grouped: bool = False
) -> EpochPlan:
    """Order in which this world consumes an epoch, as the job prescribes. Groups vary in size, so each worker takes
    ``batch_size`` groups. Raises ``StateError`` when that is impossible."""
    now = settings()
    if grouped:
        now = replace(now, global_batch=0, local_batch=0)
    plan = step_plan(now, batch_size, place.world)
    most = now.local_batch or batch_size
    return EpochPlan(length, plan.global_batch, most, place.world, tail, whole, plan.logical_ranks, blocks)


def endless(place: WorldPlace, batch_size: int, *, tail: str, whole: bool, blocks: bool) -> EpochPlan:
    """Like ``epoch_plan``, for a stream whose end is found by reaching it."""
    return epoch_plan(place, _ENDLESS, batch_size, tail=tail, whole=whole, blocks=blocks)


class Batches:
    """Batches of indices from a sampler, for loaders that do not prefetch."""

    def __init__(self, sampler: CoreSampler, batch_size: int, whole: bool, blocks: bool) -> None:
        check_batch_size(batch_size)
        self.sampler = sampler
        self.batch_size = batch_size
        self._whole = whole
        self._blocks = blocks

    @property
    def grouped(self) -> bool:
        """Whether a place of the order is a group of samples."""
        return self.sampler.base is not None and self.sampler.grouped

    def plan(self, place: WorldPlace) -> EpochPlan:
        """Order in which the current world consumes the epoch."""
        sampler = self.sampler
        return epoch_plan(
            place, sampler.places(), self.batch_size,
            tail=sampler.tail, whole=self._whole, blocks=self._blocks, grouped=self.grouped,
        )  # fmt: skip

    def __len__(self) -> int:
        """Number of batches that each worker gets in a whole epoch."""
        return self.plan(self.sampler.place()).count()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, for ``load_state_dict``."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sampler's state."""
        self.sampler.load_state_dict(state)

    def counted(self) -> Iterator[list[int]]:
        """The rest of the epoch; a batch counts as consumed when it is taken."""
        walk = self.sampler.begin()
        feed, sizes = Feed(self), _sizes()
        feed.prepare(walk)
        if ahead := fetches_ahead():
            self.sampler.uncounted(ahead)
        return self._count(walk, feed, sizes)

    def _count(self, walk: Walk, feed: Feed, sizes: tuple[int, int, int]) -> Iterator[list[int]]:
        source, between = iter(feed), True
        while True:
            # With manual counting it is unknown here what has been consumed.
            if between and self.sampler.counts and _sizes() != sizes:
                self.sampler.check(walk)
                sizes = _sizes()
                feed.prepare(walk)
                source = iter(feed)
            indices = next(source, None)
            self.sampler.check(walk)
            if indices is None:
                break
            micro = feed.queue.popleft()[0]
            self.sampler.delivered(micro.position)
            between = micro.last
            yield indices
        self.sampler.ended(walk)


class Feed:
    """The indices for a loader of edl, and the position of each batch in its step."""

    def __init__(self, batches: Batches, mark: Mark = lambda _, indices: indices) -> None:
        self._batches = batches
        self._mark = mark
        self.batch_size = batches.batch_size
        self.queue: deque[tuple[Micro, int, int]] = deque()
        """Batches taken but not delivered yet: micro-batch, its samples, samples of its step."""
        self._next: Callable[[], Iterator[Micro]] | None = None
        self._order: EpochOrder | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def prepare(self, walk: Walk) -> int:
        """Make ``iter()`` continue from the current position. Anything that can fail is done here rather than in a
        thread of the loader. Returns the samples of a full step, 0 for groups, which vary in size."""
        sampler = self._batches.sampler
        self._order = sampler.order()
        plan, position = self._batches.plan(walk.place), sampler.standing
        self._next = lambda: plan.micros(position, walk.place.rank)
        return 0 if self._batches.grouped else plan.size

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of indices. Loaders may call this several times before they take anything."""
        assert self._next is not None and self._order is not None, "prepared before the loader begins"  # noqa: S101
        self.queue = deque()
        sampler = self._batches.sampler
        place = ("load", sampler.seed, sampler.epoch)
        return _lists(self._order, self._next(), self.queue, lambda at, found: self._mark(key(*place, at), found))

    def known(self, data: Any) -> tuple[Any, Micro, int, int]:
        """Pair the next batch that the loader has yielded with its description."""
        return (data, *self.queue.popleft())


def _lists(order: EpochOrder, micros: Iterator[Micro], queue: deque[tuple[Micro, int, int]],
           mark: Callable[[int, list[int]], list[int]]) -> Iterator[list[int]]:  # fmt: skip
    for micro in micros:
        found = order.take(micro.places)
        if found and isinstance(found[0], list):
            found = [index for group in found for index in group]
        queue.append((micro, len(found) if micro.real else 0, order.samples(range(micro.begin, micro.end))))
        yield mark(micro.places.start, found)


class BatchIterator:
    """One iteration of a loader: pairs each batch with its position in the step, and counts it as consumed when the
    script gets it. When the job's batch size changes, prefetched batches are dropped and loaded again."""

    def __init__(self, position: Position, prepare: Callable[[Walk], int], open_loader: Open, close: Close,
                 known: Callable[[Any], tuple[Any, Micro, int, int]], *, whole_steps: bool) -> None:  # fmt: skip
        """``prepare`` returns the samples of a full step, 0 where steps vary. ``known`` splits what the loader yields
        into data, micro-batch, its samples, and samples of its step.
        ``whole_steps``: count a step with its last micro-batch, as ``shares`` promises; otherwise count each
        micro-batch."""
        self._position = position
        self._prepare, self._open, self._close, self._known = prepare, open_loader, close, known
        self._whole_steps = whole_steps
        self._walk = position.begin()
        self._source: Iterator[Any] | None = None
        self._between = True
        """The last batch ended a step."""
        self._failed = False
        self._start()

    def _start(self) -> None:
        self._dealt = _sizes()
        self._full = self._prepare(self._walk)
        self._source = self._open()

    def __iter__(self) -> Iterator[tuple[Any, Share]]:
        return self

    def __next__(self) -> tuple[Any, Share]:
        """The next micro-batch and its share. Raises ``StateError`` when this iteration is no longer valid."""
        if self._failed:
            raise StateError(
                "a batch of this iteration could not be loaded, so the next ones are unknown. "
                "Call iter() on the loader again; it continues from the position"
            )
        if self._source is None:
            raise StopIteration
        try:
            self._position.check(self._walk)
        except StateError:
            self.close()
            raise
        if self._between and _sizes() != self._dealt:
            self.close()
            self._start()
        session = sessions.opened()
        try:
            with session.fetching() if session is not None else contextlib.nullcontext():
                data, micro, samples, total = self._known(next(self._source))
        except StopIteration:
            self.close(finished=True)
            self._position.ended(self._walk)
            raise
        except Exception:
            self._failed = True
            self.close()
            raise
        if session is not None:
            session.samples += samples
        self._between = micro.last
        if micro.last or not self._whole_steps:
            self._position.delivered(micro.position)
        return data, Share(samples, max(1, total), micro.index, micro.count, micro.logical, self._full)

    def close(self, finished: bool = False) -> None:
        """Drop prefetched batches. ``finished``: the epoch is complete."""
        source, self._source = self._source, None
        if source is not None:
            self._close(source, finished)


class WithoutShares:
    """The batches of a ``BatchIterator`` without their shares."""

    def __init__(self, batches: BatchIterator, seen: Callable[[Share], None]) -> None:
        self._iterator = batches
        self._seen = seen

    def __iter__(self) -> WithoutShares:
        return self

    def __next__(self) -> Any:
        """The next batch; its share is passed to ``seen``. Raises ``StopIteration`` at the end."""
        data, share = next(self._iterator)
        self._seen(share)
        return data


# --- streams ---------------------------------------------------------------------------------------------------------


class CoreStream(Position):
    """An iterable data set of which each worker, and each of its loading processes, takes its part.

    All of them read the stream from its beginning, in the same order. ``transform`` is applied only to the samples
    taken.
    """

    def __init__(self, dataset: Any, num_replicas: int | None, rank: int | None, *,
                 tail: str, transform: Callable[[Any], Any] | None, model_parallel: int = 1) -> None:  # fmt: skip
        super().__init__(num_replicas, rank, model_parallel=model_parallel)
        check_tail(tail)
        if not hasattr(dataset, "iter_from"):
            check_repeatable("shard_iterable(dataset)", dataset)
        self.dataset = dataset
        self.tail = tail
        self.transform = transform
        self._armed: tuple[EpochPlan, int, int] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the number of samples consumed in it; the same on all ranks."""
        epoch, position = self._standing()
        return {"epoch": epoch, "position": position, "tail": self.tail}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises ``StateError`` if the stream was consumed with another ``tail``."""
        if state["tail"] != self.tail:
            raise StateError(
                f"the stream's state (epoch {state['epoch']}, position {state['position']}) was reached with "
                f"tail={state['tail']!r}, but this one has {self.tail!r}: construct it with the value of the state"
            )
        self._restore(int(state["epoch"]), int(state["position"]))

    def _length(self) -> int | None:
        return None

    def arm(self, plan: EpochPlan | None, rank: int = 0, seed: int = 0) -> None:
        """Prepare the next iteration for a loader of edl, which gets whole micro-batches; None: for another loader."""
        self._armed = None if plan is None else (plan, rank, seed)

    def items(self, worker: int, workers: int, reseed: Callable[[bytes], None] = lambda _: None) -> Iterator[Any]:
        """The samples for one loading process. ``reseed`` seeds the generators that ``transform`` may use."""
        if self._armed is not None:
            return self._micros(*self._armed, worker, workers, reseed)
        place = self.place()
        part, parts = place.rank + worker * place.world, place.world * workers
        return (self._made(item) for item in islice(self._rest(), part, None, parts))

    def _rest(self) -> Iterator[Any]:
        """The stream from the current position on."""
        if self._position >= _ENDLESS:
            return iter(())
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        if hasattr(self.dataset, "iter_from"):
            rest: Iterator[Any] = iter(self.dataset.iter_from(self._position))
            return rest
        return islice(iter(self.dataset), self._position, None)

    def _made(self, item: Any) -> Any:
        return item if self.transform is None else self.transform(item)

    def _micros(self, plan: EpochPlan, rank: int, seed: int, worker: int, workers: int,
                reseed: Callable[[bytes], None]) -> Iterator[tuple[list[int], list[Any]]]:  # fmt: skip
        """Every ``workers``-th micro-batch of a rank: the loader takes them from its processes in turn."""
        rest, begin, number = self._rest(), self._position, 0
        while step := list(islice(rest, plan.size)):
            if len(step) < plan.size:
                plan = replace(plan, length=begin + len(step))
            for micro in plan.step(begin, rank):
                if number % workers == worker:
                    reseed(key("load", seed, self._epoch, micro.places.start))
                    found = [self._made(step[(place - begin) % len(step)]) for place in micro.places]
                    yield _numbers(micro), found
                number += 1
            begin += len(step)


def _numbers(micro: Micro) -> list[int]:
    """A micro-batch as plain numbers, which pass through any loader."""
    samples = len(micro.places) if micro.real else 0
    return [samples, micro.index, micro.count, micro.begin, micro.end, micro.position, micro.logical]


def from_numbers(numbers: list[int]) -> tuple[Micro, int, int]:
    """Inverse of ``_numbers``: micro-batch, its samples, samples of its step."""
    samples, index, count, begin, end, position, logical = numbers
    return Micro(range(0), samples > 0, index, count, begin, end, position, logical), samples, end - begin


class CollateWithNumbers:
    """A loader's ``collate_fn`` for streams: applies the script's own to the samples and passes the numbers through."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, item: tuple[list[int], list[Any]]) -> tuple[str, Any]:
        """The numbers as text, which loaders do not convert to tensors, and the collated samples."""
        numbers, found = item
        return " ".join(map(str, numbers)), self._collate(found)


def split_collated(item: tuple[str, Any]) -> tuple[Any, Micro, int, int]:
    """Split a result of ``CollateWithNumbers`` into batch, micro-batch, its samples, and samples of its step."""
    text, data = item
    return (data, *from_numbers([int(word) for word in text.split()]))
