"""Embeddings and dense parameters on parameter servers, in PyTorch: the same numbers as torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import edl.torch.ps as ps  # noqa: E402
from edl.errors import PsError, SettingError  # noqa: E402
from edl.worker import session as sessions  # noqa: E402
from ps.client.frontend import part  # noqa: E402

pytestmark = pytest.mark.torch
nn: Any = torch.nn
KEYS = [[3, -7, 3], [1 << 40, 3, 12]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sessions, "_current", None)
    part.forget()
    ps.init(local=True)
    torch.manual_seed(0)
    yield
    part.forget()


def rows(table: str) -> int:
    local: Any = ps.client()
    return int(local.store.rows(table))


def test_shapes_and_rows() -> None:
    embedding = ps.Embedding("t", 4, initial=ps.Normal(1.0, seed=3))
    found = embedding(torch.tensor(KEYS))
    assert found.shape == (2, 3, 4) and found.dtype == torch.float32 and found.requires_grad
    assert torch.equal(found[0, 0], found[1, 1]) and not torch.equal(found[0, 0], found[0, 1])
    assert embedding(torch.tensor(3)).shape == (4,)
    assert embedding(torch.empty(0, 5, dtype=torch.int64)).shape == (0, 5, 4)
    assert torch.equal(embedding(torch.tensor([3], dtype=torch.int32)), found[0, :1])
    assert rows("t") == 4 and list(embedding.parameters()) == []
    assert "'t', dim=4" in repr(embedding)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ps.SGD(0.1, weight_decay=0.01), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        (ps.Adagrad(0.1, initial_accumulator=0.1),
         lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1)),
        (ps.Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
        (ps.Momentum(0.1, 0.8, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True)),
    ],
)  # fmt: skip
def test_a_model_trains_as_with_torchs_own(ours: ps.Optimizer, theirs: Any) -> None:
    """Every row gets a gradient in each step, so that lazy optimizers are the usual ones."""
    keys = torch.tensor(KEYS)
    distinct, index = torch.unique(keys, return_inverse=True)
    embedding = ps.Embedding("t", 4, optimizer=ours, initial=ps.Uniform(0.5))
    layer = nn.Linear(4, 2)
    twin, table = nn.Linear(4, 2), nn.Embedding(len(distinct), 4)
    with torch.no_grad():
        table.weight.copy_(embedding(distinct))
    twin.load_state_dict(layer.state_dict())
    ps.Dense(layer, ours)
    optimizer = theirs([*twin.parameters(), *table.parameters()])
    for step in range(5):
        target = torch.randn(2, 3, 2)
        loss, other = nn.functional.mse_loss(layer(embedding(keys)), target), nn.functional.mse_loss(
            twin(table(index)), target
        )  # fmt: skip
        assert loss.item() == pytest.approx(other.item(), rel=1e-5), step
        loss.backward()
        ps.step()
        optimizer.zero_grad()
        other.backward()
        optimizer.step()
    for name, one in layer.named_parameters():
        assert torch.allclose(one, dict(twin.named_parameters())[name], rtol=1e-4, atol=1e-6)
    assert all(one.grad is None for one in layer.parameters())


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_combiners(combiner: str) -> None:
    bag = ps.Embedding("t", 2, initial=ps.Normal(1.0), optimizer=ps.SGD(1.0), combiner=combiner)
    plain = ps.Embedding("t", 2, initial=ps.Normal(1.0), optimizer=ps.SGD(1.0))
    keys = torch.tensor(KEYS)
    before = plain(keys).detach()
    found = bag(keys)
    assert torch.allclose(found, getattr(before, combiner)(1))
    found.sum().backward()
    ps.step()
    times = torch.tensor([[3.0, 1, 3], [1, 3, 1]])[..., None] / (1 if combiner == "sum" else 3)
    assert torch.allclose(plain(keys), before - times, atol=1e-6)


def test_gradients_add_up_until_the_step() -> None:
    one, other = (ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0)) for _ in range(2))
    for embedding, numbers in ((one, [1, 2]), (other, [2]), (one, [1])):
        embedding(torch.tensor(numbers)).sum().backward()
    ps.step()
    assert one(torch.tensor([1, 2])).tolist() == [[-2, -2], [-2, -2]]


def test_a_batch_may_be_reused_before_the_step() -> None:
    layers = {"one": ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0)),
              "bag": ps.EmbeddingBag("u", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0), mode="sum")}  # fmt: skip
    keys = torch.tensor([[1]])
    for number in (1, 2):
        keys.fill_(number)
        for layer in layers.values():
            layer(keys).sum().backward()
    ps.step()
    for layer in layers.values():
        assert layer(torch.tensor([[1], [2]])).reshape(2, 2).tolist() == [[-1, -1], [-1, -1]]


def test_a_gradient_given_to_backward_may_be_reused_before_the_step() -> None:
    embedding = ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0))
    gradient = torch.ones(1, 2)
    embedding(torch.tensor([1])).backward(gradient)
    gradient.zero_()
    ps.step()
    assert embedding(torch.tensor([1])).tolist() == [[-1, -1]]


def test_rows_may_be_changed_in_place() -> None:
    embedding = ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0))
    embedding(torch.tensor([1, 2])).mul_(3.0).sum().backward()
    ps.step()
    assert embedding(torch.tensor([1])).tolist() == [[-3, -3]]


def test_evaluation_leaves_no_trace() -> None:
    embedding = ps.Embedding("t", 2, initial=ps.Normal(1.0))
    first = embedding(torch.tensor([1]))
    embedding.eval()
    found = embedding(torch.tensor([1, 2]))
    assert rows("t") == 1 and not found.requires_grad and torch.equal(found[:1], first)
    embedding.train()
    with ps.no_insert():
        embedding(torch.tensor([2]))
    assert rows("t") == 1
    assert torch.equal(embedding(torch.tensor([2])), found[1:]) and rows("t") == 2


def test_what_is_not_trained_stays_here() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    ps.Dense(model, ps.SGD(0.1))
    assert ps.client().tables["dense"].rows == 1
    model(torch.randn(8, 2)).sum().backward()
    ps.step()
    assert torch.equal(model[0].weight, frozen) and model[1].num_batches_tracked == 1


def test_a_parameter_without_gradient_counts_as_zeros() -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    before = [one.clone() for one in model.parameters()]
    ps.Dense(model, ps.SGD(1.0))
    model[0](torch.ones(1, 2)).sum().backward()
    ps.step()
    after = list(model.parameters())
    assert torch.allclose(after[0], before[0] - 1) and torch.equal(after[2], before[2])


def test_half_precision() -> None:
    embedding = ps.Embedding("t", 2, initial=ps.Zeros(), optimizer=ps.SGD(1.0))
    layer = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    before = layer.weight.float()
    ps.Dense(layer, ps.SGD(1.0))
    layer(embedding(torch.tensor([1])).to(torch.bfloat16)).sum().backward()
    ps.step()
    assert torch.allclose(embedding(torch.tensor([1])), -before)
    assert layer.weight.dtype == torch.bfloat16


def test_bad_input_is_named() -> None:
    embedding = ps.Embedding("t", 2, optimizer=ps.SGD(1.0))
    with pytest.raises(SettingError, match=r"keys of table \w+.*float32.*integers"):
        embedding(torch.tensor([1.0]))
    with pytest.raises(SettingError, match="must be None, sum or mean"):
        ps.Embedding("u", 2, combiner="max")
    with pytest.raises(SettingError, match="dim 3 here, 2 there"):
        ps.Embedding("t", 3, optimizer=ps.SGD(1.0))
    with pytest.raises(SettingError, match="no trainable parameters"):
        ps.Dense(nn.ReLU())
    with pytest.raises(SettingError, match="must be at least 1"):
        ps.Dense(nn.Linear(1, 1), every=0)
    (embedding(torch.tensor([5])) * float("nan")).sum().backward()
    with pytest.raises(PsError, match="table t, key 5"):
        ps.step()


def test_prefetch_takes_a_module_or_a_name() -> None:
    embedding = ps.Embedding("t", 2)
    ps.prefetch(embedding, torch.tensor([1]))
    ps.prefetch("t", torch.tensor([1]))
    ps.set_lr(0.5, embedding)
    assert rows("t") == 0
