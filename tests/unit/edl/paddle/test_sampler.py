"""``EDLDistributedSampler``, ``EDLBatchSampler``, ``DataLoader`` and ``shard_iterable`` under Paddle."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("paddle")

import numpy as np
from paddle import io

import edl.paddle as edl
from edl.errors import DataError, StateError
from edl.paddle.loader import DataLoader
from edl.paddle.sampler import EDLBatchSampler, EDLDistributedSampler
from edl.wire.records import Settings
from edl.worker import feeding

pytestmark = pytest.mark.paddle
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.fixture(autouse=True)
def nobody_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Paddle's processes outlive an iteration that is broken off, and even the test program if that ends abruptly."""
    opened = []
    begin = DataLoader._open

    def noted(loader: Any) -> Any:
        opened.append((loader, begin(loader)))
        return opened[-1][1]

    monkeypatch.setattr(DataLoader, "_open", noted)
    yield
    for loader, source in opened:
        loader._close(source, False)
    assert not multiprocessing.active_children()


class Numbers(io.Dataset[Any]):
    """Each item is its own index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return np.int64(index)


class Stream(io.IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(map(np.int64, range(self._length)))


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 12, 60, 64, 101])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_batches_are_those_of_paddle(length: int, world: int) -> None:
    numbers = Numbers(length)
    for shuffle, drop_last, rank, batch_size in itertools.product((True, False), (True, False), range(world), (1, 3)):
        if shuffle and length % world:
            continue  # Paddle shuffles the padding in, so its order depends on the world
        ours = EDLBatchSampler(numbers, batch_size, world, rank, shuffle, drop_last)
        theirs = io.DistributedBatchSampler(numbers, batch_size, world, rank, shuffle, drop_last)
        for epoch in (0, 3):
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert len(ours) == len(theirs)
            assert list(ours) == list(theirs)
            assert ours.epoch == epoch + 1


def test_each_sample_once_where_the_order_cannot_be_that_of_paddle() -> None:
    samplers = [EDLBatchSampler(Numbers(50), 4, 3, rank, shuffle=True, tail="exact") for rank in range(3)]
    loaders = [DataLoader(Numbers(50), batch_sampler=one) for one in samplers]
    got = [list(loader.shares()) for loader in loaders]
    assert {len(one) for one in got} == {5}
    assert {share.full for one in got for _, share in one} == {12}
    real = [index for one in got for batch, share in one if share.samples for index in batch.tolist()]
    assert sorted(real) == list(range(50))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tail", "options"), [("pad", {}), ("exact", WORKERS[0]), ("exact", WORKERS[1]), ("exact", WORKERS[2])]
)
def test_an_epoch_over_three_worlds(tail: str, options: dict[str, Any]) -> None:
    numbers = Numbers(50)
    state: Any = None
    got: list[int] = []
    for world, steps in ((2, 3), (3, 2), (4, 99)):
        loaders = []
        for rank in range(world):
            sampler = EDLBatchSampler(numbers, 3, world, rank, shuffle=True, tail=tail)
            loaders.append(DataLoader(numbers, batch_sampler=sampler, **options))
            if state is not None:
                loaders[rank].load_state_dict(state)
        for together in itertools.islice(zip(*(loader.shares() for loader in loaders), strict=True), steps):
            got += [index for batch, share in together if share.samples for index in batch.tolist()]
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
    order = list(EDLDistributedSampler(numbers, 1, 0))
    assert sorted(got) == sorted(order + (order[:2] if tail == "pad" else []))
    assert (state["epoch"], state["position"]) == (1, 0)


@pytest.mark.parametrize("options", WORKERS)
def test_what_was_fetched_ahead_is_not_consumed(options: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(40), batch_size=4, shuffle=True, seed=3, **options)
    for _ in range(2):
        batches = iter(loader)
        first = [next(batches).tolist() for _ in range(2)]
        state = loader.state_dict()
        assert state["position"] == 8
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="this iteration is over"):
            next(batches)
        rest = lists(loader)
        assert sorted(itertools.chain(*first, *rest)) == list(range(40))
    assert loader.epoch == 2


def test_settings_that_change_take_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Settings()
    monkeypatch.setattr(feeding, "settings", lambda: now)
    loader = DataLoader(Numbers(40), batch_size=4)
    batches = iter(loader)
    got = [next(batches).tolist()]
    now = Settings(number=1, global_batch=6, local_batch=3)
    got += [next(batches).tolist() for _ in range(2)]
    assert got == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert loader.share is not None and (loader.share.micro, loader.share.total) == (1, 6)


def test_paddles_loader_takes_indices_ahead_also_without_workers(capfd: pytest.CaptureFixture[str]) -> None:
    sampler = EDLBatchSampler(Numbers(24), 4, 2, 0)
    for count, _ in enumerate(io.DataLoader(Numbers(24), batch_sampler=sampler)):
        assert sampler.sampler.position == 8 * count
        sampler.sampler.advance(8)
    assert sampler.epoch == 1
    assert capfd.readouterr().err.count("paddle.io.DataLoader takes indices ahead") == 1


def test_base_samplers_depend_on_seed_and_epoch_only() -> None:
    def epoch_of(base: Any, rank: int, world: int) -> list[Any]:
        np.random.rand(rank + 3)
        sampler = EDLDistributedSampler(Numbers(40), world, rank, seed=1, base=base)
        sampler.set_epoch(2)
        return list(sampler)

    for base in (
        io.WeightedRandomSampler([0.1, 0.2, 3.0, 1.0] * 10, 40),
        io.BatchSampler(Numbers(40), shuffle=True, batch_size=4),
    ):
        whole = epoch_of(base, 0, 1)
        both = zip(epoch_of(base, 0, 2), epoch_of(base, 1, 2), strict=True)
        assert [one for pair in both for one in pair] == whole


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_a_stream_over_two_worlds(workers: int, tail: str) -> None:
    got: list[int] = []
    state: Any = None
    for world, steps in ((2, 3), (3, 99)):
        loaders = []
        for rank in range(world):
            stream = edl.shard_iterable(Stream(41), tail=tail, num_replicas=world, rank=rank)
            loaders.append(DataLoader(stream, batch_size=3, num_workers=workers))
            if state is not None:
                loaders[rank].load_state_dict(state)
        for together in itertools.islice(zip(*(loader.shares() for loader in loaders), strict=True), steps):
            got += [index for batch, share in together if share.samples for index in batch.tolist()]
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
    assert sorted(got) == sorted([*range({"drop": 39}.get(tail, 41)), *([36] if tail == "pad" else [])])
    assert (state["epoch"], state["position"]) == (1, 0)


def test_a_stream_is_what_it_was_after_our_loader() -> None:
    stream = edl.shard_iterable(Stream(9))
    assert [index for batch in DataLoader(stream, batch_size=4) for index in batch.tolist()] == list(range(9))
    assert [index for index in stream] == list(range(9))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EDLBatchSampler(Numbers(3), 2, 2), "give both, or neither"),
        (lambda: EDLBatchSampler(sampler=io.RandomSampler(Numbers(3))), "base=sampler"),  # type: ignore[arg-type]
        (lambda: EDLBatchSampler(sampler=EDLDistributedSampler(Numbers(3)), shuffle=True), "belong to it"),
        (lambda: DataLoader(Numbers(3), batch_sampler=io.BatchSampler(Numbers(3))), "base=batch_sampler"),
        (lambda: DataLoader(Stream(3)), "shard_iterable"),
        (
            lambda: DataLoader(edl.shard_iterable(Stream(3)), num_workers=1, persistent_workers=True),
            "would not receive",
        ),
        (lambda: DataLoader(Numbers(3), shuffle=True, batch_sampler=EDLBatchSampler(Numbers(3))), "give one of"),
        (lambda: DataLoader(Numbers(3), batch_size=2, batch_sampler=EDLBatchSampler(Numbers(3))), "EDLBatchSampler"),
        (lambda: DataLoader(Numbers(3), batch_size=0), "batch_size=0"),
        (lambda: DataLoader(edl.shard_iterable(Stream(3)), batch_size=0), "batch_size=0"),
        (lambda: DataLoader(edl.shard_iterable(Stream(3)), shuffle=True), "that of the stream"),
        (lambda: edl.shard_iterable(Stream(3), tail="half"), "tail='half': it must be one of pad, drop, exact"),
    ],
)
def test_arguments_that_are_not_possible(make: Any, text: str) -> None:
    with pytest.raises(StateError, match=text):
        make()


def test_another_data_set_is_refused() -> None:
    loader = DataLoader(Numbers(30), batch_size=4, shuffle=True)
    next(iter(loader))
    with pytest.raises(DataError, match="data set of 30 samples, and this one has 31"):
        DataLoader(Numbers(31), batch_size=4, shuffle=True).load_state_dict(loader.state_dict())


def test_state_keeps_a_sampler_and_a_loader() -> None:
    loader = DataLoader(Numbers(30), batch_size=4)
    state = edl.State(sampler=EDLBatchSampler(Numbers(30), 4), loader=loader)
    assert state.loader is loader
