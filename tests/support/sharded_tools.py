"""Checkpoints of sharded states as several workers write them, made without any worker.

One process plays all workers, one after another, in a group that exchanges nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

try:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError:  # torch 2.4
    from torch.distributed._tensor import Partial, Replicate, Shard  # type: ignore[attr-defined]
    from torch.distributed._tensor._utils import (  # type: ignore[import-not-found,no-redef]
        compute_local_shape_and_global_offset,
    )

from edl.adapters.files import PlainFiles
from edl.checkpoint.directory.writer import FileCheckpointStorage
from edl.torch.arrays import TorchArrays
from edl.torch.sharded import DTensor, capture
from edl.wire.records import Version
from edl.wire.snapshot import Layout, Leaf, Meta
from edl.worker import tree
from edl.worker.framework import Arrays
from tests.support.checkpoint_tools import JOB, open_checkpoint_storage

__all__ = ["Partial", "Replicate", "Shard"]

ARRAYS = TorchArrays()


def part(
    arrays: Arrays, objects: Mapping[str, Any], values: Mapping[str, Any], version: Version, shard: int, shards: int
) -> memoryview:
    """The state that one worker commits."""
    leaves: tree.Leaves = []
    kept: dict[str, dict[str, Any]] = {"objects": {}, "values": {}}
    for kind, named in (("objects", objects), ("values", values)):
        for name, value in named.items():
            kept[kind][name], found = tree.flatten(value, arrays.is_array, name)
            leaves += found
    infos = [(name, arrays.info(array)) for name, array in leaves]
    layout = Layout([Leaf(name, info.dtype, info.shape, info.size) for name, info in infos])
    plan = layout.plan(Meta(JOB, version.era, version.commit, 1, shard, shards, "torch"), kept)
    view = memoryview(bytearray(plan.size))
    plan.write_header(view)
    arrays.copy_out([array for _, array in leaves], [view[at : at + size] for _, at, size in plan.leaves])
    return view


def write(
    arrays: Arrays, folder: Path, workers: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], commit: int = 1
) -> tuple[FileCheckpointStorage, Path]:
    """A complete checkpoint: of each worker its objects and values."""
    checkpoint_storage, version = open_checkpoint_storage(PlainFiles(folder)), Version(1, commit)
    where = ""
    for shard, (objects, values) in enumerate(workers):
        data = part(arrays, objects, values, version, shard, len(workers))
        where = checkpoint_storage.write(version, data, shard, len(workers))
    return checkpoint_storage, Path(where)


@contextlib.contextmanager
def playing(rank: int, world: int) -> Iterator[None]:
    """This process is one worker of a world. What DTensors remember of operations holds for the worker before."""
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()
    else:  # an older torch
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut(whole: Any, mesh: Any, placements: Any) -> Any:
    """This worker's part of a tensor, as a DTensor."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


Spreading = Callable[[Any], Any]


def one_dimension(whole: Any) -> Any:
    return cut(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def last_dimension(whole: Any) -> Any:
    return cut(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(whole.dim() - 1)])


def two_dimensions(whole: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return cut(whole, mesh, [Shard(0), Shard(1) if whole.dim() > 1 else Replicate()])


def hybrid(whole: Any) -> Any:
    """Copies of a sharded model, as HSDP has them."""
    return cut(whole, init_device_mesh("cpu", (2, dist.get_world_size() // 2)), [Replicate(), Shard(0)])


class Model(torch.nn.Module):
    w0: Any
    w1: Any
    w2: Any

    def __init__(self, spreading: Spreading | None, *, trained: bool) -> None:
        super().__init__()
        for number, shape in enumerate([(7, 5), (3,), (4, 3, 2)]):
            values = torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * number
            value = spreading(values) if spreading is not None else values
            value = value if trained else filled(value, -1.0)
            self.register_parameter(f"w{number}", torch.nn.Parameter(value))
        self.register_buffer("seen", torch.tensor([9, 9] if trained else [0, 0]))
        self.extra: dict[str, Any] = {"calls": 3, "scale": torch.ones(2)} if trained else {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def filled(value: Any, number: float) -> Any:
    """With other values, spread the same way. Not by an operation of DTensors, which would talk to the others."""
    if not isinstance(value, DTensor):
        return torch.full_like(value, number)
    local = torch.full_like(value.to_local(), number)
    shape, stride = value.shape, value.stride()
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride)


def optimizer_of(model: Any, *, trained: bool) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if trained else 0.1)
    for number, parameter in enumerate(model.parameters() if trained else ()):
        moments = {"exp_avg": 7.0 + number, "exp_avg_sq": 8.0 + number}
        optimizer.state[parameter] = {"step": torch.tensor(5.0)} | {
            key: _scaled(parameter, factor) for key, factor in moments.items()
        }
    return optimizer


def _scaled(value: Any, factor: float) -> Any:
    if not isinstance(value, DTensor):
        return value.detach() * factor
    shape, stride = value.shape, value.stride()
    local = value.to_local().detach() * factor
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride)


def keep(folder: Path, world: int, spreading: Spreading) -> Path:
    """A checkpoint of a trained model by so many workers."""
    workers = []
    for rank in range(world):
        with playing(rank, world):
            model = Model(spreading, trained=True)
            objects = {"model": model, "optimizer": optimizer_of(model, trained=True)}
            parts = {name: capture(name, obj, objects) for name, obj in objects.items()}
            workers.append((own(parts), {"epoch": 4, "rank": rank, "noise": torch.arange(3) + rank}))
    return write(ARRAYS, folder, workers)[1]


def own(value: Any) -> Any:
    return tree.map_arrays(value, ARRAYS.is_array, lambda one: one.clone())


def assert_same(mine: Any, right: Any, path: str = "") -> None:
    if isinstance(right, DTensor):
        assert mine.placements == right.placements, path
        mine, right = mine.to_local(), right.to_local()
    if isinstance(right, torch.Tensor):
        assert mine.dtype == right.dtype and torch.equal(mine, right), path
    elif isinstance(right, dict):
        assert mine.keys() == right.keys(), path
        for key in right:
            assert_same(mine[key], right[key], f"{path}.{key}")
    elif isinstance(right, (list, tuple, deque)):
        for index, (one, other) in enumerate(zip(mine, right, strict=True)):
            assert_same(one, other, f"{path}.{index}")
    else:
        assert mine == right, path
