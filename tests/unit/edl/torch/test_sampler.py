"""``EDLDistributedSampler``, ``EDLBatchSampler``, ``DataLoader`` and ``shard_iterable`` under torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")

import numpy as np
import torch
from torch.utils import data

import edl.torch as edl
from edl.errors import DataError, StateError
from edl.torch.loader import DataLoader
from edl.torch.sampler import EDLBatchSampler, EDLDistributedSampler
from edl.wire.records import Settings
from edl.worker import feeding

pytestmark = pytest.mark.torch
WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
]


class Numbers(data.Dataset[int]):
    """Each item is its own index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class Damaged(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("item 5")
        return super().__getitem__(index)


class Stream(data.IterableDataset[int]):
    def __init__(self, length: int | None) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return itertools.count() if self._length is None else iter(range(self._length))


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


# --- as torch's own --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 7, 10, 64, 101])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_order_is_that_of_torch(length: int, world: int) -> None:
    """Option for option, also for data sets smaller than the world, alone and with torch's and edl's loader."""
    numbers = Numbers(length)
    for shuffle, drop_last, rank in itertools.product((True, False), (True, False), range(world)):
        ours = EDLDistributedSampler(numbers, world, rank, shuffle, 5, drop_last)
        theirs: Any = data.DistributedSampler(numbers, world, rank, shuffle, 5, drop_last)
        for epoch in (0, 3):
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert len(ours) == len(theirs)
            assert list(ours) == list(theirs)
            for batch_size, whole in itertools.product((1, 3), (True, False)):
                expected = data.DataLoader(numbers, batch_size, sampler=theirs, drop_last=whole)
                for loader in (data.DataLoader[int], DataLoader):
                    ours.set_epoch(epoch)
                    mine: Any = loader(numbers, batch_size, sampler=ours, drop_last=whole)
                    assert len(mine) == len(expected)
                    assert lists(mine) == lists(expected)
                    assert ours.epoch == epoch + 1


@pytest.mark.parametrize("length", [1, 2, 10, 1000, 65536, 100_003])
def test_torch_shuffles_four_bytes_as_it_does_eight(length: int) -> None:
    def order(kind: torch.dtype) -> list[int]:
        found: list[int] = torch.randperm(length, generator=torch.Generator().manual_seed(3), dtype=kind).tolist()
        return found

    assert order(torch.int32) == order(torch.int64)


def test_the_computed_order() -> None:
    numbers = Numbers(1000)
    got = [list(EDLDistributedSampler(numbers, 3, rank, order="computed", tail="exact")) for rank in range(3)]
    assert sorted(itertools.chain(*got)) == list(range(1000))
    assert [len(one) for one in got] == [334, 333, 333]
    assert got[0][:5] == [225, 518, 829, 655, 146], "checkpoints depend on it"


# --- resizes, with real loaders --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tail", "options"),
    [("pad", {}), ("drop", {}), ("exact", WORKERS[0]), ("exact", WORKERS[1]), ("exact", WORKERS[2])],
)
def test_an_epoch_over_three_worlds(tail: str, options: dict[str, Any]) -> None:
    numbers = Numbers(50)
    state: Any = None
    got: list[int] = []
    for world, steps in ((2, 3), (3, 2), (4, 99)):
        loaders = []
        for rank in range(world):
            sampler = EDLDistributedSampler(numbers, world, rank, tail=tail)
            loaders.append(DataLoader(numbers, 3, sampler=sampler, **options))
            if state is not None:
                loaders[rank].load_state_dict(state)
        for together in itertools.islice(zip(*(loader.shares() for loader in loaders), strict=True), steps):
            got += [index for batch, share in together if share.samples for index in batch.tolist()]
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state = states[0]
    order = list(EDLDistributedSampler(numbers, 1, 0))
    if tail == "exact":
        assert sorted(got) == list(range(50))
    elif tail == "drop":
        assert sorted(got) == sorted(order[:48]), "14 were left for 4 workers"
    else:
        assert sorted(got) == sorted(order + order[:2])
    assert (state["epoch"], state["position"]) == (1, 0)


@pytest.mark.parametrize("options", WORKERS)
def test_what_was_fetched_ahead_is_not_consumed(options: dict[str, Any]) -> None:
    numbers = Numbers(40)
    loader = DataLoader(numbers, 4, shuffle=True, seed=3, pin_memory=False, **options)
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(2)]
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 8)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="this iteration is over"):
        next(batches)
    rest = lists(loader)
    assert sorted(itertools.chain(*first, *rest)) == list(range(40))
    assert first + rest == lists(data.DataLoader(numbers, 4, sampler=EDLDistributedSampler(numbers, 1, 0, seed=3)))
    assert loader.epoch == 1
    assert len(lists(loader)) == 10, "and on with the next epoch"
    assert next(batches, None) is None


@pytest.mark.parametrize("options", WORKERS)
def test_settings_that_change_take_effect_at_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    now = Settings()
    monkeypatch.setattr(feeding, "settings", lambda: now)
    loader = DataLoader(Numbers(40), 4, **options)
    batches = iter(loader)
    got = [next(batches).tolist()]
    now = Settings(number=1, global_batch=6, local_batch=3)
    got += [next(batches).tolist() for _ in range(2)]
    now = Settings(number=2)
    got += [next(batches).tolist()]
    assert got == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12, 13]]
    assert loader.share is not None and loader.share.total == 4


def test_a_batch_sampler_counts_alone_and_in_a_loader_without_workers() -> None:
    numbers = Numbers(20)
    sampler = EDLDistributedSampler(numbers, 2, 1, shuffle=False)
    batches = EDLBatchSampler(sampler, 3)
    assert len(batches) == 4
    iterator = iter(batches)
    assert next(iterator) == [1, 3, 5]
    assert batches.state_dict()["position"] == 6
    loader = data.DataLoader(numbers, batch_sampler=batches)
    got = iter(loader)
    assert next(got).tolist() == [7, 9, 11]
    assert sampler.position == 12
    assert lists(DataLoader(numbers, batch_sampler=batches)) == [[13, 15, 17], [19]]
    batches.set_epoch(7)
    batches.load_state_dict(batches.state_dict())
    assert sampler.epoch == 7


def batches_of(numbers: Any) -> EDLBatchSampler:
    return EDLBatchSampler(EDLDistributedSampler(numbers), 2)


def test_a_batch_sampler_in_torchs_own_loader_follows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Settings(number=1, global_batch=2)
    monkeypatch.setattr(feeding, "settings", lambda: now)
    numbers = Numbers(22)
    loader = data.DataLoader(numbers, batch_sampler=EDLBatchSampler(EDLDistributedSampler(numbers, shuffle=False), 4))
    batches = iter(loader)
    now = Settings(number=2, global_batch=4)
    got = [next(batches).tolist()]
    now = Settings(number=3, global_batch=6, local_batch=3)
    got += [next(batches).tolist()]
    now = Settings(number=4, global_batch=8, local_batch=8)  # from the next step on
    got += lists(batches)
    assert got == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [*range(10, 18)], [18, 19, 20, 21]]


def test_torchs_usual_pair_of_sampler_and_shuffle_is_taken() -> None:
    sampler = EDLDistributedSampler(Numbers(3))
    assert DataLoader(Numbers(3), shuffle=sampler is None, sampler=sampler).sampler is sampler


@pytest.mark.parametrize("options", WORKERS)
def test_a_batch_that_cannot_be_loaded_ends_the_iteration(options: dict[str, Any]) -> None:
    """Else those after it would be counted for it."""
    loader = DataLoader(Damaged(16), 4, **options)
    batches = loader.shares()
    assert next(batches)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="item 5"):
        next(batches)
    with pytest.raises(StateError, match="could not be loaded"):
        next(batches)
    assert loader.state_dict()["position"] == 4


def test_scripts_find_the_sampler_and_the_batch_size_where_torch_has_them() -> None:
    numbers = Numbers(20)
    sampler = EDLDistributedSampler(numbers, 2, 1)
    loader: Any = DataLoader(numbers, 4, sampler=sampler, drop_last=True)
    assert isinstance(loader, data.DataLoader)
    assert (loader.sampler, loader.batch_size, loader.drop_last) == (sampler, 4, True)
    ours: Any = loader
    ours.sampler.set_epoch(3)
    assert ours.epoch == 3
    assert loader.dataset is numbers


def test_a_foreign_loader_with_workers_is_noted(capfd: pytest.CaptureFixture[str]) -> None:
    numbers = Numbers(24)
    sampler = EDLDistributedSampler(numbers, 2, 0, shuffle=False)
    loader = data.DataLoader(numbers, 4, sampler=sampler, num_workers=1)
    for epoch in range(2):
        for count, _ in enumerate(loader):
            assert sampler.position == 8 * count
            sampler.advance(8)
        assert (sampler.epoch, sampler.position) == (epoch + 1, 0)
    said = capfd.readouterr().err
    assert said.count("takes indices ahead of the script") == 1
    assert "use edl.DataLoader, or call advance(samples of all workers)" in said


# --- base samplers ---------------------------------------------------------------------------------------------------


def weighted(generator: torch.Generator | None) -> Any:
    return data.WeightedRandomSampler([0.1, 0.2, 3.0, 1.0] * 10, 40, generator=generator)


def buckets() -> Any:
    return data.BatchSampler(data.RandomSampler(Numbers(40)), 4, False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: weighted(None),
        lambda: weighted(torch.Generator()),
        lambda: data.SubsetRandomSampler(range(5, 35), generator=torch.Generator()),
        lambda: data.BatchSampler(weighted(torch.Generator()), 4, False),
        buckets,
    ],
    ids=["weighted", "weighted with generator", "subset", "batches of weighted", "batches"],
)
def test_base_samplers_depend_on_seed_and_epoch_only(make: Any) -> None:
    numbers = Numbers(40)

    def epoch_of(rank: int, world: int, seed: int = 1) -> list[Any]:
        torch.rand(rank + 3)  # the global generator stands elsewhere on each rank
        sampler = EDLDistributedSampler(numbers, world, rank, seed=seed, base=make())
        sampler.set_epoch(2)
        return list(sampler)

    whole = epoch_of(0, 1)
    assert [one for both in zip(epoch_of(0, 2), epoch_of(1, 2), strict=True) for one in both] == whole
    assert epoch_of(0, 1, seed=4) != whole


def test_a_base_sampler_does_not_disturb_the_generators() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before: Any = (torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())
    list(EDLDistributedSampler(Numbers(40), 1, 0, base=buckets()))
    assert torch.equal(before[0], torch.get_rng_state())
    assert str(before[1:]) == str((np.random.get_state(legacy=False), random.getstate()))


def test_groups_in_a_loader() -> None:
    numbers = Numbers(40)
    sampler = EDLDistributedSampler(numbers, 2, 0, base=buckets())
    other = EDLDistributedSampler(numbers, 2, 1, base=buckets())
    got = [list(DataLoader(numbers, sampler=one).shares()) for one in (sampler, other)]
    assert [share.total for _, share in got[0]] == [8, 8, 8, 8, 8]
    assert {share.full for _, share in got[0]} == {0}, "groups vary in size"
    assert sorted(index for one in got for batch, _ in one for index in batch.tolist()) == list(range(40))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_short_step_says_how_large_the_others_are(streamed: bool) -> None:
    if streamed:
        stream = edl.shard_iterable(Stream(20), tail="exact", num_replicas=2, rank=0)
        loader = DataLoader(stream, 4)
    else:
        loader = DataLoader(Numbers(20), 4, sampler=EDLDistributedSampler(Numbers(20), 2, 0, tail="exact"))
    assert [(share.total, share.full) for _, share in loader.shares()] == [(8, 8), (8, 8), (4, 8)]


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("tail", ["pad", "drop", "exact"])
def test_a_stream_over_two_worlds(workers: int, tail: str) -> None:
    got: list[int] = []
    state: Any = None
    for world, steps in ((2, 3), (3, 99)):
        loaders = []
        for rank in range(world):
            stream = edl.shard_iterable(Stream(41), tail=tail, num_replicas=world, rank=rank)
            loaders.append(DataLoader(stream, 3, num_workers=workers))
            if state is not None:
                loaders[rank].load_state_dict(state)
        for together in itertools.islice(zip(*(loader.shares() for loader in loaders), strict=True), steps):
            got += [index for batch, share in together if share.samples for index in batch.tolist()]
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
    # 23 are left for 3 workers: two steps of 9, and 5.
    assert sorted(got) == sorted([*range({"drop": 39}.get(tail, 41)), *([36] if tail == "pad" else [])])
    assert (state["epoch"], state["position"]) == (1, 0)


def test_an_endless_stream_that_can_begin_anywhere_and_transforms_only_its_own() -> None:
    class Seekable(Stream):
        def iter_from(self, position: int) -> Iterator[int]:
            begun.append(position)
            return itertools.count(position)

    begun: list[int] = []
    made: list[int] = []

    def transform(item: int) -> int:
        made.append(item)
        return item * 10

    stream = edl.shard_iterable(Seekable(None), transform=transform, num_replicas=2, rank=1)
    stream.load_state_dict({"epoch": 0, "position": 10**12, "tail": "pad"})
    loader = DataLoader(stream, 2)
    batches = iter(loader)
    assert next(batches).tolist() == [10**13 + 10, 10**13 + 30]
    assert begun == [10**12] and made == [10**12 + 1, 10**12 + 3]
    assert loader.state_dict()["position"] == 10**12 + 4


def test_a_stream_is_what_it_was_after_our_loader() -> None:
    stream = edl.shard_iterable(Stream(9))
    assert [index for batch in DataLoader(stream, 4) for index in batch.tolist()] == list(range(9))
    assert list(stream) == list(range(9))


def test_a_stream_without_our_loader_is_cut_by_rank_and_worker() -> None:
    got = []
    for rank in range(2):
        stream = edl.shard_iterable(Stream(20), num_replicas=2, rank=rank)
        got += [index for batch in data.DataLoader(stream, 2, num_workers=2) for index in batch.tolist()]
    assert sorted(got) == list(range(20))


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EDLDistributedSampler(Numbers(3), 2), "give both, or neither"),
        (lambda: EDLDistributedSampler(Numbers(3), 2, 2), "less than num_replicas=2"),
        (lambda: EDLDistributedSampler(Numbers(3), drop_last=True, tail="pad"), "leave one of them out"),
        (lambda: DataLoader(Numbers(3), sampler=data.RandomSampler(Numbers(3))), "base=sampler"),
        (lambda: DataLoader(Numbers(3), batch_sampler=buckets()), "base=batch_sampler"),
        (lambda: DataLoader(Numbers(3), num_workers=1, in_order=False), "in_order=False"),
        (lambda: DataLoader(Stream(3)), "shard_iterable"),
        (
            lambda: DataLoader(edl.shard_iterable(Stream(3)), num_workers=1, persistent_workers=True),
            "would not receive",
        ),
        (lambda: DataLoader(Numbers(3), shuffle=True, sampler=EDLDistributedSampler(Numbers(3))), "give one of"),
        (lambda: EDLBatchSampler(data.RandomSampler(Numbers(3)), 2), "base=sampler"),  # type: ignore[arg-type]
        (lambda: DataLoader(Numbers(3), batch_size=0), "batch_size=0"),
        (lambda: DataLoader(Numbers(3), 2, batch_sampler=batches_of(Numbers(3))), "to the EDLBatchSampler"),
        (lambda: DataLoader(edl.shard_iterable(Stream(3)), 0), "batch_size=0"),
        (lambda: DataLoader(edl.shard_iterable(Stream(3)), None), "batch_size=None"),  # type: ignore[arg-type]
        (lambda: DataLoader(edl.shard_iterable(Stream(3)), 2, shuffle=True), "that of the stream"),
        (lambda: edl.shard_iterable(Stream(3), tail="half"), "tail='half': it must be one of pad, drop, exact"),
    ],
)
def test_arguments_that_are_not_possible(make: Any, text: str) -> None:
    with pytest.raises(StateError, match=text):
        make()


def test_another_data_set_is_refused() -> None:
    loader = DataLoader(Numbers(30), 4, shuffle=True)
    next(iter(loader))
    with pytest.raises(DataError, match="data set of 30 samples, and this one has 31"):
        DataLoader(Numbers(31), 4, shuffle=True).load_state_dict(loader.state_dict())


def test_state_keeps_a_sampler_and_a_loader() -> None:
    loader = DataLoader(Numbers(30), 4)
    state: Any = edl.State(sampler=EDLDistributedSampler(Numbers(30)), loader=loader)
    assert state.loader is loader


def test_the_world_of_a_plain_script_comes_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(EDLDistributedSampler(Numbers(9), shuffle=False)) == [1, 4, 7]


class TestModelParallel:
    """Consecutive ranks of one replica get the same samples."""

    def indices(self, monkeypatch: pytest.MonkeyPatch, rank: int, world: int, **options: Any) -> list[int]:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        return list(EDLDistributedSampler(Numbers(37), shuffle=True, **options))

    @pytest.mark.parametrize("size", [2, 3])
    def test_replicas_get_what_workers_get_without_it(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        for rank in range(4 * size):
            found = self.indices(monkeypatch, rank, 4 * size, model_parallel=size)
            assert found == list(data.DistributedSampler(Numbers(37), 4, rank // size, shuffle=True))

    def test_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for rank in range(4):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "4")
            loader = DataLoader(edl.shard_iterable(Stream(12), model_parallel=2), batch_size=3)
            assert [batch.tolist() for batch in loader] == [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]][rank // 2]

    def test_refusals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(StateError, match=r"model_parallel=2 in a world of 3 workers.*--replica-size=2"):
            self.indices(monkeypatch, 0, 3, model_parallel=2)
        with pytest.raises(StateError, match="model_parallel=0: it must be an integer of at least 1"):
            EDLDistributedSampler(Numbers(3), model_parallel=0)
        with pytest.raises(StateError, match="model_parallel=2 with num_replicas=4: leave one of them out"):
            EDLDistributedSampler(Numbers(3), 4, 0, model_parallel=2)
