"""Gradients of bags: those of PyTorch's ``embedding_bag`` over random batches, and the order of their sums."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edl.worker import session as sessions
from ps.client import dedup
from ps.client.bags import bags_of, unpooled
from ps.client.frontend import part
from ps.spec import BUCKETS

KEYS, SEEDS = 12, 60
Pushed = dict[str, tuple[Any, Any]]


@dataclass
class Case:
    """A random batch of bags; keys repeat, and bags may be empty."""

    keys: Any
    """As the layer gets them: flat, or ``(bags, length)``."""
    offsets: Any
    """As the layer gets them, or None."""
    last: bool
    padding: int | None
    bounds: Any
    weights: Any


def a_case(random: np.random.Generator, weighted: bool) -> Case:
    bags = int(random.integers(1, 8))
    padding = [None, 0, 3][random.integers(3)]
    kind = np.int32 if random.random() < 0.2 else np.int64
    if random.random() < 0.25:
        length = int(random.integers(0, 5))
        keys = random.integers(0, KEYS, (bags, length)).astype(kind)
        offsets, last, bounds = None, False, np.arange(bags + 1) * length
    else:
        bounds = np.concatenate(([0], np.cumsum(random.integers(0, 6, bags) * (random.random(bags) < 0.8))))
        keys = random.integers(0, random.integers(1, KEYS + 1), bounds[-1]).astype(kind)
        last = bool(random.random() < 0.5)
        offsets = bounds if last else bounds[:-1]
    weights = random.normal(size=keys.shape).astype(np.float32) if weighted else None
    return Case(keys, offsets, last, padding, bounds, weights)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sessions, "_current", None)
    part.forget()
    yield
    part.forget()


@pytest.fixture
def pushed(alone: None, monkeypatch: pytest.MonkeyPatch) -> Pushed:
    """What the last step pushed; rows do not change."""
    ps: Any = importlib.import_module("edl.torch.ps")
    ps.init(local=True)
    found: Pushed = {}

    def push(values: Pushed, tables: Any, **how: Any) -> dict[str, Any]:
        found.clear()
        found.update(values)
        return {}

    monkeypatch.setattr(ps.client(), "push_and_pull", push)
    return found


def consumers(torch: Any, random: np.random.Generator, bags: int, dim: int) -> list[Callable[[Any], Any]]:
    """Linear losses, whose gradients reach the bags in all layouts and precisions."""
    upstream = torch.from_numpy(random.normal(size=(bags, dim)).astype(np.float32))
    matrix = torch.from_numpy(random.normal(size=(dim, 4)).astype(np.float32))

    def automatic(found: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (found @ matrix).float().sum()

    return [
        lambda found: (found * upstream).sum(),
        lambda found: found.sum(),
        lambda found: (found.t() * upstream.t()).sum(),
        lambda found: (torch.stack([upstream, found, found], 1) * upstream[:, None]).sum(),
        lambda found: (found[1:, :1] * upstream[1:, :1]).sum(),
        lambda found: (found.half() * upstream.half()).float().sum(),
        automatic,
    ]


@pytest.mark.torch
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_gradients_are_those_of_embedding_bag(
    pushed: Pushed, monkeypatch: pytest.MonkeyPatch, fast: bool, mode: str, weighted: bool
) -> None:
    torch: Any = pytest.importorskip("torch")
    ps: Any = importlib.import_module("edl.torch.ps")
    if not fast:
        monkeypatch.setattr(dedup, "_fast", lambda: None)
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        one, dim = a_case(random, weighted), int(random.integers(1, 6))
        layer = ps.EmbeddingBag(
            f"t{dim}", dim, mode=mode, padding_key=one.padding, include_last_offset=one.last, initial=ps.Normal(1.0)
        )
        table = torch.from_numpy(ps.client().read(layer.table, np.arange(KEYS))).requires_grad_()
        mine: Any
        other: Any
        mine, other = (None if one.weights is None else torch.tensor(one.weights, requires_grad=True) for _ in "ab")
        offsets = None if one.offsets is None else torch.from_numpy(one.offsets)
        found = layer(torch.from_numpy(one.keys), offsets, mine)
        flat = one.keys.reshape(-1).astype(np.int64)
        expected = torch.nn.functional.embedding_bag(
            torch.from_numpy(flat), table, torch.from_numpy(one.bounds), mode=mode, padding_idx=one.padding,
            per_sample_weights=None if other is None else other.reshape(-1), include_last_offset=True,
        )  # fmt: skip
        assert found.dtype is torch.float32 and torch.allclose(found, expected, atol=1e-5), seed
        losses = consumers(torch, random, *found.shape)
        loss = losses[seed % len(losses)]
        loss(found).backward()
        loss(expected).backward()
        ps.step()
        keys, grads = pushed[layer.table]
        trained = set(flat.tolist()) - {one.padding}
        assert set(keys.tolist()) == trained if mode != "max" else set(keys.tolist()) <= trained, seed
        assert len(set(keys.tolist())) == len(keys), seed
        complete = np.zeros((KEYS, dim), np.float32)
        complete[keys] = grads
        assert grads.dtype == np.float32 and np.allclose(complete, table.grad, rtol=1e-5, atol=1e-5), seed
        if mine is not None:
            assert torch.allclose(mine.grad, other.grad, rtol=1e-5, atol=1e-5), seed


@pytest.mark.torch
def test_a_penalty_on_gradients_reaches_the_rows(pushed: Pushed) -> None:
    """A loss that depends on gradients of other parameters is differentiated twice, but not through the rows' ones."""
    torch: Any = pytest.importorskip("torch")
    ps: Any = importlib.import_module("edl.torch.ps")
    layer = ps.EmbeddingBag("t", 3, mode="mean", initial=ps.Normal(1.0))
    keys, offsets = torch.tensor([1, 2, 1, 4]), torch.tensor([0, 3])
    table = torch.from_numpy(ps.client().read("t", np.arange(5))).requires_grad_()
    for found in (layer(keys, offsets), torch.nn.functional.embedding_bag(keys, table, offsets, mode="mean")):
        vector = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
        loss = torch.sigmoid(found @ vector).sum()
        (slope,) = torch.autograd.grad(loss, vector, create_graph=True)
        (loss + slope.square().sum()).backward()
    ps.step()
    by_key = dict(zip(pushed["t"][0].tolist(), pushed["t"][1], strict=True))
    assert np.allclose([by_key[key] for key in (1, 2, 4)], table.grad[[1, 2, 4]], atol=1e-6)


@pytest.mark.torch
def test_without_gradients_nothing_is_collected(pushed: Pushed) -> None:
    torch: Any = pytest.importorskip("torch")
    ps: Any = importlib.import_module("edl.torch.ps")
    layer = ps.EmbeddingBag("t", 3, mode="sum", initial=ps.Normal(1.0))
    keys = torch.tensor([[1, 2], [2, 2]])
    with torch.no_grad():
        found = layer(keys)
    assert not found.requires_grad and torch.equal(found, layer(keys).detach())
    ps.step()
    assert not pushed


def random_bags(random: np.random.Generator) -> tuple[Any, Any, Any]:
    """Gradients of bags, their bounds, and their keys, which repeat."""
    bounds = np.concatenate(([0], np.cumsum(random.integers(0, 30, 9)))).astype(np.int64)
    grads = (random.normal(size=(9, 3)) * 10.0 ** random.integers(-6, 6, (9, 3))).astype(np.float32)
    return grads, bounds, random.integers(0, 20, bounds[-1])


def one_after_another(grads: Any, bounds: Any, places: Any, count: int) -> Any:
    total = np.zeros((count, grads.shape[1]), np.float32)
    for bag, row in enumerate(grads):
        for at in range(bounds[bag], bounds[bag + 1]):
            total[places[at]] += row
    return total


def test_gradients_are_added_in_the_order_of_the_batch() -> None:
    """Bit by bit, with numba and without."""
    pytest.importorskip("numba")
    from ps.store.kernels import batches

    for seed in range(100):
        grads, bounds, keys = random_bags(np.random.default_rng(seed))
        distinct, inverse = np.unique(keys, return_inverse=True)
        given = grads, bounds, inverse.astype(np.int32), len(distinct)
        expected = one_after_another(*given)
        assert np.array_equal(batches.sum_bags(*given), expected), seed
        assert np.array_equal(dedup.sum_bags_plain(*given), expected), seed
    empty = np.zeros((2, 3), np.float32), np.zeros(3, np.int64), np.zeros(0, np.int32), 0
    assert batches.sum_bags(*empty).shape == dedup.sum_bags_plain(*empty).shape == (0, 3)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_do_not_depend_on_the_pservers(mode: str) -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        grads, bounds, keys = random_bags(random)
        bags = bags_of(keys, bounds, "t", last=True)
        results = []
        for pservers in (1, 2, 5):
            united = dedup.unite(keys, random.integers(0, pservers, BUCKETS).astype(np.int16), pservers)
            assert united.inverse is not None
            rows = unpooled(grads, bags, united.inverse, len(united.keys), mode)
            results.append(rows[np.argsort(united.keys)])
        assert all(np.array_equal(results[0], one) for one in results[1:]), seed
