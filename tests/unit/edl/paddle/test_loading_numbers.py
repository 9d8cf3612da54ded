"""Random numbers around ``edl.paddle.DataLoader``: it takes none from the script, and its processes repeat none."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest

pytest.importorskip("paddle")

import numpy as np
import paddle
from paddle import io

import edl.paddle as edl
from edl.paddle import loader as module
from edl.paddle.loader import DataLoader
from edl.paddle.sampler import EDLBatchSampler, EDLDistributedSampler

pytestmark = pytest.mark.paddle


@pytest.fixture(autouse=True)
def nobody_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Paddle's processes outlive an iteration that is broken off."""
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


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state has a ``RandomState``."""
    monkeypatch.setattr(module, "keeps_numbers", lambda: True)


class Noisy(io.Dataset[Any]):
    """Each item is its index and noise from each generator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return np.int64(index), np.float64(random.random()), np.float64(np.random.rand())


class Stream(io.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(np.int64, count())


def noisy(index: int) -> Any:
    return Noisy()[index]


def standing() -> list[Any]:
    """Where the script's generators stand."""
    state: Any = np.random.get_state(legacy=False)
    own = [one.__getstate__() for one in paddle.get_rng_state()]
    return [own, random.getstate(), state["state"]["key"].tolist(), state["state"]["pos"]]


def values(batches: Any) -> list[Any]:
    return [[column.tolist() for column in batch] for batch in batches]


def a_loader(**options: Any) -> DataLoader:
    sampler = EDLDistributedSampler(Noisy(), 2, 1, seed=3)
    return DataLoader(Noisy(), batch_sampler=EDLBatchSampler(batch_size=4, sampler=sampler), **options)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_loader_draws_nothing_from_the_scripts_generators(options: dict[str, Any], stream: bool) -> None:
    if stream and options.get("persistent_workers"):
        pytest.skip("refused")
    source: Any = edl.shard_iterable(Stream()) if stream else [np.int64(number) for number in range(8)]
    loader = DataLoader(source, batch_size=4, seed=1, **options)
    before = standing()
    next(iter(loader))
    assert standing() == before


def test_a_base_sampler_draws_nothing_either_and_orders_alike() -> None:
    found = []
    for seed in (1, 2):
        paddle.seed(seed)
        before = standing()
        base = io.SubsetRandomSampler(list(range(20)))
        found.append(list(EDLDistributedSampler(Noisy(), 2, 1, base=base)))
        assert standing() == before
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_what_other_processes_draw_goes_on_after_a_restart(options: dict[str, Any]) -> None:
    undisturbed, broken_off, again = (a_loader(**options) for _ in range(3))
    whole = values(undisturbed)
    np.random.seed(5)
    first = values(islice(broken_off, 2))
    again.load_state_dict(broken_off.state_dict())
    assert first + values(again) == whole
    drawn = [number for batch in whole for column in batch[1:] for number in column]
    assert len(set(drawn)) == len(drawn)
    assert values(undisturbed) != whole, "another epoch"


def test_what_transforms_of_a_stream_draw_goes_on_after_a_restart() -> None:
    def loader() -> DataLoader:
        return DataLoader(edl.shard_iterable(Stream(), transform=noisy), batch_size=4, num_workers=2, seed=3)

    whole = values(islice(loader(), 5))
    broken_off, again = loader(), loader()
    first = values(islice(broken_off, 2))
    again.load_state_dict(broken_off.state_dict())
    assert first + values(islice(again, 3)) == whole


def nested(batch: Any) -> Any:
    return {"index": np.stack([one[0] for one in batch]), "rest": [paddle.to_tensor([2.0]), "text", {"n": 3}]}


def plainly(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plainly(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plainly(part) for part in value]
    return (str(value.dtype), str(value.place), value.tolist()) if paddle.is_tensor(value) else value


@pytest.mark.parametrize("options", [{}, {"collate_fn": nested}, {"drop_last": True}])
@pytest.mark.parametrize("stream", [False, True])
def test_batches_that_are_loaded_on_demand_are_those_of_paddle(
    options: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [(np.int64(index), np.float32(index)) for index in range(10)]

    class Whole(io.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(pairs)

    def batches(on_demand: bool) -> list[Any]:
        monkeypatch.setattr(module, "keeps_numbers", lambda: on_demand)
        source: Any = edl.shard_iterable(Whole(), tail="exact") if stream else pairs
        return [plainly(batch) for batch in DataLoader(source, batch_size=4, **options)]

    assert batches(True) == batches(False)
    assert len(batches(True)) == (2 if options.get("drop_last") else 3)


@pytest.mark.usefixtures("kept")
def test_nothing_is_drawn_ahead_of_the_script() -> None:
    """Paddle would load the next batches on a thread, with the numbers that the script draws meanwhile."""
    found = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)
        drawn = []
        for batch in a_loader():
            drawn.append((values([batch]), random.random(), np.random.rand()))
        found.append(drawn)
    assert found[0] == found[1]
    random.seed(1)
    np.random.seed(1)
    before = standing()
    iter(a_loader())
    assert standing() == before
