"""Embeddings and dense parameters on parameter servers, in PaddlePaddle: the same numbers as its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("paddle") is None:
    pytest.skip("paddle is not installed", allow_module_level=True)

import paddle

import edl.paddle.ps as ps
from edl.errors import PsError, SettingError
from edl.worker import session as sessions
from ps.client.frontend import part

pytestmark = [pytest.mark.paddle, pytest.mark.filterwarnings("ignore:When training, we now always track")]
nn: Any = paddle.nn
optim: Any = paddle.optimizer
KEYS = [[3, -7, 3], [1 << 40, 3, 12]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sessions, "_current", None)
    part.forget()
    ps.init(local=True)
    paddle.seed(0)
    yield
    part.forget()


def rows(table: str) -> int:
    local: Any = ps.client()
    return int(local.store.rows(table))


def equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one.numpy(), other.numpy()))


def test_shapes_and_rows() -> None:
    embedding = ps.Embedding("t", 4, initial=ps.Normal(1.0, seed=3))
    found = embedding(paddle.to_tensor(KEYS))
    assert found.shape == [2, 3, 4] and found.dtype == paddle.float32 and not found.stop_gradient
    assert equal(found[0, 0], found[1, 1]) and not equal(found[0, 0], found[0, 1])
    assert embedding(paddle.to_tensor(3)).shape == [4]
    assert embedding(paddle.empty([0, 5], dtype="int64")).shape == [0, 5, 4]
    assert equal(embedding(paddle.to_tensor([3], dtype="int32")), found[0, :1])
    assert rows("t") == 4 and list(embedding.parameters()) == [] and embedding.state_dict() == {}
    assert "'t', dim=4" in repr(embedding)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ps.SGD(0.1), lambda p: optim.SGD(0.1, parameters=p)),
        (ps.Adagrad(0.1, initial_accumulator=0.1, eps=1e-10),
         lambda p: optim.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=1e-10, parameters=p)),
        (ps.Adam(0.01), lambda p: optim.Adam(0.01, parameters=p)),
        (ps.Momentum(0.1, 0.8, nesterov=True),
         lambda p: optim.Momentum(0.1, 0.8, use_nesterov=True, parameters=p)),
    ],
)  # fmt: skip
def test_a_model_trains_as_with_paddles_own(ours: ps.Optimizer, theirs: Any) -> None:
    """Every row gets a gradient in each step, so that lazy optimizers are the usual ones."""
    distinct, index = np.unique(np.array(KEYS), return_inverse=True)
    keys, places = paddle.to_tensor(KEYS), paddle.to_tensor(index.reshape(2, 3))
    embedding = ps.Embedding("t", 4, optimizer=ours, initial=ps.Uniform(0.5))
    layer = nn.Linear(4, 2)
    twin, table = nn.Linear(4, 2), nn.Embedding(len(distinct), 4)
    table.weight.set_value(embedding(paddle.to_tensor(distinct)).detach())
    twin.set_state_dict(layer.state_dict())
    ps.Dense(layer, ours)
    optimizer = theirs([*twin.parameters(), *table.parameters()])
    for step in range(5):
        target = paddle.randn([2, 3, 2])
        loss = nn.functional.mse_loss(layer(embedding(keys)), target)
        other = nn.functional.mse_loss(twin(table(places)), target)
        assert float(loss) == pytest.approx(float(other), rel=1e-5), step
        loss.backward()
        ps.step()
        other.backward()
        optimizer.step()
        optimizer.clear_grad()
    theirs_now = dict(twin.named_parameters())
    for name, one in layer.named_parameters():
        np.testing.assert_allclose(one.numpy(), theirs_now[name].numpy(), rtol=1e-4, atol=1e-6)
    assert all(one.grad is None for one in layer.parameters())


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_combiners(combiner: str) -> None:
    bag = ps.Embedding("t", 2, initial=ps.Normal(1.0), optimizer=ps.SGD(1.0), combiner=combiner)
    plain = ps.Embedding("t", 2, initial=ps.Normal(1.0), optimizer=ps.SGD(1.0))
    keys = paddle.to_tensor(KEYS)
    before = plain(keys).numpy().copy()
    found = bag(keys)
    np.testing.assert_allclose(found.numpy(), getattr(before, combiner)(1), rtol=1e-6)
    found.sum().backward()
    ps.step()
    times = np.array([[3.0, 1, 3], [1, 3, 1]])[..., None] / (1 if combiner == "sum" else 3)
    np.testing.assert_allclose(plain(keys).numpy(), before - times, atol=1e-6)


def test_gradients_add_up_until_the_step() -> None:
    one, other = (ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0)) for _ in range(2))
    for embedding, numbers in ((one, [1, 2]), (other, [2]), (one, [1])):
        embedding(paddle.to_tensor(numbers)).sum().backward()
    ps.step()
    assert one(paddle.to_tensor([1, 2])).tolist() == [[-2, -2], [-2, -2]]


def test_a_batch_may_be_reused_before_the_step() -> None:
    layers = {"one": ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0)),
              "bag": ps.EmbeddingBag("u", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0), mode="sum")}  # fmt: skip
    keys = paddle.to_tensor([[1]])
    for number in (1, 2):
        keys.fill_(number)
        for layer in layers.values():
            layer(keys).sum().backward()
    ps.step()
    for layer in layers.values():
        assert layer(paddle.to_tensor([[1], [2]])).reshape([2, 2]).tolist() == [[-1, -1], [-1, -1]]


def test_a_gradient_that_the_script_keeps_may_be_cleared_before_the_step() -> None:
    embedding = ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0))
    rows_of = embedding(paddle.to_tensor([1]))
    rows_of.retain_grads()
    (rows_of * paddle.ones([1, 2])).sum().backward()
    rows_of.clear_gradient(True)  # writes zeros
    ps.step()
    assert embedding(paddle.to_tensor([1])).tolist() == [[-1, -1]]


def test_evaluation_leaves_no_trace() -> None:
    embedding = ps.Embedding("t", 2, initial=ps.Normal(1.0))
    first = embedding(paddle.to_tensor([1]))
    embedding.eval()
    found = embedding(paddle.to_tensor([1, 2]))
    assert rows("t") == 1 and found.stop_gradient and equal(found[:1], first)
    embedding.train()
    with ps.no_insert():
        embedding(paddle.to_tensor([2]))
    assert rows("t") == 1
    assert equal(embedding(paddle.to_tensor([2])), found[1:]) and rows("t") == 2


def test_what_is_not_trained_stays_here() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1D(3), nn.Linear(3, 1))
    model[0].weight.stop_gradient = True
    frozen, mean = model[0].weight.numpy().copy(), model[1]._mean.numpy().copy()
    ps.Dense(model, ps.SGD(0.1))
    assert ps.client().tables["dense"].rows == 1
    model(paddle.randn([8, 2])).sum().backward()
    ps.step()
    assert np.array_equal(model[0].weight.numpy(), frozen) and not np.array_equal(model[1]._mean.numpy(), mean)


def test_a_parameter_without_gradient_counts_as_zeros() -> None:
    model = nn.LayerList([nn.Linear(2, 1), nn.Linear(2, 1)])
    before = [one.numpy().copy() for one in model.parameters()]
    ps.Dense(model, ps.SGD(1.0))
    model[0](paddle.ones([1, 2])).sum().backward()
    ps.step()
    after = [one.numpy() for one in model.parameters()]
    np.testing.assert_allclose(after[0], before[0] - 1, rtol=1e-6)
    assert np.array_equal(after[2], before[2])


def test_half_precision() -> None:
    embedding = ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0))
    layer = nn.Linear(2, 1, bias_attr=False).to(dtype="bfloat16")
    before = layer.weight.astype("float32").numpy().copy()
    ps.Dense(layer, ps.SGD(1.0))
    (embedding(paddle.to_tensor([1])) @ layer.weight.astype("float32")).sum().backward()
    ps.step()
    np.testing.assert_allclose(embedding(paddle.to_tensor([1])).numpy(), -before.T, rtol=1e-6)
    assert layer.weight.dtype == paddle.bfloat16


def test_gradients_outlive_the_graph() -> None:
    """Their memory is the framework's: it must stay until they are pushed, whatever is freed and taken meanwhile."""
    embedding = ps.Embedding("t", 64, initial=ps.Zeros(), optimizer=ps.SGD(1.0))
    for part_of in range(8):
        keys = paddle.arange(part_of * 512, (part_of + 1) * 512)
        (embedding(keys) * float(part_of)).sum().backward()
        del keys
        paddle.full([512, 64], 99.0)
    ps.step()
    found = embedding(paddle.arange(8 * 512)).numpy().reshape(8, -1)
    assert [set(one.tolist()) for one in found] == [{-float(number)} for number in range(8)]


def test_bad_input_is_named() -> None:
    embedding = ps.Embedding("t", 2, optimizer=ps.SGD(1.0))
    with pytest.raises(SettingError, match=r"keys of table \w+.*float32.*integers"):
        embedding(paddle.to_tensor([1.0]))
    with pytest.raises(SettingError, match="must be None, sum or mean"):
        ps.Embedding("u", 2, combiner="max")
    with pytest.raises(SettingError, match="no trainable parameters"):
        ps.Dense(nn.ReLU())
    (embedding(paddle.to_tensor([5])) * float("nan")).sum().backward()
    with pytest.raises(PsError, match="table t, key 5"):
        ps.step()


def test_both_frameworks_offer_the_same() -> None:
    torch_side = pytest.importorskip("edl.torch.ps")
    assert sorted(torch_side.__all__) == sorted(ps.__all__)
