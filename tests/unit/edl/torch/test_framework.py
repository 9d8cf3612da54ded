"""Internals of torch that edl relies on, and its reading of torch's errors."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from edl.torch import ddp, group  # noqa: E402
from edl.torch.device_mesh import mesh  # noqa: E402
from edl.torch.framework import TorchFramework  # noqa: E402
from edl.wire.local import Seat  # noqa: E402

pytestmark = pytest.mark.torch


def alone(number: int, restore_commit: int = 0) -> Seat:
    return Seat(
        round=number, rank=0, local_rank=0, world_size=1, local_world_size=1, node="n", nodes=1, position=0,
        endpoints=("h:1",), master="127.0.0.1:1", era=number, restore_era=0, restore_commit=restore_commit, shards=1,
        stored=False, checkpoint_dir="", token="",
    )  # fmt: skip


def test_this_torch_has_the_private_names_that_rejoining_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchFramework().why_not_in_process() == ""
    monkeypatch.delattr(distributed_c10d, "_update_default_pg")
    assert "_update_default_pg" in TorchFramework().why_not_in_process()


def test_rounds_alone_leave_the_hook_for_exceptions_and_the_gradients_as_they_were() -> None:
    framework, model = TorchFramework(), torch.nn.Linear(2, 2)
    hook, held = sys.excepthook, []
    expected = None
    for number in (1, 2, 3):
        formed = framework.prepare(alone(number, restore_commit=number - 1))
        framework.connect(formed, formed.seat)
        assert dist.is_initialized() and dist.get_world_size() == 1
        wrapped = DistributedDataParallel(model) if number == 2 else ddp.parallel(model)
        held.append(wrapped)
        model.zero_grad()
        wrapped(torch.ones(1, 2)).sum().backward()
        gradient = model.weight.grad.clone()
        assert expected is None or torch.equal(gradient, expected)
        expected = gradient
        formed.abort()
        formed.retire()
    framework.prepare(alone(4))
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    with pytest.raises(RuntimeError, match="create it inside train"):
        held[0](torch.ones(1, 2))


def test_the_mesh_of_a_world_ends_with_it_even_if_the_script_asks_for_no_other() -> None:
    framework = TorchFramework()
    formed = framework.prepare(alone(1))
    framework.connect(formed, formed.seat)
    made, of_world = weakref.ref(mesh()), weakref.ref(dist.group.WORLD)
    formed.abort()
    formed.retire()
    del formed
    framework.prepare(alone(2))
    gc.collect()
    assert (made(), of_world()) == (None, None)


def test_an_aborted_group_cannot_be_formed() -> None:
    framework = TorchFramework()
    formed = framework.prepare(alone(1))
    formed.abort()
    formed.abort()
    with pytest.raises(group.GroupLost) as caught:
        framework.connect(formed, formed.seat)
    assert framework.lost_peers(caught.value)
    formed.retire()


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33184. "
        "This is typically caused by a remote worker crashing.",
        "Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:144] no error",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "NCCL communicator was aborted on rank 1.",
        "Socket Timeout",
    ],
)
def test_errors_about_peers(text: str) -> None:
    framework = TorchFramework()
    assert framework.lost_peers(RuntimeError(text))
    outer = ValueError("the step failed")
    outer.__cause__ = RuntimeError(text)
    assert framework.lost_peers(outer)
    assert not framework.lost_peers(ValueError(text))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ConnectionResetError("my data base"), KeyError("x")],
)
def test_errors_about_other_things(error: Exception) -> None:
    assert not TorchFramework().lost_peers(error)


@pytest.mark.slow
def test_the_launchers_part_comes_without_torch_and_the_rest_starts_no_thread() -> None:
    program = (
        "import sys, threading, edl.torch.startup; assert 'torch' not in sys.modules\n"
        "import edl.torch as edl; edl.State, edl.run, edl.context, edl.parallel, edl.RandomState\n"
        "import torch; assert threading.active_count() == 1; assert not torch.cuda.is_initialized()\n"
        "assert 'torch.distributed.checkpoint' not in sys.modules  # as slow as torch itself\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
