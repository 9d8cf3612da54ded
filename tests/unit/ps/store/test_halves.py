"""Weights in 16 bits: the formats, rounding at random, and the same rows from both kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl.errors import SettingError
from ps.hashing import SHARDS
from ps.protocol.half_precision import decode_half, encode_half
from ps.rows import ShardChange, TrainerPush
from ps.spec import Initial, InitMethod, Optimizer, TableSpec, UpdateRule, WeightFormat
from ps.store.halves import BRAIN, HALF, drawn, narrow, rounded, widen
from ps.store.kernels import plain
from ps.store.rules import TableLayout
from tests.support.ps_stores import both_kernels, part, pull, push, store_of

FORMS = {HALF: "f2", BRAIN: "bf16"}
FORMATS = [WeightFormat.F2, WeightFormat.BF16]
KEYS = np.arange(-40, 60, dtype=np.int64)


def table(weights: WeightFormat, rule: UpdateRule = UpdateRule.SGD, dim: int = 2, lr: float = 1.0) -> TableSpec:
    """A table whose rows begin with normal weights."""
    return TableSpec("t", dim, Optimizer(rule, lr=lr), Initial(InitMethod.NORMAL, 0.1), weights=weights)


def samples() -> Any:
    """Values of all sizes, and the edges of half precision."""
    bits = np.random.default_rng(3).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0.0, -0.0, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 65504, 65519], np.float32)
    values = np.concatenate([bits.view(np.float32), edges, -edges, np.nextafter(edges, np.float32(1))])
    return values[np.abs(values) < 65520]


@pytest.mark.parametrize("form", FORMS)
def test_the_nearest_is_numpys_and_that_of_the_network(form: int) -> None:
    values = samples()
    expected = encode_half(values, FORMS[form]).view(np.uint16)
    assert np.array_equal(narrow(values, form), expected)
    assert np.array_equal(
        widen(expected, form), decode_half(encode_half(values, FORMS[form]), FORMS[form], np.empty_like(values))
    )
    large = np.array([3e38, -3.4e38, 1e5, np.inf], np.float32)
    assert np.isfinite(rounded(large, form)).all() and np.isnan(rounded(np.array([np.nan], np.float32), form))


@pytest.mark.parametrize("form", FORMS)
def test_rounding_at_random_gives_a_neighbour_and_is_right_on_average(form: int) -> None:
    for value in (0.3, -1.7, 2.0**-20 * 1.3, 1000.1):
        many = np.full((4000, 1), value, np.float32)
        random = drawn(np.arange(4000), np.zeros(4000, np.uint32), 1)
        found = widen(narrow(many, form, random), form).astype(np.float64)
        step = np.ptp(found)
        assert len(np.unique(found)) == 2 and found.min() <= np.float32(value) <= found.max()
        assert abs(found.mean() - np.float32(value)) < 4 * step * 0.5 / np.sqrt(4000)
    exact = rounded(samples(), form)
    random = np.random.default_rng(1).integers(0, 1 << 24, exact.shape).astype(np.uint64)
    assert np.array_equal(widen(narrow(exact, form, random), form), exact), "what fits is not changed"


@pytest.mark.slow
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("rule", [rule for rule in UpdateRule if rule is not UpdateRule.ADD])
@pytest.mark.parametrize("dim", [3, 16])
def test_both_kernels_keep_the_same_rows(weights: WeightFormat, rule: UpdateRule, dim: int) -> None:
    spec = table(weights, rule, dim, 0.05)
    stores = [store_of(kernels, spec) for kernels in ("numpy", "numba")]
    random = np.random.default_rng(2)
    for step in range(4):
        keys = random.choice(KEYS, 60)
        grads = random.standard_normal((60, dim)).astype(np.float32) * 0.1
        for store in stores:
            assert pull(store, keys, step).shape == (60, dim)
            push(store, keys, grads, step=step)
    one, other = (pull(store, KEYS, insert=False) for store in stores)
    form = TableLayout.of(spec).form
    assert np.array_equal(one, rounded(one, form)) and np.array_equal(other, rounded(other, form))
    if rule in (UpdateRule.SGD, UpdateRule.MOMENTUM):
        assert np.array_equal(one, other)
    np.testing.assert_allclose(one, other, rtol=2.0**-7, atol=2.0**-12)


@pytest.mark.slow
@both_kernels
@pytest.mark.parametrize("weights", FORMATS)
def test_small_updates_add_up(kernels: str, weights: WeightFormat) -> None:
    """The nearest would leave every weight where it is."""
    spec = table(weights, lr=1.0)
    store = store_of(kernels, spec)
    push(store, KEYS, 1.0, op="assign")
    small = 2.0 ** (-13 if weights is WeightFormat.F2 else -10)
    for step in range(200):
        push(store, KEYS, small, step=step)
    assert pull(store, KEYS).mean() == pytest.approx(1 - 200 * small, abs=10 * small)


@pytest.mark.slow
@both_kernels
@pytest.mark.parametrize("weights", FORMATS)
def test_small_added_values_add_up(kernels: str, weights: WeightFormat) -> None:
    """They do not count as updates: what is drawn differs from push to push all the same."""
    store = store_of(kernels, table(weights, UpdateRule.ADAM))
    push(store, KEYS, 1.0, op="assign")
    small = 2.0 ** (-13 if weights is WeightFormat.F2 else -10)
    for seq in range(1, 201):
        push(store, KEYS, -small, trainer=1, seq=seq, op="add")
    found = pull(store, KEYS)
    assert found.mean() == pytest.approx(1 - 200 * small, abs=10 * small)
    assert np.abs(found - (1 - 200 * small)).max() < 100 * small, "each of them, not only on average"


@both_kernels
@pytest.mark.parametrize("weights", FORMATS)
def test_rows_move_and_come_back_unchanged(kernels: str, weights: WeightFormat) -> None:
    spec = table(weights, UpdateRule.ADAM, 5)
    store, replica, restored = (store_of(kernels, spec) for _ in range(3))
    first = pull(store, KEYS, insert=False)
    assert np.array_equal(first, plain.first(TableLayout.of(spec), KEYS)), "a key without a row shows its row's weights"
    assert np.array_equal(pull(store, KEYS), first)
    grads = np.random.default_rng(5).standard_normal((len(KEYS), 5)).astype(np.float32)

    store.push([TrainerPush(1, 1, [part(KEYS, grads)])], step=1, each=replica.apply_piece)
    held = pull(store, KEYS, insert=False)
    assert not np.array_equal(held, first) and np.array_equal(pull(replica, KEYS, insert=False), held)
    snapshot = store.snapshot(1)
    for shard in range(SHARDS):
        taken = snapshot.take(shard)
        restored.apply_piece(ShardChange(shard, (), np.zeros(0, np.uint16), taken.rows))
    assert np.array_equal(pull(restored, KEYS, insert=False), held)


def test_rows_take_less_memory() -> None:
    spec = TableSpec("t", 64, Optimizer(UpdateRule.ROW_ADAGRAD), weights=WeightFormat.BF16)
    whole = TableSpec("t", 64, Optimizer(UpdateRule.ROW_ADAGRAD))
    assert (TableLayout.of(spec).row_bytes, TableLayout.of(whole).row_bytes) == (160, 288)


def test_what_needs_float32_says_so() -> None:
    with pytest.raises(SettingError, match="weights of table t=bf16: must be f4 with the rule add"):
        table(WeightFormat.BF16, UpdateRule.ADD)
    with pytest.raises(SettingError, match="must be f4 with a dense table"):
        TableSpec("t", 2, dense=True, rows=2, weights=WeightFormat.F2)
    assert table(WeightFormat.F2).difference(table(WeightFormat.F4)) == "weights f2 here, f4 there"
