"""Every rule against independent arithmetic, over zipf keys with duplicates and extreme values; both kernels alike.

The reference is a dict of Python floats (64 bits), fed one key at a time; for Adam, SGD and Adagrad also torch.optim.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from tests.support.ps_stores import both_kernels, pull, push, store_of

DIM = 5
FIRST = Initial(InitMethod.CONSTANT, 0.5)
OPTIMIZERS = [
    Optimizer(UpdateRule.SGD, lr=0.1),
    Optimizer(UpdateRule.MOMENTUM, lr=0.1, momentum=0.8),
    Optimizer(UpdateRule.MOMENTUM, lr=0.1, momentum=0.8, nesterov=True),
    Optimizer(UpdateRule.ADAGRAD, lr=0.1, eps=1e-6, initial_accumulator=0.1),
    Optimizer(UpdateRule.ROW_ADAGRAD, lr=0.1, eps=1e-6),
    Optimizer(UpdateRule.ADAM, lr=0.01),
    Optimizer(UpdateRule.FTRL, lr=0.1, l1=0.01, l2=0.1, initial_accumulator=0.1),
]
names = [f"{one.rule.value}{'-nesterov' if one.nesterov else ''}" for one in OPTIMIZERS]
each_rule = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=names)
Floats = NDArray[np.float32]
Steps = list[tuple[NDArray[np.int64], Floats]]


def zipf_steps(seed: int = 3, steps: int = 30) -> Steps:
    rng = np.random.default_rng(seed)
    return [
        (rng.zipf(1.3, 200) % 1000, rng.standard_normal((200, DIM)).astype(np.float32) * 10.0 ** rng.integers(-3, 2))
        for _ in range(steps)
    ]


class Reference:
    """One table in plain Python: rows are made when they are first needed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.rows: dict[int, list[float]] = defaultdict(lambda: [0.5] * DIM)
        self.first: dict[int, list[float]] = defaultdict(lambda: [0.0] * DIM)
        self.total: dict[int, list[float]] = defaultdict(lambda: [optimizer.initial_accumulator] * DIM)
        self.updates: dict[int, int] = defaultdict(int)

    def push(self, keys: NDArray[np.int64], grads: Floats) -> None:
        sums: dict[int, list[float]] = {}
        for key, row in zip(keys.tolist(), grads.tolist(), strict=True):
            before = sums.get(key, [0.0] * DIM)
            sums[key] = [a + b for a, b in zip(before, row, strict=True)]
        for key, grad in sums.items():
            self.updates[key] += 1
            self.rows[key] = [self._moved(key, j, grad) for j in range(DIM)]

    def _moved(self, key: int, j: int, grad: list[float]) -> float:
        o, w, g = self.optimizer, self.rows[key][j], grad[j]
        first, total = self.first[key], self.total[key]
        match o.rule:
            case UpdateRule.SGD:
                return w - o.lr * g
            case UpdateRule.MOMENTUM:
                first[j] = o.momentum * first[j] + g
                return w - o.lr * (g + o.momentum * first[j] if o.nesterov else first[j])
            case UpdateRule.ADAGRAD:
                total[j] += g * g
                return w - o.lr * g / (math.sqrt(total[j]) + o.eps)
            case UpdateRule.ROW_ADAGRAD:
                total[0] += sum(one * one for one in grad) / DIM if j == 0 else 0.0
                return w - o.lr * g / (math.sqrt(total[0]) + o.eps)
            case UpdateRule.ADAM:
                t = self.updates[key]
                first[j] = o.beta1 * first[j] + (1 - o.beta1) * g
                total[j] = o.beta2 * total[j] + (1 - o.beta2) * g * g
                mean, root = first[j] / (1 - o.beta1**t), math.sqrt(total[j] / (1 - o.beta2**t))
                return w - o.lr * mean / (root + o.eps)
            case _:
                more = total[j] + g * g
                first[j] += g - (math.sqrt(more) - math.sqrt(total[j])) / o.lr * w
                total[j] = more
                if abs(first[j]) <= o.l1:
                    return 0.0
                return (math.copysign(o.l1, first[j]) - first[j]) / (math.sqrt(more) / o.lr + 2 * o.l2)

    def read(self, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.array([self.rows[key] for key in keys.tolist()])


def trained(kernels: str, optimizer: Optimizer, steps: Steps) -> tuple[NDArray[np.int64], Floats, Any]:
    store = store_of(kernels, TableSpec("t", DIM, optimizer, FIRST))
    for step, (keys, grads) in enumerate(steps):
        push(store, keys, grads, step=step)
    keys = np.unique(np.concatenate([keys for keys, _ in steps]))
    return keys, pull(store, keys, insert=False), store


@both_kernels
@each_rule
def test_as_plain_python_does_it(kernels: str, optimizer: Optimizer) -> None:
    steps, reference = zipf_steps(), Reference(optimizer)
    for keys, grads in steps:
        reference.push(keys, grads)
    keys, weights, _ = trained(kernels, optimizer, steps)
    assert len(keys) > 100 and max(reference.updates.values()) == len(steps)
    np.testing.assert_allclose(weights, reference.read(keys), rtol=2e-4, atol=2e-4)


@each_rule
def test_both_kernels_are_the_same(optimizer: Optimizer) -> None:
    steps = zipf_steps()
    (_, one, first), (_, other, second) = trained("numba", optimizer, steps), trained("numpy", optimizer, steps)
    np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    for mine, theirs in zip(first.tables["t"].shard_tables.all, second.tables["t"].shard_tables.all, strict=True):
        keys = mine.keys[mine.live()]
        np.testing.assert_allclose(mine.state[mine.find(keys)], theirs.state[theirs.find(keys)], rtol=2e-4, atol=2e-5)


SPARSE = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@SPARSE
@pytest.mark.torch
@both_kernels
@pytest.mark.parametrize(("rule", "theirs"), [(UpdateRule.SGD, "SGD"), (UpdateRule.ADAGRAD, "Adagrad")])
def test_sparse_gradients_as_torch_takes_them(kernels: str, rule: UpdateRule, theirs: str) -> None:
    torch = pytest.importorskip("torch")
    steps = zipf_steps()
    table = torch.nn.Embedding(1000, DIM, sparse=True)
    torch.nn.init.constant_(table.weight, 0.5)
    stepper = getattr(torch.optim, theirs)(table.parameters(), lr=0.1)
    for keys, grads in steps:
        stepper.zero_grad()
        (table(torch.from_numpy(keys)) * torch.from_numpy(grads)).sum().backward()
        stepper.step()
    optimizer = Optimizer(rule, lr=0.1, eps=1e-10)
    keys, weights, _ = trained(kernels, optimizer, steps)
    np.testing.assert_allclose(weights, table.weight.detach().numpy()[keys], rtol=2e-4, atol=2e-4)


@SPARSE
@pytest.mark.torch
@both_kernels
def test_adam_corrects_its_bias_by_the_row(kernels: str) -> None:
    """With gradients for every row in every step it is torch's SparseAdam. Otherwise SparseAdam corrects by the steps
    of all rows, so that the first update of a late row is up to ``lr * sqrt(1 - beta2**t) / (1 - beta1**t)`` off."""
    torch = pytest.importorskip("torch")

    def sparse_adam(steps: Steps) -> Floats:
        table = torch.nn.Embedding(1000, DIM, sparse=True)
        torch.nn.init.constant_(table.weight, 0.5)
        stepper = torch.optim.SparseAdam(list(table.parameters()), lr=0.01)
        for keys, grads in steps:
            stepper.zero_grad()
            (table(torch.from_numpy(keys)) * torch.from_numpy(grads)).sum().backward()
            stepper.step()
        found: Floats = table.weight.detach().numpy()
        return found

    rng = np.random.default_rng(0)
    always = [(np.arange(20), rng.standard_normal((20, DIM)).astype(np.float32)) for _ in range(40)]
    keys, weights, _ = trained(kernels, Optimizer(UpdateRule.ADAM, lr=0.01), always)
    np.testing.assert_allclose(weights, sparse_adam(always)[keys], rtol=1e-4, atol=1e-5)
    late = [*always, (np.array([500]), np.ones((1, DIM), np.float32))]
    keys, weights, _ = trained(kernels, Optimizer(UpdateRule.ADAM, lr=0.01), late)
    np.testing.assert_allclose(weights[keys == 500], 0.5 - 0.01, rtol=1e-5)
    assert np.abs(weights[keys == 500] - sparse_adam(late)[500]).max() > 0.003


@both_kernels
@each_rule
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 1e-20, 1e15, -1e15])
def test_extreme_values(kernels: str, optimizer: Optimizer, value: float) -> None:
    """Zeros of both signs, denormals, tiny and huge gradients: as in 64 bits, finite, and the row is not stuck."""
    steps: Steps = [(np.array([3, 3, 7]), np.full((3, DIM), value / 2, np.float32)) for _ in range(3)]
    calm: Steps = [(np.array([7]), np.full((1, DIM), 0.5, np.float32))]
    reference = Reference(optimizer)
    for keys, grads in steps:
        reference.push(keys, grads)
    keys, weights, store = trained(kernels, optimizer, steps)
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights, reference.read(keys), rtol=1e-3, atol=1e-6)
    push(store, calm[0][0], calm[0][1])
    reference.push(*calm[0])
    np.testing.assert_allclose(pull(store, keys, insert=False), reference.read(keys), rtol=1e-3, atol=1e-6)


@both_kernels
@pytest.mark.parametrize("value", [1e38, -3e38])
def test_plain_rules_take_any_finite_gradient(kernels: str, value: float) -> None:
    for optimizer in (Optimizer(UpdateRule.SGD, lr=1e-38), Optimizer(UpdateRule.MOMENTUM, lr=1e-38, momentum=0.1)):
        keys, weights, _ = trained(kernels, optimizer, [(np.array([3]), np.full((1, DIM), value, np.float32))])
        np.testing.assert_allclose(weights, 0.5 - float(np.float32(1e-38)) * value, rtol=1e-4)
        assert keys.tolist() == [3]
