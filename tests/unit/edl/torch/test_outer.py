"""What local steps read and write of a module, and what they refuse. Between workers: tests/process."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import edl.torch as edl  # noqa: E402
from edl.arithmetic.outer_step import BUCKET_BYTES  # noqa: E402
from edl.errors import StateError  # noqa: E402
from edl.torch import outer  # noqa: E402
from edl.torch.group import GroupLost  # noqa: E402
from edl.torch.outer import TorchReplica  # noqa: E402

pytestmark = pytest.mark.torch


def model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).to(dtype)
    made[0].bias.requires_grad_(False)
    return made


def test_trained_parameters_and_floating_buffers_are_exchanged() -> None:
    replica = TorchReplica(model())
    assert replica.names == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert len(replica.read_buffers()) == 2, "not the number of batches"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_written_is_read(dtype: Any) -> None:
    trained = model(dtype)
    replica = TorchReplica(trained)
    before = replica.read()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {one.dtype for one in before} == {wide}
    changed = [one + 1e-4 for one in before]
    replica.write(changed)
    for number, (array, read) in enumerate(zip(changed, replica.read(), strict=True)):
        assert torch.equal(replica.rounded(number, array), read)
        assert (replica.rounded(number, array) is array) == (dtype == wide)
    assert not torch.equal(before[0], changed[0]), "read() has copied"


def test_everything_is_copied_and_put_back() -> None:
    trained = model()
    replica = TorchReplica(trained)
    before = {name: one.clone() for name, one in trained.state_dict().items()}
    saved = replica.copy()
    trained(torch.randn(5, 3))
    with torch.no_grad():
        for one in trained.parameters():
            one.add_(1)
    replica.set(saved)
    assert all(torch.equal(one, before[name]) for name, one in trained.state_dict().items())


def test_sums_of_many_and_of_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket is one collective of one type, and all values come back to their places."""
    calls: list[Any] = []

    def all_reduce(flat: Any) -> None:
        calls.append((flat.dtype, flat.numel()))
        flat.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(TorchReplica, "workers", 2)
    large = BUCKET_BYTES // 4 + 1
    arrays = [torch.ones(2, 3), torch.full((), 2.0, dtype=torch.float64), torch.ones(large), torch.full((4,), 5.0)]
    summed = TorchReplica(model()).sum_over_workers(arrays, "")
    assert calls == [(torch.float32, 6), (torch.float32, large), (torch.float32, 4), (torch.float64, 1)]
    assert [float(one.max()) for one in summed] == [2, 4, 2, 10]
    assert [one.shape for one in summed] == [(2, 3), (), (large,), (4,)]
    calls.clear()
    summed = TorchReplica(model()).sum_over_workers(arrays, "bfloat16")
    assert [float(one.max()) for one in summed] == [4, 8, 4, 20]
    assert calls == [(torch.bfloat16, 6 + large + 4), (torch.bfloat16, 1)]


def test_an_outer_step_whose_sums_are_spoilt_on_their_way_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's calls return before their sums exist. When it is aborted, it leaves garbage there without an exception."""
    trained = model()
    local = edl.LocalSGD(trained, every=1)
    objects = {"model": trained, "outer": local}
    session = SimpleNamespace(training=True, state=SimpleNamespace(_objects=objects), check=lambda: None)
    monkeypatch.setattr(local, "_session", lambda: session)
    local.restored()
    first = {name: one.clone() for name, one in trained.state_dict().items()}
    with torch.no_grad():
        trained[0].weight.add_(1)
    progress = {name: one.clone() for name, one in trained.state_dict().items()}
    aborted = threading.Event()

    def exchange(replica: TorchReplica, data: bytes) -> list[bytes]:
        if aborted.is_set():
            raise GroupLost("round 1: the exchanged data cannot be used: the group was aborted")
        return [data, data]

    monkeypatch.setattr(TorchReplica, "workers", 2)
    monkeypatch.setattr(TorchReplica, "exchange", exchange)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: flat.fill_(torch.nan))
    monkeypatch.setattr(outer, "wait_for", lambda device: aborted.set())
    with pytest.raises(GroupLost):
        local.step()
    assert (local.inner_steps, local.outer_steps) == (1, 0)

    aborted.clear()
    local.before_restore(objects, False)
    trained.load_state_dict(first)
    local.restored()
    assert local.inner_steps == 1
    assert all(torch.equal(one, progress[name]) for name, one in trained.state_dict().items())


def test_a_wrapped_or_frozen_model_is_refused() -> None:
    with pytest.raises(StateError, match="without trained parameters"):
        edl.LocalSGD(torch.nn.ReLU(), every=2)

    sharded = model()
    sharded.set_requires_gradient_sync = None  # as fully_shard does
    with pytest.raises(StateError, match="a Sequential, whose workers communicate in each step"):
        edl.DiLoCo(sharded)


def test_a_parameter_that_is_trained_from_now_on_is_named() -> None:
    trained = model()
    replica = TorchReplica(trained)
    trained[2].requires_grad_(False)
    replica.read()
    trained[0].bias.requires_grad_(True)
    with pytest.raises(StateError, match=r"local steps: 0\.bias is trained, and was frozen"):
        replica.read()


def test_complex_arrays_are_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter type would drop the imaginary part."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: flat.mul_(2))
    monkeypatch.setattr(TorchReplica, "workers", 2)
    (summed,) = TorchReplica(model()).sum_over_workers([torch.tensor([1 + 2j])], "bfloat16")
    assert summed.tolist() == [2 + 4j]


def test_impossible_values_are_refused() -> None:
    with pytest.raises(StateError, match="wire='int8': one of float32, bfloat16, float16"):
        edl.LocalSGD(model(), every=2, wire="int8")
    with pytest.raises(StateError, match="outer_momentum=1"):
        edl.DiLoCo(model(), outer_momentum=1)


def test_the_state_holds_the_model_and_not_the_inner_optimizer() -> None:
    trained = model()
    local = edl.DiLoCo(trained)
    with pytest.raises(StateError, match=r"missing in the State: State\(model=model, outer=outer"):
        local.before_restore(edl.State(outer=local)._objects, True)
    inner = torch.optim.AdamW(trained.parameters())
    with pytest.raises(StateError, match=r"state\.optimizer: with local steps each worker has an inner optimizer"):
        local.before_restore(edl.State(outer=local, model=trained, optimizer=inner)._objects, True)
    other = torch.optim.AdamW(model().parameters())
    local.before_restore(edl.State(outer=local, model=trained, optimizer=other)._objects, True)


def test_a_difference_in_the_outer_state_is_a_fault() -> None:
    trained = model()
    local = edl.DiLoCo(trained)
    held = edl.State(outer=local, model=trained)._held()
    assert held.must_equal("outer.momentum.0.weight")
