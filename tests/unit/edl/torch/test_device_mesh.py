"""Meshes of different worlds in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from edl.errors import StateError  # noqa: E402
from edl.torch.device_mesh import begin_world, mesh  # noqa: E402
from edl.torch.sharded import DTensor, capture  # noqa: E402
from tests.torch_release import since  # noqa: E402

pytestmark = [pytest.mark.torch, since("2.6", "FSDP2 works on GPUs alone")]


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def world(rank: int, size: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    begin_world()


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(5, 13, bias=False)
    fully_shard(model, mesh=mesh())
    return model


def test_a_model_of_another_world_of_the_same_size_has_the_parts_of_its_own_rank() -> None:
    offsets = []
    for rank in (3, 1, 2):
        world(rank, 4)
        model = sharded()
        (name, kept), *_ = capture("model", model, {"model": model}).items()
        assert name == "weight"
        weight = model.get_parameter("weight").detach()
        assert isinstance(weight, DTensor) and tuple(weight.device_mesh.get_coordinate() or ()) == (rank,)
        offsets.append((kept["offset"], list(kept["edl_local"].shape)))
    assert offsets == [([12, 0], [1, 5]), ([4, 0], [4, 5]), ([8, 0], [4, 5])]


def test_the_mesh_is_the_same_until_the_world_changes() -> None:
    world(0, 2)
    first = mesh()
    assert mesh() is first and first.mesh_dim_names == ("dp",) and first.size() == 2
    again = dist.device_mesh.init_device_mesh(first.device_type, (2,), mesh_dim_names=("dp",))
    assert again == first and hash(again) == hash(first), "within a world torch compares them as ever"
    world(0, 2)
    assert mesh() != first


def test_meshes_of_earlier_worlds_are_freed() -> None:
    """torch has caches with the meshes in their keys, of which it clears only one."""
    world(0, 2)
    model = sharded()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    earlier = weakref.ref(mesh())
    del model, parameter
    world(0, 2)
    gc.collect()
    assert earlier() is None


def test_a_survivor_takes_part_in_what_the_first_random_operator_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process has nothing of the kind, so torch sends the generator's state in it."""
    from torch.distributed.tensor import _random

    world(0, 2)
    mesh()
    monkeypatch.setattr(_random, "_rng_tracker", kept := object())
    mesh(tp=2)
    assert _random._rng_tracker is kept, "the same world"
    world(0, 2)
    mesh()
    assert _random._rng_tracker is None


def test_without_a_world_there_is_no_mesh() -> None:
    with pytest.raises(StateError, match="there is no world yet"):
        mesh()


def test_inner_dimensions_keep_their_sizes_and_dp_takes_the_rest() -> None:
    for size in (4, 8, 12):
        world(size - 1, size)
        both = mesh(pp=2, tp=2)
        assert both.mesh_dim_names == ("dp", "pp", "tp") and tuple(both.shape) == (size // 4, 2, 2)
        assert mesh(pp=2, tp=2) is both and mesh() is not both
        assert both["tp"].mesh.tolist() == [size - 2, size - 1], "consecutive ranks"


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"tp": 2}, r"mesh\(tp=2\) needs a multiple of 2 workers, and this world has 3.*--replica-size=2"),
        ({"tp": 0}, r"mesh\(tp=0\): give the size of each dimension but dp as a number from 1"),
        ({"dp": 3}, r"mesh\(dp=3\): give the size of each dimension but dp"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(inner: dict[str, int], message: str) -> None:
    world(0, 3)
    with pytest.raises(StateError, match=message):
        mesh(**inner)
