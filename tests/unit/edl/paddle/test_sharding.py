"""A sharded optimizer comes to the same weights as one that has everything."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddle is not installed", allow_module_level=True)

import paddle

import edl.paddle
from edl.errors import StateError
from edl.paddle.accumulation import PaddleModel
from edl.paddle.sharding import NUMBERS, group_sharded_parallel
from edl.paddle.shards import LEVELS, of
from edl.wire.records import Settings
from edl.worker import hyper
from tests.support.paddle_ranks import PaddleWorld, world

pytestmark = [pytest.mark.paddle, pytest.mark.filterwarnings("ignore")]
nn: Any = paddle.nn
optim: Any = paddle.optimizer
STEPS = 4
BATCH = 6
Make = Callable[[Any], Any]


class Scaled(nn.Layer):  # type: ignore[misc]
    """Parameters that worlds do not divide, one that leaves ranks without rows, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = self.create_parameter([], default_initializer=nn.initializer.Constant(1.5))
        self.unused = self.create_parameter([3])

    def forward(self, batch: Any) -> Any:
        return self.last(paddle.tanh(self.first(batch))) * self.scale


def built(kind: Callable[[], Any] = Scaled) -> Any:
    """A layer with the same values in each rank."""
    layer = kind()
    random = np.random.default_rng(7)
    for parameter in layer.parameters():
        parameter.set_value(random.standard_normal(parameter.shape).astype("float32"))
    return layer


def batch(step: int) -> Any:
    return np.random.default_rng(step).standard_normal((BATCH, 5)).astype("float32")


def loss(model: Any, rows: Any) -> Any:
    inputs = paddle.to_tensor(rows)
    return ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean() * 3


def trained(make: Make, steps: int = STEPS) -> dict[str, Any]:
    """The weights after steps of the plain optimizer, by one process."""
    layer = built()
    optimizer = make(layer)
    for step in range(steps):
        loss(layer, batch(step)).backward()
        optimizer.step()
        optimizer.clear_grad()
        if isinstance(optimizer._learning_rate, optim.lr.LRScheduler):
            optimizer._learning_rate.step()
    return {name: value.numpy() for name, value in layer.state_dict().items()}


def train_sharded(there: PaddleWorld, make: Make, level: str, steps: int = STEPS) -> list[dict[str, Any]]:
    def each(rank: int) -> dict[str, Any]:
        layer = built()
        model, optimizer, _ = group_sharded_parallel(layer, make(layer), level)
        for step in range(steps):
            loss(model, batch(step)[rank :: len(there.rings)]).backward()
            optimizer.step()
            optimizer.clear_grad()
            if isinstance(optimizer._learning_rate, optim.lr.LRScheduler):
                optimizer._learning_rate.step()
        model.get_all_parameters()
        return {name: value.numpy() for name, value in layer.state_dict().items()}

    return there.each(each)


def assert_equal(found: list[dict[str, Any]], right: dict[str, Any]) -> None:
    for one in found:
        assert one.keys() == right.keys()
        for name, value in right.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
            assert np.array_equal(one[name], found[0][name]), "the same bits on all ranks"


def grouped(layer: Any) -> Any:
    """Two groups with rates, decays and clips of their own."""
    first = {"params": layer.first.parameters(), "learning_rate": 0.3, "weight_decay": 0.2}
    rest = {"params": [*layer.last.parameters(), layer.scale], "beta1": 0.8}
    return optim.AdamW(0.05, parameters=[first, rest], grad_clip=nn.ClipGradByGlobalNorm(0.7))


def decaying(layer: Any) -> Any:
    schedule = optim.lr.StepDecay(0.1, step_size=2, gamma=0.3)
    names = {layer.first.weight.name}
    return optim.AdamW(schedule, parameters=layer.parameters(), apply_decay_param_fun=lambda name: name in names)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda layer: optim.SGD(0.05, parameters=layer.parameters(), weight_decay=0.1),
    "Momentum": lambda layer: optim.Momentum(0.05, 0.9, layer.parameters(), use_nesterov=True, weight_decay=0.1),
    "Adam": lambda layer: optim.Adam(0.05, parameters=layer.parameters(), amsgrad=True),
    "Adam L1": lambda layer: optim.Adam(
        0.05, parameters=layer.parameters(), weight_decay=paddle.regularizer.L1Decay(0.1)
    ),
    "AdamW": lambda layer: optim.AdamW(0.05, parameters=layer.parameters(), weight_decay=0.2),
    "Adagrad": lambda layer: optim.Adagrad(0.05, parameters=layer.parameters()),
    "Adadelta": lambda layer: optim.Adadelta(0.5, parameters=layer.parameters()),
    "RMSProp": lambda layer: optim.RMSProp(0.05, parameters=layer.parameters(), momentum=0.5, centered=True),
    "Adamax": lambda layer: optim.Adamax(0.05, parameters=layer.parameters()),
    "NAdam": lambda layer: optim.NAdam(0.05, parameters=layer.parameters()),
    "RAdam": lambda layer: optim.RAdam(0.05, parameters=layer.parameters()),
    "global norm": lambda layer: optim.SGD(
        0.05, parameters=layer.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.5), weight_decay=0.1
    ),
    "norm": lambda layer: optim.SGD(0.05, parameters=layer.parameters(), grad_clip=nn.ClipGradByNorm(0.3)),
    "value": lambda layer: optim.SGD(0.05, parameters=layer.parameters(), grad_clip=nn.ClipGradByValue(0.1)),
    "groups": grouped,
    "schedule": decaying,
    "ranks without rows": lambda layer: optim.Adam(
        0.05, parameters=[layer.scale], grad_clip=nn.ClipGradByGlobalNorm(0.5)
    ),
}


PAIRS = [(name, LEVELS[number % 3]) for number, name in enumerate(OPTIMIZERS)]
ALL = {*PAIRS, *((name, level) for name in ("Adam", "global norm", "groups", "ranks without rows") for level in LEVELS)}


@pytest.mark.parametrize(("name", "level"), sorted(ALL))
def test_weights_are_those_of_the_plain_optimizer(name: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(3, monkeypatch) as there:
        assert_equal(train_sharded(there, OPTIMIZERS[name], level), trained(OPTIMIZERS[name]))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_worlds_of_other_sizes(size: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(size, monkeypatch) as there:
        assert_equal(train_sharded(there, OPTIMIZERS["Adam"], level), trained(OPTIMIZERS["Adam"]))


@pytest.mark.parametrize("level", LEVELS)
def test_large_arrays_are_exchanged_alone(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.paddle.shards.ALONE_BYTES", 16)
    monkeypatch.setattr("edl.paddle.shards.BUCKET_BYTES", 8)
    with world(3, monkeypatch) as there:
        assert_equal(train_sharded(there, OPTIMIZERS["AdamW"], level), trained(OPTIMIZERS["AdamW"]))


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_rank_keeps(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step its rows of the optimizer's state, and of what else the level names."""

    def each(rank: int) -> None:
        layer = built()
        model, optimizer, _ = group_sharded_parallel(layer, OPTIMIZERS["Adam"](layer), level)
        loss(model, batch(0)[rank::2]).backward()
        assert (layer.first.weight.grad is None) == (level != "os")
        optimizer.step()
        assert {tuple(one.shape) for one in optimizer._accumulators["moment1"].values()} == (
            {(3, 7), (4,), (4, 1), (1,), ()} if rank == 0 else {(2, 7), (3,), (3, 1)}
        )
        assert layer.first.weight._is_initialized() == (level != "p_g_os")
        shards = of(layer)
        assert shards is not None
        optimizer.clear_grad()
        assert all(part.row is None or part.row.grad is None or not part.row.grad.any() for part in shards.parts)

    with world(2, monkeypatch) as there:
        there.each(each)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_several_passes_add_up(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are averaged at once, and passes in no_sync that are averaged later."""

    def plain() -> dict[str, Any]:
        layer = built()
        optimizer = OPTIMIZERS["Adam"](layer)
        for step in range(4):
            loss(layer, batch(step)).backward()
        optimizer.step()
        return {name: value.numpy() for name, value in layer.state_dict().items()}

    def each(rank: int) -> dict[str, Any]:
        layer = built()
        model, optimizer, _ = group_sharded_parallel(layer, OPTIMIZERS["Adam"](layer), level)
        loss(model, batch(0)[rank::2]).backward()
        loss(model, batch(1)[rank::2]).backward()
        with model.no_sync():
            loss(model, batch(2)[rank::2]).backward()
            loss(model, batch(3)[rank::2]).backward()
        model.average_gradients()
        optimizer.step()
        model.get_all_parameters()
        return {name: value.numpy() for name, value in layer.state_dict().items()}

    with world(2, monkeypatch) as there:
        assert_equal(there.each(each), plain())


class Half(nn.Layer):  # type: ignore[misc]
    """16-bit parameters; for CPUs Paddle has neither products of such matrices nor optimizers other than SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([5, 3], dtype="bfloat16")

    def forward(self, inputs: Any) -> Any:
        return inputs @ self.weight.astype("float32")


@pytest.mark.parametrize("level", LEVELS)
def test_16_bit_parameters_with_master_weights(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half() -> Any:
        layer = Half()
        layer.weight.set_value(paddle.linspace(-1, 1, 15).reshape([5, 3]).astype("bfloat16"))
        return layer, optim.SGD(0.05, parameters=layer.parameters(), multi_precision=True)

    def train(layer: Any, model: Any, optimizer: Any) -> dict[str, Any]:
        """With the whole batch on every rank, so that the mean of gradients is no other number."""
        for step in range(STEPS):
            (model(paddle.to_tensor(batch(step))) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return {"master": next(iter(optimizer._master_weights.values())).numpy()}

    layer, optimizer = half()
    right = train(layer, layer, optimizer) | {"weight": layer.weight.astype("float32").numpy()}

    def each(rank: int) -> dict[str, Any]:
        layer, optimizer = half()
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level)
        kept = train(layer, model, optimizer)
        model.get_all_parameters()
        return kept | {"weight": layer.weight.astype("float32").numpy()}

    with world(2, monkeypatch) as there:
        first, second = there.each(each)
    assert np.array_equal(first["weight"], second["weight"])
    np.testing.assert_allclose(first["weight"], right["weight"], atol=1e-6)
    np.testing.assert_allclose(np.concatenate([first["master"], second["master"]]), right["master"], atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_accumulated_steps_measure_the_whole_gradient(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``accumulate`` makes them, for AdaScale."""
    plain = built()
    loss(plain, batch(0)).backward()
    right = sum(float((one.grad**2).sum()) for one in plain.parameters() if one.grad is not None)

    def each(rank: int) -> float:
        layer = built()
        model, _, _ = group_sharded_parallel(layer, OPTIMIZERS["Adam"](layer), level)
        steps = PaddleModel(model)
        with steps.apart():
            loss(model, batch(0)[rank::2]).backward()
        steps.conclude()
        return steps.square()

    with world(2, monkeypatch) as there:
        assert there.each(each) == [pytest.approx(right)] * 2


# --- refused ---------------------------------------------------------------------------------------------------------


class Stranger(nn.ClipGradByGlobalNorm):  # type: ignore[misc]
    """A clip of the script's own."""


def refused(make: Make, layer: Any = None) -> str:
    layer = built() if layer is None else layer
    with pytest.raises(StateError) as found:
        group_sharded_parallel(layer, make(layer), "os")
    return str(found.value)


def stepped(layer: Any) -> Any:
    optimizer = OPTIMIZERS["Adam"](layer)
    loss(layer, batch(0)).backward()
    optimizer.step()
    return optimizer


def test_an_optimizer_whose_rate_is_scaled_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper, "current", lambda: Settings(number=1, factor=2.0))

    def scaled(layer: Any) -> Any:
        optimizer = optim.SGD(0.025, parameters=layer.parameters())
        edl.paddle.scale_lr(optimizer)
        return optimizer

    with world(2, monkeypatch) as there:
        found = train_sharded(there, scaled, "os_g")
    assert_equal(found, trained(lambda layer: optim.SGD(0.05, parameters=layer.parameters())))


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_a_sharded_model_is_a_plain_layer(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a moving average of the weights."""

    def each(rank: int) -> None:
        layer = built()
        model, optimizer, _ = group_sharded_parallel(layer, OPTIMIZERS["Adam"](layer), level)
        loss(model, batch(0)[rank::2]).backward()
        optimizer.step()
        optimizer.clear_grad()
        if level == "p_g_os":
            for whole in (model, layer):
                with pytest.raises(
                    StateError,
                    match=r"this Scaled cannot be copied, .* rows of scale, unused, .* …: first call get_all",
                ):
                    copy.deepcopy(whole)
        model.get_all_parameters()
        twin = copy.deepcopy(model)
        assert type(twin) is Scaled and of(twin) is None
        kept = {name: value.numpy().copy() for name, value in twin.state_dict().items()}
        assert_equal([kept], {name: value.numpy() for name, value in layer.state_dict().items()})
        twin(paddle.to_tensor(batch(1)))
        loss(model, batch(1)[rank::2]).backward()
        optimizer.step()
        assert_equal([{name: value.numpy() for name, value in twin.state_dict().items()}], kept)

    with world(2, monkeypatch) as there:
        there.each(each)


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    parameters = built().parameters
    assert "a Lamb cannot be sharded" in refused(lambda layer: optim.Lamb(parameters=layer.parameters()))
    assert "a LBFGS cannot be sharded" in refused(lambda layer: optim.LBFGS(parameters=layer.parameters()))
    assert "use_multi_tensor" in refused(lambda layer: optim.Adam(parameters=layer.parameters(), use_multi_tensor=True))
    assert "a Stranger cannot be sharded" in refused(
        lambda layer: optim.SGD(parameters=layer.parameters(), grad_clip=Stranger(1.0))
    )
    assert "not a parameter of the layer" in refused(lambda layer: optim.SGD(parameters=parameters()))
    assert "has made steps" in refused(stepped)
    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    assert "is sparse: sparse=False" in refused(lambda layer: optim.SGD(parameters=layer.parameters()), sparse)
    with pytest.raises(ValueError, match="level='stage1': one of os, os_g, p_g_os"):
        group_sharded_parallel(built(), None, "stage1")


def test_a_layer_and_its_optimizer_are_sharded_once() -> None:
    layer = built()
    model, optimizer, scaler = group_sharded_parallel(layer, OPTIMIZERS["SGD"](layer), "os", None)
    assert scaler is None
    assert "already" in refused(lambda _: optimizer)
    assert "already" in refused(OPTIMIZERS["SGD"], layer)
    assert edl.paddle.parallel(layer) is model
    assert of(copy.deepcopy(layer)) is None, "a copy is a plain layer"


def test_its_own_state_dict_is_refused_where_it_has_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(rank: int) -> None:
        layer = built()
        model, optimizer, _ = group_sharded_parallel(layer, OPTIMIZERS["Adam"](layer), "os")
        loss(model, batch(rank)).backward()
        optimizer.step()
        with pytest.raises(StateError, match="only its rows"):
            optimizer.state_dict()
        with pytest.raises(StateError, match="restored by State"):
            optimizer.set_state_dict({})

    with world(2, monkeypatch) as there:
        there.each(each)


def test_numbers_are_the_values_that_have_not_the_parameters_shape() -> None:
    for kind, numbers in NUMBERS.items():
        weight = paddle.create_parameter([4, 3], "float32")
        optimizer = kind(learning_rate=0.1, parameters=[weight])
        weight.sum().backward()
        optimizer.step()
        shapes = {name: tuple(one.shape) for name, of in optimizer._accumulators.items() for one in of.values()}
        assert {name for name, shape in shapes.items() if shape != (4, 3)} == set(numbers), kind
