"""Histories of a job as its samplers see them: steps, commits, kills, resizes and restarts, drawn from a seed.

The samplers and the pairing of batches with shares are the real ones. Only the loader is made up: it takes indices
ahead of the script, as loaders with processes of their own do.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from edl.arithmetic.permutation import Permutation, key
from edl.wire.records import NO_SETTINGS, Settings
from edl.worker import feeding
from edl.worker.feeding import Batches, BatchIterator, Feed
from edl.worker.sampler import CoreSampler, WorldPlace
from edl.worker.steps import Share

EPOCHS = 3


class Array(list[int]):
    """As much of an array as the sampler asks for."""

    def __getitem__(self, key: Any) -> Any:
        return Array(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    def tolist(self) -> list[int]:
        return list(self)


class Sampler(CoreSampler):
    """A sampler without a framework."""

    framework = "test"

    def __init__(self, length: int, rank: int, world: int, **options: Any) -> None:
        named = {
            "shuffle": True,
            "seed": 7,
            "tail": "pad",
            "order": "framework",
            "base": None,
            "counts": True,
            **options,
        }
        super().__init__(range(length), None, None, **named)
        self.at = WorldPlace(rank, world, 0)

    def place(self) -> WorldPlace:
        return self.at

    def _shuffled(self, length: int, epoch: int) -> Any:
        return Array(Permutation(length, key(self.seed, epoch)).block(0, length))

    def _seeded(self, epoch: int) -> AbstractContextManager[None]:
        return nullcontext()


class Base:
    """A base sampler: what it yields depends on the epoch; single indices, or groups of several sizes."""

    def __init__(self, length: int, groups: bool) -> None:
        self._length = length
        self._groups = groups
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = Permutation(self._length, key("base", self._epoch)).block(0, self._length)
        if not self._groups:
            yield from order
            return
        begin = 0
        while begin < self._length:
            size = 1 + (begin * 7 + self._epoch) % 4
            yield order[begin : begin + size]
            begin += size


class Worker:
    """One rank with its sampler and its loader."""

    def __init__(self, sampler: Sampler, batch_size: int, whole: bool, blocks: bool, ahead: int) -> None:
        self.sampler = sampler
        self._feed = Feed(Batches(sampler, batch_size, whole, blocks))
        self._ahead = ahead

    def iterate(self, whole_steps: bool) -> BatchIterator:
        return BatchIterator(
            self.sampler, self._feed.prepare, self._open, lambda *_: None, self._feed.known, whole_steps=whole_steps
        )

    def _open(self) -> Iterator[list[int]]:
        waiting: deque[list[int]] = deque()
        for indices in self._feed:
            waiting.append(indices)
            if len(waiting) > self._ahead:
                yield waiting.popleft()
        yield from waiting


@dataclass
class Ledger:
    """What one line of a job has consumed: by epoch, the real samples of each step and the step's total."""

    steps: dict[int, list[tuple[list[Any], int]]] = field(default_factory=dict)

    def copy(self) -> Ledger:
        return Ledger({epoch: list(steps) for epoch, steps in self.steps.items()})


class History:
    """One job, from its first epoch to its last."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.length = draw.choice((1, 2, 3, 5, 8, 13, 24, 31, 60))
        self.tail = draw.choice(("pad", "drop", "exact"))
        self.batch_size = draw.randint(1, 5)
        self.whole = draw.random() < 0.15
        self.blocks = draw.random() < 0.5
        self.whole_steps = draw.random() < 0.5
        self.base = draw.choice((None, None, None, "indices", "groups"))
        self.options = {
            "tail": self.tail,
            "shuffle": draw.random() < 0.8,
            "order": "framework" if self.base else draw.choice(("framework", "computed")),
        }
        self.logical = draw.choice((0, 0, 0, draw.randint(1, 8)))
        self.settings = self._settings(1) if draw.random() < 0.6 else NO_SETTINGS
        self.ledger, self.committed = Ledger(), Ledger()
        self.state: dict[str, Any] | None = None
        self.workers: list[Worker] = []
        self.step: list[Any] = []
        """What a step has taken so far, where it counts as a whole."""

    def _settings(self, number: int) -> Settings:
        parts = self.logical or 1
        size = self.draw.choice((0, parts * self.draw.randint(1, 12)))
        return Settings(
            number=number, global_batch=size, local_batch=self.draw.choice((0, 1, 3)), logical_ranks=self.logical
        )

    def form(self) -> None:
        """A new world; some processes stay, others are new."""
        if self.settings.number == 0:
            self.logical = 0
        size = self.draw.randint(1, min(5, self.logical or 5))
        stay = self.workers[:size] if self.draw.random() < 0.5 else []
        self.workers = stay
        for rank in range(size):
            if rank >= len(stay):
                base = Base(self.length, self.base == "groups") if self.base else None
                sampler = Sampler(self.length, rank, size, base=base, **self.options)
                ahead = self.draw.choice((0, 0, 2, 5))
                self.workers.append(Worker(sampler, self.batch_size, self.whole, self.blocks, ahead))
            self.workers[rank].sampler.at = WorldPlace(rank, size, 0)
            if self.state is None:
                self.state = self.workers[0].sampler.state_dict()
            self.workers[rank].sampler.load_state_dict(self.state)
        self.ledger = self.committed.copy()

    def commit(self) -> None:
        states = [worker.sampler.state_dict() for worker in self.workers]
        assert all(state == states[0] for state in states), "the state is the same on all ranks"
        self.state = states[0]
        self.committed = self.ledger.copy()

    def run(self) -> None:
        with mock.patch.object(feeding, "settings", lambda: self.settings):
            for _ in range(400):
                self.form()
                if self.round():
                    break
            else:
                raise AssertionError("never came to its end")
        self.check()

    def round(self) -> bool:
        """One world, until it is broken off or all epochs are done; whether they are."""
        calm = self.draw.random() < 0.4
        while self.workers[0].sampler.epoch < EPOCHS:
            loaders = [worker.iterate(self.whole_steps) for worker in self.workers]
            while (batches := _next_of_all(loaders)) is not None:
                self.take(batches)
                change = self.draw.random()
                if self.draw.random() < 0.8:
                    self.commit()
                    if batches[0][1].last and change < 0.05 and self.settings.number:
                        self.settings = self._settings(self.settings.number + 1)
                if change > 0.97 and not calm:
                    return False
            assert {worker.sampler.position for worker in self.workers} == {0}
            if self.draw.random() < 0.5:
                self.commit()
            if self.draw.random() < 0.1 and not calm:
                return False
        self.commit()
        return True

    def take(self, batches: list[tuple[Any, Share]]) -> None:
        """All workers have been given their next micro-batch."""
        shares = [share for _, share in batches]
        assert len({(share.micro, share.micros, share.total) for share in shares}) == 1
        assert all(data for data, _ in batches), "no micro-batch is empty"
        assert all(share.samples in (0, len(data)) for data, share in batches)
        if not shares[0].micro:
            self.step = []
        self.step += [index for data, share in batches if share.samples for index in data]
        if shares[0].last or not (self.whole_steps or self.logical):
            sampler = self.workers[0].sampler
            self.ledger.steps.setdefault(sampler.epoch, []).append((self.step, shares[0].total))
            self.step = []
            size = self.settings.global_batch if shares[0].last else 0
            assert self.base == "groups" or not size or shares[0].total == size or sampler.position == self.length

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for epoch in range(EPOCHS):
            if self.length:
                self.check_epoch(epoch, self.committed.steps.get(epoch, []))

    def check_epoch(self, epoch: int, steps: list[tuple[list[Any], int]]) -> None:
        base = Base(self.length, self.base == "groups") if self.base else None
        fresh = Sampler(self.length, 0, 1, base=base, **self.options)
        fresh.set_epoch(epoch)
        order = fresh.order()
        row = order.take(range(len(order)))
        flat = [index for one in row for index in (one if isinstance(one, list) else [one])]
        taken = Counter(index for real, _ in steps for index in real)
        surplus, missing = taken - Counter(flat), Counter(flat) - taken
        parts = max(5, self.logical)
        largest = max((len(one) if isinstance(one, list) else 1 for one in row), default=1)
        if self.tail != "pad":
            assert not surplus, (self.tail, surplus)
        elif self.base != "groups":
            assert sum(surplus.values()) < parts
            assert surplus <= Counter(flat[:parts] * math.ceil(parts / len(flat))), "padded from the beginning"
        if self.tail != "drop" and not self.whole:
            assert not missing, (self.tail, missing)
        most = max(parts, max((total for _, total in steps), default=0), self._largest()) if self.whole else parts
        assert sum(missing.values()) <= (most - 1) * largest
        self.check_order(flat, steps)

    def _largest(self) -> int:
        return max(self.settings.global_batch, 12 * (self.logical or 1), self.batch_size * 8)

    def check_order(self, flat: list[int], steps: list[tuple[list[Any], int]]) -> None:
        """The samples come in the order of the epoch: each step takes the next ones of it, and each micro-batch does
        where there are no logical ranks."""
        at = 0
        for real, _ in steps:
            expected = [flat[place % len(flat)] for place in range(at, at + len(real))]
            assert Counter(real) == Counter(expected)
            at += len(real)


def _next_of_all(loaders: list[BatchIterator]) -> list[tuple[Any, Share]] | None:
    """The next micro-batch of each worker; None when all have come to the end, which they do together."""
    found = [next(loader, None) for loader in loaders]
    assert len({one is None for one in found}) == 1, "all workers have the same number of micro-batches"
    return None if found[0] is None else [one for one in found if one is not None]
