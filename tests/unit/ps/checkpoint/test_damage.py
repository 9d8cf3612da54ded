"""Values that a table does not take: refused before anything is applied anywhere, and never left in a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.errors import PsError
from edl.job_records import Mode, Training
from ps.protocol.frames import FrameOp as FrameOp
from ps.rows import RowOp
from ps.spec import Damaged, Optimizer, TableSpec, UpdateRule
from ps.store.damage import LARGEST, LARGEST_SQUARED, TOGETHER, DamagedPush, check
from tests.support.ps_fixture import Bench, Master
from tests.support.ps_stores import ZEROS, both_kernels, pull, push, store_of

KEYS = np.arange(1000)
RULES = [rule for rule in UpdateRule if rule is not UpdateRule.ADD]
SQUARING = [UpdateRule.ADAGRAD, UpdateRule.ROW_ADAGRAD, UpdateRule.ADAM, UpdateRule.FTRL]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.stop()


def ones(count: int, dim: int = 4) -> Any:
    return np.ones((count, dim), np.float32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 499, 999])
def test_a_refused_push_changes_no_row_of_any_pserver(bench: Bench, bad: float, place: int) -> None:
    client = bench.start(2).client()
    grads = ones(1000)
    grads[place, 1] = bad
    with pytest.raises(PsError, match=f"table plain, key {place}: .*nothing of this push was applied"):
        client.push({"wide": (KEYS, ones(1000, 9)), "plain": (KEYS, grads)})
    assert not client.read("plain", KEYS).any()
    assert not any(one.seen(FrameOp.PUSH) for one in bench.pservers.values()), "nothing was sent"
    client.push({"plain": (KEYS, ones(1000))})
    assert (client.read("plain", KEYS) == -1).all()


def test_duplicates_whose_sum_is_infinite_are_refused_before_anything_is_sent(bench: Bench) -> None:
    client = bench.start(2).client()
    keys = np.concatenate([KEYS, [7, 7]])
    grads = ones(1002)
    grads[-2:, 2] = 3e38
    with pytest.raises(PsError, match=r"table plain, key 7: .*infinity"):
        client.push({"plain": (keys, grads)})
    assert not client.read("plain", KEYS).any()


def test_half_precision_on_the_wire_has_its_own_limit(bench: Bench) -> None:
    client = bench.start(2).client(wire="f2")
    with pytest.raises(PsError, match=r"key 3: .*wire='f2'.*more than 65504"):
        client.push({"plain": (KEYS, np.where(KEYS[:, None] == 3, 7e4, 1.0).repeat(4, axis=1))})
    assert not client.read("plain", KEYS).any()


@both_kernels
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [1e38, -3e38, np.inf, np.nan])
@pytest.mark.parametrize("damaged", list(Damaged))
def test_no_gradient_freezes_a_row(kernels: str, rule: UpdateRule, bad: float, damaged: Damaged) -> None:
    """After one wild gradient the row is finite, and sound ones still move it as much as they should."""
    spec = TableSpec("t", 4, Optimizer(rule, lr=0.1), ZEROS, damaged=damaged)
    store, calm = store_of(kernels, spec), store_of(kernels, spec)
    sound = np.isfinite(bad) and rule not in SQUARING
    try:
        pushed = push(store, [1, 2], [[1, bad, 1, 1], [1, 1, 1, 1]])
    except DamagedPush as error:
        assert damaged is Damaged.REFUSE and not sound, error
        assert store.rows("t") == 0
    else:
        assert sound or damaged is not Damaged.REFUSE
        assert sound or pushed.damaged == 1
    for shard_table in store.tables["t"].shard_tables.all:
        live = shard_table.live()
        assert np.isfinite(shard_table.weights(live)).all() and np.isfinite(shard_table.state[live]).all()
    if not sound and damaged is not Damaged.CLIP:
        for one in (store, calm):
            push(one, [1], np.ones((1, 4)))
        assert (pull(store, [1]) == pull(calm, [1])).all() and pull(store, [1]).all()


@both_kernels
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("damaged", list(Damaged))
def test_finite_duplicates_with_an_infinite_sum(kernels: str, rule: UpdateRule, damaged: Damaged) -> None:
    store = store_of(kernels, TableSpec("t", 1, Optimizer(rule, lr=0.1), ZEROS, damaged=damaged))
    values = [[3e38], [3e38]]
    if damaged is Damaged.REFUSE:
        with pytest.raises(DamagedPush, match="table t, key 5"):
            push(store, [5, 5], values)
        assert store.rows("t") == 0
    else:
        push(store, [5, 5], values)
        assert np.isfinite(pull(store, [5])).all()
        for shard_table in store.tables["t"].shard_tables.all:
            assert np.isfinite(shard_table.state[shard_table.live()]).all()


@both_kernels
@pytest.mark.parametrize("rule", SQUARING)
def test_clipping_comes_before_squaring(kernels: str, rule: UpdateRule) -> None:
    """A table that clips takes any finite gradient."""
    store = store_of(kernels, TableSpec("t", 1, Optimizer(rule, lr=0.1, clip_value=1.0), ZEROS))
    same = store_of(kernels, TableSpec("t", 1, Optimizer(rule, lr=0.1, clip_value=1.0), ZEROS))
    push(store, [5], [[3e38]])
    push(same, [5], [[1.0]])
    assert (pull(store, [5]) == pull(same, [5])).all() and pull(store, [5]).all()


@pytest.mark.parametrize("op", [RowOp.ADD, RowOp.ASSIGN, RowOp.FIRST])
def test_values_that_are_no_gradients_are_always_checked(op: str) -> None:
    spec = TableSpec("t", 1, Optimizer(UpdateRule.ADAM), damaged=Damaged.SKIP)
    check(spec, np.array([1]), np.array([[LARGEST]], np.float32), op)
    with pytest.raises(DamagedPush):
        check(spec, np.array([1]), np.array([[np.nan]], np.float32), op)


def test_the_limits() -> None:
    spec = TableSpec("t", 1, Optimizer(UpdateRule.ADAGRAD))
    check(spec, np.array([1]), np.array([[LARGEST_SQUARED]], np.float32), RowOp.GRAD)
    with pytest.raises(DamagedPush, match=r"more than 1e.15, which adagrad cannot square"):
        check(spec, np.array([1]), np.array([[1.1e15]], np.float32), RowOp.GRAD)
    check(spec, np.zeros(0, np.int64), np.zeros((0, 1), np.float32), RowOp.GRAD)


def test_trainers_that_step_together_leave_room_for_the_sum_of_all(bench: Bench) -> None:
    """What each may push cannot be refused when a pserver has summed it, while another has applied its part."""
    bench.start(2)
    client = bench.joined(Master(bench, Training(mode=Mode.SYNC)))
    client.begin()
    with pytest.raises(DamagedPush, match=r"key 7: .*more than 8.3.*nothing of this push was applied"):
        client.push({"plain": (KEYS, np.where(KEYS[:, None] == 7, 1e38, 1.0).repeat(4, axis=1))})
    assert not any(one.seen(FrameOp.PUSH) for one in bench.pservers.values()), "nothing was sent"
    spec = TableSpec("t", 1, Optimizer(UpdateRule.ADAGRAD))
    most = np.full((1, 1), LARGEST_SQUARED / TOGETHER, np.float32)
    check(spec, np.array([1]), most, RowOp.GRAD, trainers=TOGETHER)
    check(spec, np.zeros(TOGETHER, np.int64), most.repeat(TOGETHER, axis=0), RowOp.GRAD)
    with pytest.raises(DamagedPush, match="which adagrad cannot square"):
        check(spec, np.array([1]), 2 * most, RowOp.GRAD, trainers=TOGETHER)
