"""Restoring in place: how much memory it takes, and what is odd about tensors, optimizers and values."""

from __future__ import annotations

import copy
import math
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from edl.errors import CheckpointError, StateError  # noqa: E402
from edl.torch.state import State  # noqa: E402
from tests.support.torch_memory import Memory, same  # noqa: E402
from tests.torch_release import installed  # noqa: E402

pytestmark = pytest.mark.torch

PEAK = """
import os, sys, torch
from edl.torch.state import State
from tests.support.torch_memory import Memory

def built():
    model = torch.nn.Linear(4096, 2048, bias=False)  # 32 MB, and 64 MB of moments
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return model, optimizer

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) // 1024

def peak(kind):
    model, optimizer = built()
    if kind == "converted":  # as on a device: nothing of the snapshot can be used as it is
        kept = optimizer.state[model.weight]
        kept.update(exp_avg=kept["exp_avg"].half(), exp_avg_sq=kept["exp_avg_sq"].half())
    memory = Memory(State(model=model, optimizer=optimizer))
    kept = optimizer.state[model.weight]
    if kind == "converted":
        kept.update(exp_avg=kept["exp_avg"].float(), exp_avg_sq=kept["exp_avg_sq"].float())
    if kind == "other":
        kept.update(exp_avg=torch.zeros(9 << 20), exp_avg_sq=torch.zeros(9 << 20))
    del kept
    state = State(model=model, optimizer=optimizer)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    memory.restore(state)
    return resident("VmHWM") - before

torch.optim.Adam([torch.zeros(1)])  # the first optimizer imports half of torch
for kind in sys.argv[1:]:
    if os.fork() == 0:
        print(kind, peak(kind), sep=":", flush=True)
        os._exit(0)
    os.wait()
"""


KINDS = ["the same", "converted", "other"]


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    """MB beside the state, of each kind: processes of their own, forked from one that has imported torch."""
    found = subprocess.run([sys.executable, "-c", PEAK, *KINDS], capture_output=True, text=True, check=True)
    lines = (line.split(":") for line in found.stdout.splitlines())
    peaks = {kind: int(peak) for kind, peak in lines}
    assert list(peaks) == KINDS, found.stderr
    return peaks


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_restoring_needs_no_second_copy(peaks: dict[str, int], kind: str) -> None:
    assert peaks[kind] < 24, f"{peaks[kind]} MB beside a state of 96 MB"


def test_tensors_that_share_memory_get_values_of_their_own() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {
        "slow": torch.ones(2, 2),
        "first": torch.full((2, 2), 2.0),
        "same": torch.ones(2, 2) * 3,
    }
    memory = Memory(State(model=model, optimizer=optimizer))
    wanted = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    shared = torch.zeros(2, 2)
    optimizer.state[model.weight] = {"slow": model.weight.detach(), "first": shared, "same": shared}
    for order in ({"model": model, "optimizer": optimizer}, {"optimizer": optimizer, "model": model}):
        memory.restore(State(**order))
        assert same((model.state_dict(), optimizer.state_dict()), wanted)


@pytest.mark.parametrize("how", ["hook", "override"])
def test_optimizers_that_load_in_their_own_way_get_copies(how: str) -> None:
    seen: list[Any] = []

    class Own(torch.optim.SGD):  # type: ignore[misc,name-defined]
        def load_state_dict(self, found: Any) -> None:
            seen.append(found)
            super().load_state_dict(found)

    model = torch.nn.Linear(2, 2)
    optimizer = (Own if how == "override" else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if how == "hook":
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, found: seen.append(copy.copy(found)))
    memory = Memory(State(optimizer=optimizer))
    wanted = copy.deepcopy(optimizer.state_dict())
    memory.restore(State(optimizer=optimizer))
    memory.use_again()
    assert same(optimizer.state_dict(), wanted)
    assert same(seen[0]["state"], wanted["state"])
    memory.let_go()


def test_a_changed_optimizer_is_refused_in_torchs_words() -> None:
    model = torch.nn.Linear(2, 2)
    memory = Memory(State(optimizer=torch.optim.Adam(model.parameters())))
    with pytest.raises(CheckpointError, match=r"state\.optimizer does not fit .* ValueError: .*different number|size"):
        memory.restore(State(optimizer=torch.optim.Adam([model.weight])))


@pytest.mark.parametrize("sharded", [False, True])
def test_groups_that_are_added_later_are_refused_with_advice(sharded: bool) -> None:
    """What the script finds there is what works: an optimizer leaves frozen parameters as they are."""

    def made(*groups: list[Any]) -> tuple[Any, Any]:
        return model, torch.optim.AdamW([{"params": group} for group in groups], lr=0.1, weight_decay=0.5)

    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    _, late = made([model.bias])
    late.add_param_group({"params": [model.weight]})
    memory = Memory(State(sharded=sharded, model=model, optimizer=late))
    said = r"has 1 groups of parameters, 2 were kept: .* all of its groups when it is created.*add_param_group\(\)"
    with pytest.raises(CheckpointError, match=said):
        memory.restore(State(sharded=sharded, model=model, optimizer=made([model.bias])[1]))
    optimizer = made([model.bias], [model.weight])[1]
    memory.restore(State(sharded=sharded, model=model, optimizer=optimizer))
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_changed_model_is_refused_in_torchs_words() -> None:
    memory = Memory(State(model=torch.nn.Linear(2, 2)))
    for other, said in (
        (torch.nn.Linear(3, 2), "size mismatch for weight"),
        (torch.nn.Linear(2, 2, bias=False), "bias"),
    ):
        with pytest.raises(CheckpointError, match=said):
            memory.restore(State(model=other))


def test_the_memory_format_stays() -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    memory = Memory(State(model=model, optimizer=optimizer))
    strides = [model.weight.stride(), optimizer.state[model.weight]["exp_avg"].stride()]
    for fresh in (False, True):
        if fresh:
            optimizer.state.clear()
        memory.restore(State(model=model, optimizer=optimizer))
        assert [model.weight.stride(), optimizer.state[model.weight]["exp_avg"].stride()] == strides


@pytest.mark.parametrize("fresh", [False, True])
def test_the_memory_format_stays_where_an_optimizer_gets_copies(fresh: bool) -> None:
    def step(model: Any, optimizer: Any) -> None:
        model(torch.arange(75.0).view(1, 3, 5, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def built() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)  # reads everything as it lies in memory
        optimizer.register_load_state_dict_pre_hook(lambda *_: None)
        return model, optimizer

    model, optimizer = built()
    step(model, optimizer)
    memory = Memory(State(model=model, optimizer=optimizer))
    step(model, optimizer)
    wanted = copy.deepcopy(model.state_dict())
    if fresh:
        model, optimizer = built()
    memory.restore(State(model=model, optimizer=optimizer))
    step(model, optimizer)
    assert same(model.state_dict(), wanted)


class Shaped(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, buffer: Any) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)


def test_expanded_buffers_are_restored() -> None:
    for kept in (torch.full((1,), 3.0).expand(5), torch.arange(5.0)):
        memory = Memory(State(model=Shaped(kept)))
        model = Shaped(torch.zeros(1).expand(5))
        memory.restore(State(model=model))
        memory.use_again()
        assert model.buffer.tolist() == kept.tolist()
    parameter = torch.nn.Parameter(torch.zeros(1).expand(5))
    model = torch.nn.Module()
    model.weight = parameter
    memory = Memory(State(model=Shaped(torch.zeros(1))))
    model.weight = parameter
    memory = Memory(State(model=model))
    memory.restore(State(model=model))
    assert model.weight is parameter


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.conj(),
        lambda one: one.conj().imag,
        lambda one: one.t(),
        lambda one: one[:, ::2],
        lambda one: one.real,
        lambda one: one[:0],
        lambda one: one.conj().t()[1:],
    ],
)
def test_views_of_all_kinds(change: Any) -> None:
    value = change(torch.arange(12.0).view(3, 4) + 1j * torch.arange(12.0).view(3, 4).flip(0))
    state = State(model=Shaped(value.clone()), value=value)
    memory = Memory(State(model=Shaped(value), value=value))
    with torch.no_grad():
        state.model.buffer.zero_()
    memory.restore(state)
    assert torch.equal(state.model.buffer, value) and torch.equal(state.value, value)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (torch.float64, 0x7FF0000000000001),
        (torch.float32, 0x7F800001),
        (torch.float16, 0x7C01),
        (torch.bfloat16, 0x7F81),
        (torch.float8_e5m2, 0x7D),
        (torch.float8_e4m3fn, 0x7F),
        (torch.float64, -1),
    ],
)
def test_nan_keeps_its_payload(kind: Any, bits: int) -> None:
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[torch.empty(0, dtype=kind).element_size()]
    value = torch.tensor([bits, 0, bits], dtype=torch.int64).to(whole).view(kind)
    state = State(model=Shaped(value.clone()), value=value, scalar=struct.unpack("<d", struct.pack("<q", -5))[0])
    memory = Memory(state)
    state.model.buffer.view(whole).zero_()
    memory.restore(state)
    assert state.model.buffer.view(whole).tolist() == state.value.view(whole).tolist() == value.view(whole).tolist()
    assert struct.pack("<d", state.scalar) == struct.pack("<q", -5) and math.isnan(state.scalar)


def test_trained_values_are_filled_and_others_are_not() -> None:
    weight, data = torch.nn.Parameter(torch.ones(3)), torch.arange(6.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = State(weight=weight, more=[torch.ones(2, requires_grad=True)], row=data[:3], optimizer=optimizer)
    inner = state.more[0]
    memory = Memory(state)
    state.weight.sum().backward()
    optimizer.step()
    state.row = data[3:]
    memory.restore(state)
    assert state.weight is weight and weight.tolist() == [1, 1, 1] and weight.grad is None
    assert state.more[0] is inner
    assert state.row.tolist() == [0, 1, 2] and data.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(
        CheckpointError, match=r"state\.weight does not fit .*saved as a tensor of shape \[3\], now its shape is \[4\]"
    ):
        memory.restore(State(weight=torch.nn.Parameter(torch.ones(4)), more=state.more, row=data, optimizer=optimizer))


def test_tied_weights_stay_tied() -> None:
    model = torch.nn.ModuleList([torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)])
    model[1].weight = model[0].weight
    memory = Memory(State(model=model))
    wanted = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    memory.restore(State(model=model))
    assert model[1].weight is model[0].weight and torch.equal(model[0].weight, wanted)


def test_a_module_without_memory_is_refused() -> None:
    memory = Memory(State(model=torch.nn.Linear(2, 2)))
    with pytest.raises(StateError, match=r"state\.model cannot load .* weight is on the meta device.*to_empty"):
        memory.restore(State(model=torch.nn.Linear(2, 2, device="meta")))
    with pytest.raises(StateError, match=r"state\.model\.weight: .*meta device"):
        Memory(State(model=torch.nn.Linear(2, 2, device="meta")))
    with pytest.raises(StateError, match=r"state\.model\.weight: .*not been initialized"):
        Memory(State(model=torch.nn.LazyLinear(2)))


def test_a_lazy_module_takes_what_it_was() -> None:
    model = torch.nn.Linear(3, 2)
    memory = Memory(State(model=model))
    lazy = torch.nn.LazyLinear(2)
    memory.restore(State(model=lazy))
    assert torch.equal(lazy.weight, model.weight)


def test_keys_that_change_between_commits() -> None:
    class Growing(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, count: int) -> None:
            super().__init__()
            self.grow(count)

        def grow(self, count: int) -> None:
            for number in range(count):
                self.register_buffer(f"part{number}", torch.full((2,), float(number)))

    model = Growing(1)
    state = State(model=model)
    Memory(state)
    model.grow(3)
    memory = Memory(state)
    memory.restore(state)
    assert model.part2.tolist() == [2, 2]
    with pytest.raises(CheckpointError, match=r"(?s)state\.model does not fit .*Unexpected key.*part1"):
        memory.restore(State(model=Growing(1)))


class Odd(torch.Tensor):  # type: ignore[misc,name-defined]
    pass


def test_tensor_subclasses() -> None:
    model = Shaped(torch.ones(3).as_subclass(Odd))
    memory = Memory(State(model=model))
    model.buffer.zero_()
    memory.restore(State(model=model))
    assert type(model.buffer) is Odd and model.buffer.tolist() == [1, 1, 1]
    with pytest.raises(StateError, match=r"state\.value: a .*Odd cannot be kept: it would come back as a plain"):
        Memory(State(value=torch.ones(3).as_subclass(Odd)))


SCHEDULERS: dict[str, Any] = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 1, 4]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, 10),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.5),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [2])], [2]
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.StepLR(o, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}
if installed() >= (2, 6):  # before that its state held a function, which is refused
    SCHEDULERS["SWALR"] = lambda o: torch.optim.swa_utils.SWALR(o, 0.3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_as_they_were(kind: str) -> None:
    def step(optimizer: Any, scheduler: Any) -> None:
        optimizer.step()
        scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))

    def made() -> Any:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[kind](optimizer)

    optimizer, scheduler = made()
    for _ in range(3):
        step(optimizer, scheduler)
    memory = Memory(State(optimizer=optimizer, scheduler=scheduler))
    other, again = made()
    memory.restore(State(optimizer=other, scheduler=again))
    assert same(again.state_dict(), scheduler.state_dict())
    for _ in range(6):
        step(optimizer, scheduler)
        step(other, again)
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_gradient_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    memory = Memory(State(scaler=scaler))
    other = torch.amp.GradScaler("cpu")
    memory.restore(State(scaler=other))
    assert other.state_dict() == scaler.state_dict() and other.get_scale() == 8.0


def test_a_gradient_scaler_forgets_the_step_that_was_interrupted() -> None:
    """Between its ``unscale_`` and its ``update``: else the next step's gradients are applied times the scale."""
    weight = torch.nn.Parameter(torch.zeros(1))
    model = torch.nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    state = State(model=model, optimizer=optimizer, scaler=scaler)
    memory = Memory(state)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    memory.restore(state)
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == pytest.approx(-0.1)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError("Unable to allocate 3 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
)
def test_out_of_memory_keeps_its_name(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    class Greedy:
        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, plain: Any) -> None:
            raise error

    state = State(greedy=Greedy())
    memory = Memory(state)
    with pytest.raises(type(error)) as caught:
        memory.restore(state)
    assert caught.value is error
    assert "edl: out of memory while restoring state.greedy from commit 1 (era 1)" in capfd.readouterr().err


def test_types_come_back() -> None:
    missing: Any = defaultdict(int, a=1)
    state = State(counter=Counter("abca"), missing=missing, size=torch.Size([2, 3]), kind=torch.bfloat16)
    memory = Memory(state)
    state.counter, state.missing, state.size, state.kind = {}, {}, (), 0
    memory.restore(state)
    assert state.counter == Counter("abca") and type(state.counter) is Counter
    assert state.missing["b"] == 0 and type(state.missing) is defaultdict
    assert type(state.size) is torch.Size and state.size == (2, 3)
    assert state.kind is torch.bfloat16
