"""Who gets a row, and how arrays grow."""

from __future__ import annotations

import numpy as np
import pytest

from ps.admission import FULL, WIDTH, Sketch
from ps.slab import MAPPED, Slab
from ps.spec import Admission, Optimizer, Rule, TableSpec
from tests.unit.ps_stores import ZEROS, both_kernels, pull, push, store_of

KEYS = np.arange(2000, dtype=np.int64)


def table(**admission: float) -> TableSpec:
    """With counters for rows."""
    return TableSpec("t", 2, Optimizer(Rule.ADD), ZEROS, admission=Admission(**admission))  # type: ignore[arg-type]


@both_kernels
def test_a_key_gets_a_row_when_it_has_come_often_enough(kernels: str) -> None:
    store = store_of(kernels, table(count=3))
    pull(store, [1, 2, 2, 3, 3, 3])
    assert store.rows("t") == 1
    pull(store, [1, 2])
    assert store.rows("t") == 2
    pull(store, [1], insert=False)
    assert store.rows("t") == 2
    store.pull("t", np.array([9], np.int64), np.empty((1, 2), np.float32), step=1, counts=np.array([3], np.uint32))
    assert store.rows("t") == 3


@both_kernels
def test_gradients_for_others_are_dropped(kernels: str) -> None:
    store = store_of(kernels, table(count=2))
    pull(store, [1, 1])
    pushed = push(store, [1, 2, 2], 1.0)
    assert (pushed.applied, pushed.dropped, pushed.fresh) == (1, 2, 3)
    assert pull(store, [1, 2], insert=False).tolist() == [[1, 1], [0, 0]]
    assert push(store, [2], 5.0, op="assign").applied == 1


@both_kernels
def test_admission_by_chance(kernels: str) -> None:
    store = store_of(kernels, table(probability=0.25))
    pull(store, KEYS)
    once = store.rows("t")
    assert 400 < once < 600
    pull(store, np.repeat(KEYS, 3))
    assert 1280 < store.rows("t") < 1450, "1 - 0.75**4 of them"
    same = store_of(kernels, table(probability=0.25))
    pull(same, KEYS)
    assert same.rows("t") == once, "the same on any pserver"


def test_a_sketch_forgets_those_that_came_once() -> None:
    sketch = Sketch()
    often = np.array([7], np.int64)
    for round_ in range(6):
        sketch.add(often, np.array([100]))
        sketch.add(np.arange(WIDTH) + WIDTH * (round_ + 1), np.ones(WIDTH, np.int64))
    assert sketch.generation >= 1
    assert sketch.add(often, np.array([0]))[0] >= 150
    fresh = sketch.add(np.arange(1000) - 5000, np.ones(1000, np.int64))
    assert (fresh <= FULL + 3).all() and np.median(fresh) <= 3


def test_a_sketch_does_not_count_too_little() -> None:
    sketch = Sketch()
    keys = np.arange(3000, dtype=np.int64)
    for _ in range(2):
        sketch.add(keys, np.full(3000, 2))
    total = sketch.add(keys, np.full(3000, 2))
    assert (total >= 6).all() and (total == 6).mean() > 0.95


@pytest.mark.parametrize("columns", [1, 6, 100])
def test_a_slab_keeps_what_it_holds_while_it_grows(columns: int) -> None:
    slab = Slab(np.uint32, columns)
    rows = 0
    while rows * slab.row_bytes < 40 * MAPPED:
        larger = rows + max(1, rows // 3)
        slab.grow(larger)
        assert len(slab.array) >= larger
        assert (slab.array[rows:larger] == 0).all()
        slab.array[rows:larger] = np.arange(rows, larger)[:, None]
        rows = larger
    assert (slab.array[:rows] == np.arange(rows)[:, None]).all()


def test_a_view_that_was_kept_stays_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.slab.RESERVED", 0)
    slab = Slab(np.float32, 4)
    slab.grow(2 * MAPPED // 16)
    slab.array[:] = 3
    view = slab.array[5:9]
    slab.grow(20 * MAPPED // 16)
    assert (view == 3).all() and (slab.array[: 2 * MAPPED // 16] == 3).all()
    view[0, 0] = 4
    assert slab.array[5, 0] == 3, "it was copied, not moved away under the view"


@both_kernels
def test_a_table_without_state(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 3, Optimizer(Rule.SGD, lr=1.0), ZEROS))
    push(store, KEYS, np.ones((2000, 3)))
    assert (pull(store, KEYS) == -1).all()
    assert sum(one.state.size for bucket in range(4096) for one in store.image(bucket).rows.values()) == 0
