"""Restored Paddle states own their memory: overwriting the source changes nothing."""

from __future__ import annotations

import copy
import importlib.util
import mmap
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddle is not installed", allow_module_level=True)

import paddle

from edl.errors import CheckpointError
from edl.paddle.state import State
from edl.wire import snapshot
from edl.wire.snapshot import Meta

pytestmark = [
    pytest.mark.paddle,
    pytest.mark.filterwarnings("ignore:When training, we now always track"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
]  # Paddle's L-BFGS
nn: Any = paddle.nn
optim: Any = paddle.optimizer


class Memory:
    """A commit, as an agent holds it."""

    def __init__(self, state: State) -> None:
        self._maps: list[mmap.mmap] = []
        state._write("state", Meta("job", 1, 1, 1, 0, 1, "paddle"), self._room)
        self.view = memoryview(self._maps[0])

    def _room(self, size: int) -> memoryview:
        self._maps.append(mmap.mmap(-1, size))
        return memoryview(self._maps[-1])

    def restore(self, state: State) -> None:
        state._load(snapshot.parse(self.view), self.view, frozenset(state._objects))

    def use_again(self) -> None:
        self.view[:] = b"\xa5" * len(self.view)

    def let_go(self) -> None:
        """Raises ``BufferError`` if an array over it is left."""
        self.view.release()
        self._maps[0].close()


def plain(value: Any) -> Any:
    """For comparison to the bit."""
    if isinstance(value, paddle.Tensor):
        return str(value.dtype), value.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype, value.tobytes()
    if isinstance(value, dict):
        return type(value), {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value), [plain(part) for part in value]
    return value


class Holder(nn.Layer):  # type: ignore[misc]
    """A layer that keeps a value as it was given."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1D(2))
        self.register_buffer("mean", paddle.full([4], value))
        self.kept: dict[str, Any] = {}

    def set_state_dict(self, found: Any, *rest: Any) -> Any:
        self.kept = dict(found)
        return super().set_state_dict(found, *rest)


LAYERS: dict[str, Any] = {
    "holder": Holder,
    "batch norm": lambda value: nn.Sequential(nn.Conv2D(1, 2, 3), nn.BatchNorm2D(2)),
    "spectral norm": lambda value: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "attention": lambda value: nn.TransformerEncoderLayer(8, 2, 8),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_do_not_change_when_the_memory_is_used_again(kind: str) -> None:
    first = LAYERS[kind](3.0)
    memory = Memory(State(model=first))
    layer = LAYERS[kind](1.0)
    places = {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()}
    memory.restore(State(model=layer))
    memory.use_again()
    assert plain(dict(layer.state_dict())) == plain(dict(first.state_dict()))
    assert plain(getattr(layer, "kept", {})) == plain(dict(first.state_dict()) if kind == "holder" else {})
    assert {name: tensor.data_ptr() for name, tensor in layer.state_dict().items()} == places
    memory.let_go()


class Scheduler(optim.lr.StepDecay):  # type: ignore[misc]
    """Keeps an array that it is given."""

    kept: Any = None

    def set_state_dict(self, found: Any) -> None:
        self.kept = found.pop("history")
        super().set_state_dict(found)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "history": paddle.ones([5])}


OPTIMIZERS = ["SGD", "Momentum", "Adagrad", "Adam", "AdamW", "Adamax", "Adadelta", "RMSProp", "Lamb", "NAdam", "RAdam",
              "ASGD", "Rprop", "LBFGS"]  # fmt: skip


def test_all_optimizers_of_paddle_are_here() -> None:
    kinds = {name for name, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert kinds - {"Optimizer"} == set(OPTIMIZERS)


def built(kind: str) -> tuple[Any, Any]:
    paddle.seed(3)
    net = nn.Linear(3, 2)
    own: dict[str, dict[str, Any]] = {
        "Adagrad": {"learning_rate": 0.1},
        "ASGD": {"batch_num": 2},
        "RMSProp": {"learning_rate": 0.1},
    }
    options = own.get(kind, {})
    if kind == "LBFGS":
        options = {"max_iter": 3}
    elif kind != "Rprop":
        options = {**options, "learning_rate": Scheduler(0.1, 2)}
    return net, getattr(optim, kind)(parameters=net.parameters(), **options)


def train(net: Any, optimizer: Any, steps: int) -> list[float]:
    def closure() -> Any:
        optimizer.clear_grad()
        loss = (net(paddle.ones([4, 3])) - 1).square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        if isinstance(optimizer, optim.LBFGS):
            losses.append(float(optimizer.step(closure)))
            continue
        losses.append(float(closure()))
        optimizer.step()
        if hasattr(optimizer._learning_rate, "step"):
            optimizer._learning_rate.step()
    return losses


@pytest.mark.parametrize("steps_before", [0, 2], ids=["new process", "survivor"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_go_on_when_the_memory_is_used_again(kind: str, steps_before: int) -> None:
    net, optimizer = built(kind)
    train(net, optimizer, 3)
    memory = Memory(State(model=net, optimizer=optimizer))
    expected = train(net, optimizer, 3)
    again, restored = built(kind)
    train(again, restored, steps_before)
    state = State(model=again, optimizer=restored)
    places = [tensor.data_ptr() for values in restored._accumulators.values() for tensor in values.values()]
    memory.restore(state)
    now = [tensor.data_ptr() for values in restored._accumulators.values() for tensor in values.values()]
    assert now == places or not steps_before
    memory.use_again()
    if isinstance(restored._learning_rate, Scheduler):
        assert restored._learning_rate.kept.tolist() == [1] * 5
    assert train(again, restored, 3) == expected
    memory.let_go()


lr: Any = optim.lr
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "NoamDecay": lambda: lr.NoamDecay(16, 4),
    "ExponentialDecay": lambda: lr.ExponentialDecay(0.1, 0.9),
    "NaturalExpDecay": lambda: lr.NaturalExpDecay(0.1, 0.1),
    "InverseTimeDecay": lambda: lr.InverseTimeDecay(0.1, 0.1),
    "PolynomialDecay": lambda: lr.PolynomialDecay(0.1, 5, cycle=True),
    "LinearWarmup": lambda: lr.LinearWarmup(lr.CosineAnnealingWarmRestarts(0.1, 3), 4, 0.01, 0.1),
    "PiecewiseDecay": lambda: lr.PiecewiseDecay([3, 9], [0.1, 0.05, 0.01]),
    "CosineAnnealingDecay": lambda: lr.CosineAnnealingDecay(0.1, 8),
    "MultiStepDecay": lambda: lr.MultiStepDecay(0.1, [3, 9]),
    "StepDecay": lambda: lr.StepDecay(0.1, 3),
    "LambdaDecay": lambda: lr.LambdaDecay(0.1, lambda epoch: 0.95**epoch),
    "MultiplicativeDecay": lambda: lr.MultiplicativeDecay(0.1, lambda epoch: 0.95),
    "ReduceOnPlateau": lambda: lr.ReduceOnPlateau(0.1, patience=1, cooldown=1),
    "OneCycleLR": lambda: lr.OneCycleLR(0.3, 40),
    "CyclicLR": lambda: lr.CyclicLR(0.01, 0.1, 3),
    "CosineAnnealingWarmRestarts": lambda: lr.CosineAnnealingWarmRestarts(0.1, 3, T_mult=2),
    "LinearLR": lambda: lr.LinearLR(0.1, 20),
}


def test_all_schedulers_of_paddle_are_here() -> None:
    kinds = {name for name, kind in vars(lr).items() if isinstance(kind, type) and issubclass(kind, lr.LRScheduler)}
    assert kinds - {"LRScheduler"} == set(SCHEDULERS)


def rates(scheduler: Any, first: int, count: int) -> list[float]:
    found = []
    for number in range(first, first + count):
        watched = isinstance(scheduler, lr.ReduceOnPlateau)
        scheduler.step(*[paddle.to_tensor(max(1.0, 5.0 - number))] if watched else [])
        found.append(scheduler.last_lr)
    return found


@pytest.mark.filterwarnings("ignore:There are some unused values")  # Paddle's own about its LinearWarmup
@pytest.mark.parametrize("alone", [False, True], ids=["of an optimizer", "alone"])
@pytest.mark.parametrize("steps_before", [0, 9], ids=["new process", "survivor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_where_they_were(kind: str, steps_before: int, alone: bool) -> None:
    def state_of(scheduler: Any) -> State:
        if alone:
            return State(scheduler=scheduler)
        net = nn.Linear(1, 1)
        return State(model=net, optimizer=optim.SGD(scheduler, parameters=net.parameters()))

    scheduler, restored = SCHEDULERS[kind](), SCHEDULERS[kind]()
    rates(scheduler, 0, 7)
    memory = Memory(state_of(scheduler))
    expected = rates(scheduler, 7, 14)
    rates(restored, 0, steps_before)
    memory.restore(state_of(restored))
    assert rates(restored, 7, 14) == expected
    memory.let_go()


class Box:
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return {"held": self.held}

    def set_state_dict(self, plain: Any) -> None:
        self.held = plain["held"]


def test_values_and_other_objects_do_not_change() -> None:
    def held() -> Any:
        return {"list": [paddle.ones([3]), (np.ones(2), 1)], 3: OrderedDict(a=Counter("aab")), "deque": deque([1], 2)}

    state = State(box=Box(held()), tensor=paddle.arange(5), array=np.arange(3), scalar=np.float32(0.5), nested=held())
    memory = Memory(state)
    wanted = copy.copy((plain(state.box.held), {name: plain(value) for name, value in state._values.items()}))
    state.box.held, state.tensor, state.nested = None, paddle.zeros([1]), {}
    memory.restore(state)
    memory.use_again()
    assert (plain(state.box.held), {name: plain(value) for name, value in state._values.items()}) == wanted
    assert type(state.scalar) is np.float32
    memory.let_go()


def test_trained_values_are_filled_and_others_are_not() -> None:
    weight, data = paddle.create_parameter([3], "float32"), paddle.arange(6)
    state = State(weight=weight, row=data[:3])
    memory = Memory(state)
    wanted = weight.tolist()
    weight.set_value(paddle.zeros([3]))
    state.row = data
    memory.restore(state)
    assert state.weight is weight and weight.tolist() == wanted
    assert state.row.tolist() == [0, 1, 2] and data.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CheckpointError, match=r"state\.weight does not fit .*saved as \[3\], now \[4\]"):
        memory.restore(State(weight=paddle.create_parameter([4], "float32"), row=data))


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFFFFFFF, 0x7F800000])
def test_nan_keeps_its_payload(bits: int) -> None:
    value = paddle.to_tensor(np.array([bits, 0], np.uint32).view(np.float32))
    layer = nn.Layer()
    layer.register_buffer("buffer", value.clone())
    state = State(model=layer, value=value)
    memory = Memory(state)
    layer.buffer.set_value(paddle.zeros([2]))
    memory.restore(state)
    assert layer.buffer.numpy().view(np.uint32).tolist() == state.value.numpy().view(np.uint32).tolist() == [bits, 0]
