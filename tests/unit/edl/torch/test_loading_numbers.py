"""Random numbers around ``edl.torch.DataLoader``: it takes none from the script, and its processes repeat none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numpy")

import numpy as np
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils import data

import edl.torch as edl
from edl.torch.ddp import parallel
from edl.torch.loader import DataLoader
from edl.torch.sampler import EDLDistributedSampler

pytestmark = pytest.mark.torch
PROCESSES: list[dict[str, Any]] = [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


class Noisy(data.Dataset[Any]):
    """Each item is its index and noise from each generator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), random.random(), np.random.rand()


class Stream(data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


def noisy(index: int) -> Any:
    return Noisy()[index]


def standing() -> list[Any]:
    """Where the script's generators stand."""
    state: Any = np.random.get_state(legacy=False)
    return [torch.get_rng_state().tolist(), random.getstate(), state["state"]["key"].tolist(), state["state"]["pos"]]


def values(batches: Any) -> list[Any]:
    return [[column.tolist() for column in batch] for batch in batches]


@pytest.mark.parametrize("options", [{}, *PROCESSES])
@pytest.mark.parametrize("stream", [False, True])
def test_a_loader_draws_nothing_from_the_scripts_generators(options: dict[str, Any], stream: bool) -> None:
    if stream and options.get("persistent_workers"):
        pytest.skip("refused")
    source = edl.shard_iterable(Stream()) if stream else list(range(8))
    loader = DataLoader(source, 4, seed=1, **options)
    before = standing()
    for _ in range(2):
        found = iter(loader)
        next(found)
        assert standing() == before


@pytest.mark.parametrize("options", PROCESSES)
def test_what_other_processes_draw_goes_on_after_a_restart(options: dict[str, Any]) -> None:
    """As many numbers as batches: the second half is that of the undisturbed epoch, and no number comes twice."""
    samplers = [EDLDistributedSampler(Noisy(), 2, 1, seed=3) for _ in range(2)]
    loaders = [DataLoader(Noisy(), 4, sampler=one, **options) for one in samplers]
    whole = values(loaders[0])
    random.seed(5)
    torch.manual_seed(5)
    first = values(islice(loaders[1], 2))
    state = loaders[1].state_dict()
    again = DataLoader(Noisy(), 4, sampler=EDLDistributedSampler(Noisy(), 2, 1, seed=3), **options)
    again.load_state_dict(state)
    assert first + values(again) == whole
    drawn = [number for batch in whole for column in batch[1:] for number in column]
    assert len(set(drawn)) == len(drawn)
    assert values(loaders[0]) != whole, "another epoch"


def test_what_transforms_of_a_stream_draw_goes_on_after_a_restart() -> None:
    def loader() -> DataLoader:
        return DataLoader(edl.shard_iterable(Stream(), transform=noisy), 4, num_workers=2, seed=3)

    whole = values(islice(loader(), 5))
    broken_off, again = loader(), loader()
    first = values(islice(broken_off, 2))
    again.load_state_dict(broken_off.state_dict())
    assert first + values(islice(again, 3)) == whole


def test_a_generator_of_the_scripts_own_is_used() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    next(iter(DataLoader(list(range(8)), 4, generator=generator)))
    assert not torch.equal(generator.get_state(), before)


def test_gradients_are_laid_out_alike_in_the_first_step_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else three workers add them up in another order in the first step after a restart."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        layer = torch.nn.Linear
        model = torch.nn.Sequential(torch.nn.Embedding(5, 400), layer(400, 900), layer(900, 5))
        wrapped = parallel(model)
        layouts: list[list[list[tuple[int, ...]]]] = []

        def note(_: Any, bucket: Any) -> Any:
            layouts[-1].append([tuple(one.shape) for one in bucket.parameters()])
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        note.__annotations__ = {}  # else torch compares them as objects
        wrapped.register_comm_hook(None, note)
        for _ in range(3):
            layouts.append([])
            wrapped(torch.arange(5)).sum().backward()
        assert layouts[0] == layouts[1] == layouts[2]
        assert len(layouts[0]) > 1 and layouts[0][0][0] == (5,), "from the last layer to the first"
        assert parallel(model, static_graph=True).static_graph
        assert parallel(model, find_unused_parameters=True).find_unused_parameters
    finally:
        torch.distributed.destroy_process_group()
