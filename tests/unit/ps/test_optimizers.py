"""Each rule against torch.optim, or against its formula written out, in both kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edl.errors import SettingError
from ps.rows import RowOp, TablePush, TrainerPush
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule, WeightFormat
from ps.store.shard_table import UPDATES
from tests.support.ps_stores import both_kernels, keys_of, pull, push, store_of

DIM = 19
STEPS = 6
KEYS = np.arange(7, dtype=np.int64) * 31 - 40
FIRST = Initial(InitMethod.NORMAL, 1.0, seed=3)
FIRST_ZERO = Initial(InitMethod.ZEROS)
GRADS = np.random.default_rng(4).standard_normal((STEPS, len(KEYS), DIM)).astype(np.float32)


def trained(kernels: str, optimizer: Optimizer, grads: np.ndarray = GRADS) -> tuple[np.ndarray, np.ndarray]:
    """Weights before and after training."""
    store = store_of(kernels, TableSpec("t", DIM, optimizer, FIRST))
    before = pull(store, KEYS)
    for step, one in enumerate(grads):
        push(store, KEYS, one, step=step)
    return before, pull(store, KEYS)


@pytest.mark.torch
@both_kernels
@pytest.mark.parametrize(
    ("optimizer", "theirs"),
    [
        (Optimizer(UpdateRule.SGD, lr=0.1), lambda o, p: o.SGD(p, lr=0.1)),
        (Optimizer(UpdateRule.SGD, lr=0.1, weight_decay=0.2), lambda o, p: o.SGD(p, lr=0.1, weight_decay=0.2)),
        (Optimizer(UpdateRule.MOMENTUM, lr=0.1, momentum=0.8), lambda o, p: o.SGD(p, lr=0.1, momentum=0.8)),
        (
            Optimizer(UpdateRule.MOMENTUM, lr=0.1, momentum=0.8, nesterov=True),
            lambda o, p: o.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
        ),
        (
            Optimizer(UpdateRule.ADAGRAD, lr=0.1, eps=1e-6, initial_accumulator=0.3, weight_decay=0.01),
            lambda o, p: o.Adagrad(p, lr=0.1, eps=1e-6, initial_accumulator_value=0.3, weight_decay=0.01),
        ),
        (
            Optimizer(UpdateRule.ADAM, lr=0.1, beta1=0.8, beta2=0.95, eps=1e-7, weight_decay=0.01),
            lambda o, p: o.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.01),
        ),
    ],
)
def test_as_torch_does(kernels: str, optimizer: Optimizer, theirs: Callable[[Any, Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    before, after = trained(kernels, optimizer)
    weights = torch.nn.Parameter(torch.from_numpy(before.copy()))
    stepper = theirs(torch.optim, [weights])
    for one in GRADS:
        weights.grad = torch.from_numpy(one.copy())
        stepper.step()
    np.testing.assert_allclose(after, weights.detach().numpy(), rtol=2e-5, atol=2e-6)


@both_kernels
def test_ftrl_as_written_in_the_paper(kernels: str) -> None:
    lr, l1, l2, power = 0.3, 0.4, 0.05, 0.5
    optimizer = Optimizer(UpdateRule.FTRL, lr=lr, l1=l1, l2=l2, initial_accumulator=0.1)
    before, after = trained(kernels, optimizer)
    expected = np.zeros_like(after)
    for row, column in np.ndindex(after.shape):
        weight, total, linear = float(before[row, column]), 0.1, 0.0
        for one in GRADS:
            g = float(one[row, column])
            sigma = ((total + g * g) ** power - total**power) / lr
            linear += g - sigma * weight
            total += g * g
            if abs(linear) <= l1:
                weight = 0.0
            else:
                weight = -(linear - math.copysign(l1, linear)) / (total**power / lr + 2 * l2)
        expected[row, column] = weight
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-5)
    assert (after == 0).any() and (after != 0).any()


@both_kernels
def test_ftrl_with_another_power(kernels: str) -> None:
    _, half = trained(kernels, Optimizer(UpdateRule.FTRL, lr=0.3, initial_accumulator=0.1))
    _, near = trained(kernels, Optimizer(UpdateRule.FTRL, lr=0.3, initial_accumulator=0.1, lr_power=-0.500001))
    _, other = trained(kernels, Optimizer(UpdateRule.FTRL, lr=0.3, initial_accumulator=0.1, lr_power=-0.2))
    np.testing.assert_allclose(half, near, rtol=1e-3, atol=1e-4)
    assert np.abs(half - other).max() > 0.01


@both_kernels
@pytest.mark.parametrize("l1", [0.0, 0.4])
def test_ftrl_whose_lr_changes(kernels: str, l1: float) -> None:
    """The change itself moves nothing, an LR of 0 stops all weights where they are, and the first step after it is as
    long as the LR says."""
    store = store_of(kernels, TableSpec("t", DIM, Optimizer(UpdateRule.FTRL, lr=0.3, l1=l1, l2=0.05), FIRST_ZERO))

    def step(number: int, grads: np.ndarray, lr: float) -> np.ndarray:
        store.push([TrainerPush(0, 0, [TablePush("t", KEYS, grads)])], step=number, lr={"t": lr})
        return pull(store, KEYS)

    before = [step(number, one, 0.3) for number, one in enumerate(GRADS)][-1]
    assert (before != 0).any() and ((before == 0).any() or not l1)
    for lr in (0.03, 3.0):
        np.testing.assert_allclose(step(6, np.zeros_like(GRADS[0]), lr), before, rtol=1e-4, atol=1e-5)
    frozen = step(7, GRADS[0], 0.0)
    np.testing.assert_allclose(frozen, before, rtol=1e-4, atol=1e-5)
    tenth = step(8, np.full_like(GRADS[0], 1e-3), 0.03) - frozen
    whole = step(9, np.full_like(GRADS[0], 1e-3), 0.3) - frozen - tenth
    moved = before != 0
    np.testing.assert_allclose(10 * tenth[moved], whole[moved], rtol=0.05, atol=1e-5)


@both_kernels
@pytest.mark.parametrize("op", [RowOp.ASSIGN, RowOp.FIRST, RowOp.ADD])
@pytest.mark.parametrize("power", [-0.5, -0.2])
def test_ftrl_goes_on_from_weights_that_were_set(kernels: str, op: str, power: float) -> None:
    """It computes weights from its sums, so these must follow; with ``l1``, from 0 as well."""
    optimizer = Optimizer(UpdateRule.FTRL, lr=0.3, l1=0.4, l2=0.05, initial_accumulator=0.1, lr_power=power)
    store = store_of(kernels, TableSpec("t", DIM, optimizer, FIRST_ZERO))
    if op != RowOp.FIRST:
        for number, grads in enumerate(GRADS):
            store.push([TrainerPush(0, 0, [TablePush("t", KEYS, grads)])], step=number)
    given = np.linspace(-2, 2, GRADS[0].size, dtype=np.float32).reshape(GRADS[0].shape)
    given[:, ::3] = 0
    if op == RowOp.ADD:
        given -= pull(store, KEYS)
    push(store, KEYS, given, op=op)
    held = pull(store, KEYS)
    assert (held == 0).any() and (np.abs(held) > 1).any()
    push(store, KEYS, np.zeros_like(given))
    np.testing.assert_allclose(pull(store, KEYS), held, rtol=1e-4, atol=1e-5)
    push(store, KEYS, np.full_like(given, 1e-3))
    moved = held - pull(store, KEYS)
    assert (moved[held != 0] > 0).all() and (moved >= 0).all() and (moved < 1e-2).all()


def test_ftrl_needs_an_lr() -> None:
    with pytest.raises(SettingError, match="lr=0: must be more than 0 for FTRL"):
        Optimizer(UpdateRule.FTRL, lr=0.0)


@both_kernels
def test_row_adagrad_has_one_sum_a_row(kernels: str) -> None:
    before, after = trained(kernels, Optimizer(UpdateRule.ROW_ADAGRAD, lr=0.1, eps=1e-6, initial_accumulator=0.2))
    weights, total = before.astype(np.float64), np.full((len(KEYS), 1), 0.2)
    for one in GRADS.astype(np.float64):
        total += (one * one).mean(axis=1, keepdims=True)
        weights -= 0.1 * one / (np.sqrt(total) + 1e-6)
    np.testing.assert_allclose(after, weights, rtol=1e-5, atol=1e-6)


@both_kernels
def test_adam_is_lazy(kernels: str) -> None:
    """A row that gets no gradient stands still, and its bias correction counts its own updates."""
    optimizer = Optimizer(UpdateRule.ADAM, lr=0.1)
    store = store_of(kernels, TableSpec("t", DIM, optimizer, FIRST))
    alone = store_of(kernels, TableSpec("t", DIM, optimizer, FIRST))
    key, other = keys_of(5), keys_of(6)
    for step, one in enumerate(GRADS[:, :1]):
        push(store, key if step % 2 else other, one, step=step)
        if step % 2:
            push(alone, key, one, step=step)
    assert (pull(store, key) == pull(alone, key)).all()


@both_kernels
def test_adam_after_very_many_updates(kernels: str) -> None:
    """Beyond the table of corrections they are 1."""
    optimizer = Optimizer(UpdateRule.ADAM, lr=0.01, beta1=0.3, beta2=0.5)
    before, after = trained(kernels, optimizer, np.ones((200, len(KEYS), DIM), np.float32))
    np.testing.assert_allclose(before - after, 200 * 0.01, rtol=1e-3)


@both_kernels
@pytest.mark.parametrize("beta2", [0.9999, 0.99999])
@pytest.mark.parametrize("updates", [70_000, 300_000, 3_000_000])
def test_adam_corrects_its_bias_beyond_its_table(kernels: str, beta2: float, updates: int) -> None:
    """Under a gradient that is always 1, each step is as long as the LR."""
    optimizer = Optimizer(UpdateRule.ADAM, lr=0.1, beta2=beta2)
    store = store_of(kernels, TableSpec("t", DIM, optimizer, FIRST_ZERO))
    pull(store, KEYS)
    for shard_table in store.tables["t"].shard_tables.all:
        slots = shard_table.live()
        shard_table.meta[slots, UPDATES] = updates - 1
        shard_table.state[slots, :DIM] = 1.0
        shard_table.state[slots, DIM:] = 1.0 - beta2 ** (updates - 1)
    push(store, KEYS, np.ones((len(KEYS), DIM), np.float32))
    np.testing.assert_allclose(pull(store, KEYS), -0.1, rtol=1e-5)


@both_kernels
@pytest.mark.parametrize("weights", [WeightFormat.F4, WeightFormat.BF16])
def test_added_values_are_no_updates_of_adam(kernels: str, weights: WeightFormat) -> None:
    """All that pservers get in mode geo. When the job goes on in another mode, its first steps were too long."""
    spec = TableSpec("t", DIM, Optimizer(UpdateRule.ADAM, lr=0.1), FIRST_ZERO, weights=weights)
    store, fresh = store_of(kernels, spec), store_of(kernels, spec)
    for seq in range(1, 200):
        push(store, KEYS, np.zeros((len(KEYS), DIM)), trainer=1, seq=seq, op="add")
    for seq, one in enumerate(GRADS, 200):
        for each in (store, fresh):
            push(each, KEYS, one, trainer=1, seq=seq)
    np.testing.assert_array_equal(pull(store, KEYS), pull(fresh, KEYS))


@both_kernels
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"clip_value": 0.5}, lambda g: np.clip(g, -0.5, 0.5)),
        ({"clip_norm": 1.5}, lambda g: g * min(1.0, 1.5 / np.linalg.norm(g))),
        ({"clip_norm": 1000.0}, lambda g: g),
    ],
)
def test_gradients_are_clipped_after_they_are_summed(
    kernels: str, limits: dict[str, float], expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    store = store_of(kernels, TableSpec("t", DIM, Optimizer(UpdateRule.SGD, lr=1.0, **limits), FIRST_ZERO))  # type: ignore[arg-type]
    grads = GRADS[:2, 0]
    push(store, [9, 9], grads)
    np.testing.assert_allclose(pull(store, [9])[0], -expected(grads.sum(axis=0)), rtol=1e-5)


@both_kernels
def test_the_rate_and_the_scale_of_a_push(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 2, Optimizer(UpdateRule.SGD, lr=1.0), Initial(InitMethod.ZEROS)))
    store.push(
        [TrainerPush(0, 0, [TablePush("t", keys_of(1), np.ones((1, 2), np.float32))])],
        step=1,
        lr={"t": 0.5},
        scale=0.25,
    )
    assert pull(store, [1]).tolist() == [[-0.125, -0.125]]
