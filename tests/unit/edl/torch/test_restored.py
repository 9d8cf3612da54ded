"""Restored torch states own their memory: overwriting the source changes nothing."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from edl.torch import loading  # noqa: E402
from edl.torch import sharded as sharding  # noqa: E402
from edl.torch.random_state import RandomState  # noqa: E402
from edl.torch.state import State  # noqa: E402
from tests.support.torch_memory import Memory, same  # noqa: E402
from tests.torch_release import installed  # noqa: E402

pytestmark = pytest.mark.torch


def everything(state: State) -> Any:
    objects = {name: copy.deepcopy(dict(obj.state_dict())) for name, obj in state._objects.items()}
    kept = {name: dict(getattr(obj, "kept", {})) for name, obj in state._objects.items()}
    return copy.deepcopy([objects, kept, state._values])


# --- modules that keep what they are given ---------------------------------------------------------------------------


class Holder(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Keeps tensors beside parameters and buffers, as torchmetrics does."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((64,), value))
        self.register_buffer("mean", torch.full((8,), value))
        self.inner = torch.nn.Linear(2, 2)
        self.kept: dict[str, Any] = {}


class Metric(Holder):
    """``persistent(True)``: its states are no buffers."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.total = torch.full((16,), value)
        self.seen = [torch.full((4,), value)] * int(value)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().state_dict(*args, **options)
        found[options.get("prefix", "") + "total"] = self.total.detach()
        found[options.get("prefix", "") + "seen"] = [one.detach() for one in self.seen]
        return found

    def _load_from_state_dict(self, found: Any, prefix: str, *rest: Any) -> None:
        self.total = found.pop(prefix + "total")
        self.seen = found.pop(prefix + "seen")
        self.kept = {"everything": dict(found)}
        super()._load_from_state_dict(found, prefix, *rest)


class Extra(Holder):
    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.extra: Any = {"history": [torch.full((4,), value)], "array": np.full(3, value), "count": int(value)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra
        self.kept = {"extra": extra}


class OwnRoot(Holder):
    def load_state_dict(self, found: Any, *args: Any, **options: Any) -> Any:
        self.kept = dict(found)
        return super().load_state_dict(found, *args, **options)


def hooked(value: float) -> Any:
    module = Holder(value)
    keep = lambda module, found, *rest: module.kept.update(found)  # noqa: E731
    module.register_load_state_dict_pre_hook(keep)
    return module


def hooked_inside(value: float) -> Any:
    module, inner = Holder(value), Holder(value)
    module.hooked = inner
    inner._register_load_state_dict_pre_hook(lambda found, *rest: module.kept.update(found))
    return module


def around(make: Callable[[float], Any]) -> Callable[[float], Any]:
    """A module that has such a one in it."""

    def made(value: float) -> Any:
        inner = make(value)
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ModuleDict({"inner": inner}))
        module.kept = inner.kept
        return module

    return made


MODULES: dict[str, Callable[[float], Any]] = {
    "metric": Metric, "metric inside": around(Metric), "extra state": Extra, "extra state inside": around(Extra),
    "own load_state_dict": OwnRoot, "hook": hooked, "hook inside": around(hooked_inside),
    "batch norm": lambda value: torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)),
    "weight norm": lambda value: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3)),
    "spectral norm": lambda value: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3)),
    "attention": lambda value: torch.nn.TransformerEncoderLayer(8, 2, 8),
    "average": lambda value: torch.optim.swa_utils.AveragedModel(torch.nn.Linear(3, 3)),
    "compiled": lambda value: torch.compile(torch.nn.Linear(3, 3)),
    "embedding": lambda value: torch.nn.EmbeddingBag(5, 3),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [name for name in MODULES if name != "hook" or installed() >= (2, 6)])
def test_modules_do_not_change_when_the_memory_is_used_again(kind: str) -> None:
    torch.manual_seed(1)
    first = State(model=MODULES[kind](3.0))
    memory = Memory(first)
    wanted = everything(first)[0]
    torch.manual_seed(2)
    state = State(model=MODULES[kind](1.0))
    memory.restore(state)
    before = everything(state)
    memory.use_again()
    assert same(everything(state), before)
    assert same(before[0], wanted)
    with torch.no_grad():  # training goes on; what was kept stays
        for parameter in state.model.parameters():
            parameter.zero_()
    assert same(everything(state)[1], before[1])
    memory.let_go()


@pytest.mark.parametrize("make", [functools.partial(torch.jit.script, torch.nn.Linear(3, 3))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_scripted_modules(make: Callable[[], Any]) -> None:
    state = State(model=make())
    memory = Memory(state)
    wanted = everything(state)
    with torch.no_grad():
        state.model.weight.zero_()
    memory.restore(state)
    memory.use_again()
    assert same(everything(state), wanted)


class Box:
    """Anything with the two methods."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return {"held": self.held}

    def load_state_dict(self, plain: Any) -> None:
        self.held = plain["held"]


def test_values_and_other_objects_do_not_change_either() -> None:
    held = {
        "list": [torch.ones(9), (torch.ones(1), np.ones(7))],
        "ordered": OrderedDict(a=torch.ones(2)),
        3: deque([torch.ones(3)], 4),
    }
    arrays = {"array": np.ones(5), "scalar": np.float32(1.5), "zero": np.array(2.5)}
    state = State(box=Box(held), tensor=torch.ones(33), nested=held, **arrays)
    memory = Memory(state)
    wanted = everything(state)
    state.box.held, state.tensor, state.array, state.nested = None, torch.zeros(1), np.zeros(1), {}
    memory.restore(state)
    memory.use_again()
    assert same(everything(state), wanted)
    assert state.array.flags.writeable
    memory.let_go()


def test_the_first_state_of_a_process_is_not_looked_at_either() -> None:
    state = State(model=Metric(3.0), box=Box([torch.ones(4)]))
    memory = Memory(state)
    memory.restore(state)
    memory.restore(state)
    memory.let_go()


# --- optimizers: torch's own load_state_dict is the reference --------------------------------------------------------

LR = 0.05
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS",
                                     "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")},
    "Muon": ("Muon", {}),
    "SparseAdam": ("SparseAdam", {}),
    "SGD momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "RMSprop centered": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "Adam fused": ("Adam", {"fused": True}),
    "AdamW foreach": ("AdamW", {"foreach": True}),
    "Adagrad fused": ("Adagrad", {"fused": True}),
    "SGD fused": ("SGD", {"momentum": 0.9, "fused": True}),
    "Adam tensor lr": ("Adam", {"lr": torch.tensor(LR)}),
    "Adam maximize": ("Adam", {"maximize": True}),
}  # fmt: skip
OPTIMIZERS = {name: found for name, found in OPTIMIZERS.items() if hasattr(torch.optim, found[0])}


def test_all_optimizers_of_torch_are_here() -> None:
    have = {name for name in vars(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert have - {"Optimizer"} == {name for name, _ in OPTIMIZERS.values()}


def built(kind: str, shift: float = 0.0) -> tuple[Any, Any]:
    name, options = OPTIMIZERS[kind]
    torch.manual_seed(4)
    layers = [torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False)]
    if name != "Muon":
        layers.insert(1, torch.nn.Conv1d(1, 1, 1))
    model = torch.nn.ModuleList(layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(shift)
    options = copy.deepcopy(options)
    if name == "LBFGS":
        return model, torch.optim.LBFGS(model.parameters(), lr=LR, max_iter=3)
    parameters = list(model.parameters())
    half = [{"params": parameters[:1], "lr": 2 * LR}, {"params": parameters[1:]}]
    groups = half if not isinstance(options.get("lr"), torch.Tensor) else parameters
    return model, getattr(torch.optim, name)(groups, **{"lr": LR, **options})


def train(model: Any, optimizer: Any, steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum((parameter - 1).pow(2).sum() for parameter in model.parameters())
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            losses.append(float(optimizer.step(closure)))
            continue
        losses.append(float(closure()))
        for parameter in model.parameters():
            parameter.grad += torch.randn(parameter.shape, generator=generator) / 9
            if isinstance(optimizer, torch.optim.SparseAdam):
                parameter.grad = parameter.grad.to_sparse()
        optimizer.step()
    return losses


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("steps_before", [0, 2], ids=["new process", "survivor"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_are_restored_as_load_state_dict_does(kind: str, steps_before: int) -> None:
    model, optimizer = built(kind)
    train(model, optimizer, 3)
    memory = Memory(State(model=model, optimizer=optimizer))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    theirs, reference = built(kind, 0.5)
    train(theirs, reference, steps_before, seed=9)
    theirs.load_state_dict(saved[0])
    reference.load_state_dict(saved[1])

    ours, restored = built(kind, 0.5)
    train(ours, restored, steps_before, seed=9)
    places = [(tensor, tensor.data_ptr()) for tensor in tensors([list(restored.state.values()), ours.state_dict()])]
    memory.restore(State(model=ours, optimizer=restored))
    memory.use_again()
    now = [tensor.data_ptr() for tensor in tensors([list(restored.state.values()), ours.state_dict()])]
    if kind != "LBFGS" and steps_before:  # its history has another length
        assert now == [place for _, place in places]
    assert same(restored.state_dict(), reference.state_dict())
    assert [type(one) for one in restored.state.values()] == [type(one) for one in reference.state.values()]
    assert train(ours, restored, 3, seed=5) == train(theirs, reference, 3, seed=5)
    assert same(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert same(restored.state_dict(), reference.state_dict())
    memory.let_go()


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def test_a_scripts_default_device_does_not_matter() -> None:
    """What is made for a commit or a restore is on the host. A tensor on ``meta`` has no content."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    numbers = RandomState()
    state = State(
        model=model, optimizer=optimizer, numbers=numbers, empty=torch.zeros(0), extra=torch.arange(5), step=7
    )
    before = everything(state)
    with torch.device("meta"):
        memory = Memory(state)
        generators = RandomState().state_dict()
        for parameter in model.parameters():
            parameter.detach().zero_()
        memory.restore(state)
    assert same(everything(state), before)
    assert generators["torch"].device.type == generators["python"][1].device.type == "cpu"


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_of_an_extra_state_are_put_where_the_script_had_them(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the function that puts all others there; ``tests/process/test_sharded.py`` looks on a card."""
    asked: list[tuple[Any, Any]] = []

    def placed(plain: Any, live: Any) -> Any:
        asked.append((plain, live))
        return plain

    monkeypatch.setattr(loading, "placed", placed)
    module = Extra(2.0)
    live = module.extra
    kept = copy.deepcopy(dict(module.state_dict()))
    load = sharding.load_local_parts if sharded else lambda name, *rest: loading.load_module(*rest)
    load("model", module, kept, lambda part: part)
    assert any(found is live and plain.keys() == live.keys() for plain, found in asked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("where", ["new", "trained", "sharded"])
def test_numbers_of_an_optimizer_keep_their_type(where: str, kind: Any, dtype: Any) -> None:
    """torch gives them that of the parameters, so that a training goes on in another way than without a fault."""

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 1, bias=False)).to(dtype)
        return model, kind(model.parameters(), lr=0.001)

    def train(model: Any, optimizer: Any, first: int) -> None:
        for number in range(first, first + 5):
            optimizer.zero_grad()
            (model(torch.full((1, 3), 1.0 / (number + 1), dtype=dtype)) ** 2).mean().backward()
            optimizer.step()

    (model, optimizer), (other, loaded) = made(), made()
    train(model, optimizer, 0)
    if where == "trained":
        train(other, loaded, 9)
    other.load_state_dict(model.state_dict())
    load = sharding.load_local_parts if where == "sharded" else lambda name, *rest: loading.load_optimizer(*rest)
    load("optimizer", loaded, copy.deepcopy(optimizer.state_dict()), copy.deepcopy)
    for _ in range(2):
        pairs = [
            (optimizer.state[one], loaded.state[two])
            for one, two in zip(model.parameters(), other.parameters(), strict=True)
        ]
        for ours, theirs in pairs:
            assert {key: (part.dtype, part.tolist()) for key, part in theirs.items()} == {
                key: (part.dtype, part.tolist()) for key, part in ours.items()
            }
        train(model, optimizer, 5)
        train(other, loaded, 5)
    assert same(list(model.parameters()), list(other.parameters()))


class Wide(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
    """As optimizers outside of torch do: an average in 32 bits of parameters in 16, a mask, and counts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["average"] = torch.zeros(parameter.shape)
                state["counts"] = torch.full(parameter.shape, 1000, dtype=torch.int64)
                state["seen"] = [torch.zeros(parameter.shape, dtype=torch.bool)]
            state["average"].lerp_(parameter.grad.float(), 0.01)
            state["counts"].add_(1)
            state["seen"][0].logical_or_(parameter.grad > 0)
            with torch.no_grad():
                parameter.add_(state["average"].to(parameter.dtype), alpha=-1.0)


@pytest.mark.parametrize("where", ["new", "trained", "sharded"])
def test_the_state_of_optimizers_that_are_not_of_torch_keeps_its_types(where: str) -> None:
    def made() -> tuple[Any, Any]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.bfloat16))
        return weight, Wide([weight])

    def train(weight: Any, optimizer: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(4):
            weight.grad = torch.randn(6, generator=generator).to(torch.bfloat16)
            optimizer.step()

    (weight, optimizer), (other, loaded) = made(), made()
    train(weight, optimizer, 0)
    if where == "trained":
        train(other, loaded, 1)
    other.data.copy_(weight.data)
    kept = copy.deepcopy(optimizer.state_dict())
    load = sharding.load_local_parts if where == "sharded" else lambda name, *rest: loading.load_optimizer(*rest)
    before = [id(one) for one in tensors(list(loaded.state.values()))]
    load("optimizer", loaded, copy.deepcopy(kept), copy.deepcopy)
    assert not before or before == [id(one) for one in tensors(list(loaded.state.values()))], "filled in place"
    assert same(loaded.state_dict(), kept)
    train(weight, optimizer, 2)
    train(other, loaded, 2)
    assert same(loaded.state_dict(), optimizer.state_dict())
    assert same([other], [weight])


def test_the_state_of_a_parameter_that_is_a_number_is_converted_as_by_torch() -> None:
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.tensor(0.5)
    optimizer.step()
    half = torch.optim.Adam([torch.nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))])
    loading.load_optimizer(half, copy.deepcopy(optimizer.state_dict()), copy.deepcopy)
    ((of_one,),) = [half.state.values()]
    assert (of_one["exp_avg"].dtype, of_one["step"].dtype) == (torch.bfloat16, torch.float32)


class OwnWay(torch.optim.SGD):  # type: ignore[misc,name-defined]
    """Loads its state in a way of its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize(("kind", "sharded"), [(torch.optim.SGD, False), (OwnWay, False), (torch.optim.SGD, True)])
def test_a_learning_rate_that_is_a_tensor_is_put_where_it_was(
    kind: Any, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card, where a captured step reads it."""
    asked: list[tuple[Any, Any]] = []
    put = loading.placed

    def placed(plain: Any, live: Any) -> Any:
        asked.append((plain, live))
        return put(plain, live)

    monkeypatch.setattr(loading, "placed", placed)
    model = torch.nn.Linear(2, 1)
    made: list[Any] = [kind(model.parameters(), lr=torch.tensor(rate)) for rate in (0.5, 0.25)]
    kept = copy.deepcopy(made[0].state_dict())
    (group,) = made[1].param_groups
    live = group["lr"]
    load = sharding.load_local_parts if sharded else lambda name, *rest: loading.load_optimizer(*rest)
    load("optimizer", made[1], kept, copy.deepcopy)
    assert any(found is live and float(plain) == 0.5 for plain, found in asked)
    assert float(made[1].param_groups[0]["lr"]) == 0.5


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_of_a_scripts_own_object_are_put_where_they_were(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An average of a model's parameters, for example: the next step computes with both."""
    asked: list[tuple[Any, Any]] = []

    def placed(plain: Any, live: Any) -> Any:
        asked.append((plain, live))
        return plain

    monkeypatch.setattr(loading, "placed", placed)
    box = Box([torch.ones(2)])
    live = box.held
    Memory(State(box=box, sharded=sharded)).restore(State(box=box, sharded=sharded))
    assert [(list(plain), found["held"] is live) for plain, found in asked] == [(["held"], True)]
