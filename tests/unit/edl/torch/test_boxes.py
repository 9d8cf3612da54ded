"""Where parts of DTensors lie, compared with what torch cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from edl.errors import StateError  # noqa: E402
from edl.torch import boxes  # noqa: E402
from edl.torch.boxes import box_of, cut  # noqa: E402
from edl.torch.sharded import DTensor  # noqa: E402
from tests.support.sharded_tools import Partial, Replicate, Shard, playing  # noqa: E402
from tests.torch_release import since  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def whole_tensor(rows: int) -> Any:
    return torch.arange(rows * 2.0).view(rows, 2)


def check(tensor: Any, whole: Any) -> int:
    """The part that torch has is what the whole tensor has in the box; returns its number of elements."""
    box = box_of(tensor)
    here = whole[tuple(slice(at, at + length) for at, length in zip(box.offset, box.shape, strict=True))]
    assert torch.equal(tensor.to_local(), here), (tensor.placements, box)
    assert box.volume == tensor.to_local().numel()
    return int(box.volume)


@pytest.mark.slow
@since("2.6", "FSDP2 works on GPUs alone")
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (3, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 13, 24])
def test_fsdp2_over_tensor_parallel_parameters(rows: int, dp: int, tp: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    elements = 0
    for rank in range(dp * tp):
        with playing(rank, dp * tp):
            mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
            module = nn.Linear(2, rows, bias=False)
            whole = whole_tensor(rows)
            # Without communication: every worker has the whole tensor, and cuts it.
            cut_once = distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
            module.weight = nn.Parameter(cut_once)
            fully_shard(module, mesh=mesh["dp"])
            elements += check(module.weight.detach(), whole)
    assert elements == whole_tensor(rows).numel(), "each element once"


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (2, 1, 3)])
def test_meshes_cut_one_dimension_from_left_to_right(sizes: tuple[int, ...]) -> None:
    for rows in (1, 5, 12, 13):
        for coordinate in itertools.product(*map(range, sizes)):
            part = whole_tensor(rows)
            for size, at in zip(sizes, coordinate, strict=True):
                parts = part.chunk(size)
                part = parts[at] if at < len(parts) else part[:0]
            box = cut((rows, 2), sizes, coordinate, [Shard(0)] * len(sizes))
            assert box.shape == tuple(part.shape)
            if part.numel():
                assert box.offset == (int(part[0, 0]) // 2, 0)


def test_copies_and_other_dimensions() -> None:
    box = cut((4, 10), (2, 3), (1, 2), [Replicate(), Shard(1)])
    assert (box.offset, box.shape) == ((0, 8), (4, 2))
    box = cut((5, 10), (2, 3), (1, 2), [Shard(0), Shard(1)])
    assert (box.offset, box.shape) == ((3, 8), (2, 2))
    box = cut((), (2,), (1,), [Replicate()])
    assert (box.offset, box.shape, math.prod(())) == ((), (), 1)


class Strided:
    """Like torch's ``_StridedShard``."""

    def __init__(self, dim: int, split_factor: int) -> None:
        self.dim, self.split_factor = dim, split_factor

    def is_partial(self) -> bool:
        return False


def test_parts_that_are_not_boxes_are_refused() -> None:
    with pytest.raises(StateError, match="its values are not summed up yet"):
        cut((4,), (2,), (0,), [Partial()])
    with pytest.raises(StateError, match=r"on a mesh of \(2, 2\) cannot be kept: its parts are not contiguous"):
        cut((16,), (2, 2), (0, 0), [Strided(0, 4), Shard(0)])


def test_an_order_that_torch_states_counts() -> None:
    both = [Shard(0), Shard(0)]
    assert cut((8,), (2, 2), (1, 0), both).offset == (4,)
    assert cut((8,), (2, 2), (1, 0), both, {0: (1, 0)}).offset == (2,)


def test_a_part_of_another_shape_is_refused() -> None:
    def part(rows: int) -> Any:
        more: dict[str, Any] = {"run_check": False, "shape": torch.Size((5, 2)), "stride": (2, 1)}
        return DTensor.from_local(torch.zeros(rows, 2), init_device_mesh("cpu", (2,)), [Shard(0)], **more)

    with playing(0, 2):
        assert box_of(part(3)).shape == (3, 2)
        with pytest.raises(StateError, match=r"a part of shape \(2, 2\), \(3, 2\) was expected"):
            box_of(part(2))


def test_tensors_that_differ_only_in_the_stated_order_have_boxes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with playing(2, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        tensor = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0), Shard(0)], run_check=False)
        assert box_of(tensor).offset == (4, 0)
        monkeypatch.setattr(boxes, "_explicit_order", lambda _: ((0, (1, 0)),))
        assert box_of(tensor).offset == (2, 0)
