"""Admission of rows, and growth of arrays."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from typing import Any

import numpy as np
import pytest

from ps.spec import Admission, Optimizer, TableSpec, UpdateRule
from ps.store.rules import TableLayout
from ps.store.slabs import AHEAD, COLLAPSE, HUGE, LARGE, MAPPED, POPULATE_WRITE, Slab, settled
from tests.support.ps_stores import ZEROS, both_kernels, pull, push, store_of

KEYS = np.arange(2000, dtype=np.int64)


def table(**admission: float) -> TableSpec:
    """A table with counters as rows."""
    return TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, admission=Admission(**admission))  # type: ignore[arg-type]


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


def test_a_lack_of_memory_is_named_as_such_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    slab = Slab(np.uint32, 1)
    slab.grow(100)
    slab.array[:] = 7
    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(MemoryError):
        slab.grow(MAPPED)
    assert (slab.array[:100] == 7).all()


def test_a_view_that_was_kept_stays_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.store.slabs.RESERVED", 0)
    slab = Slab(np.float32, 4)
    slab.grow(2 * MAPPED // 16)
    slab.array[:] = 3
    view = slab.array[5:9]
    slab.grow(200 * MAPPED // 16)
    assert (view == 3).all() and (slab.array[: 2 * MAPPED // 16] == 3).all()
    view[0, 0] = 4
    assert slab.array[5, 0] == 3, "it was copied, not moved away under the view"


def resident(slab: Slab, begin: int, size: int) -> float:
    """Resident share of this part of a slab, 0 to 1. The slab must begin with its mapping."""
    known = np.zeros(size // mmap.PAGESIZE, np.uint8)
    place = known.__array_interface__["data"][0]
    at = ctypes.c_void_p(slab.address + begin)
    assert ctypes.CDLL(None).mincore(at, ctypes.c_size_t(size), ctypes.c_void_p(place)) == 0
    return float((known & 1).mean())


@pytest.mark.skipif(sys.platform != "linux", reason="the advice is Linux's")
def test_the_next_large_page_of_a_large_slab_is_there_before_it_is_needed() -> None:
    slab = Slab(np.uint32, 16)
    first = LARGE // slab.row_bytes
    slab.grow(first - 2 * AHEAD // slab.row_bytes)
    settled()
    assert resident(slab, LARGE - HUGE, 2 * HUGE) == 0, "it begins with small pages, and nobody has touched them"
    slab.grow(first)
    settled()
    assert resident(slab, LARGE, HUGE) == 1
    assert resident(slab, LARGE + HUGE, HUGE) == 0, "memory that may never be used"
    assert slab.bytes(first) == LARGE + HUGE
    slab.grow((LARGE + HUGE - AHEAD) // slab.row_bytes + 1)
    settled()
    assert resident(slab, LARGE + HUGE, HUGE) == 1
    assert (slab.array == 0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="the advice is Linux's")
def test_pages_of_a_smaller_slab_are_joined_when_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(Slab, "_advise", lambda self, *what: asked.append(what))
    slab = Slab(np.uint32, 16)
    for end in range(HUGE // 8, 4 * HUGE, HUGE // 8):
        slab.grow(end // slab.row_bytes)
        settled()
        joined = [begin for begin, _, advice in asked if advice == COLLAPSE]
        assert joined == list(range(0, (end - HUGE // 8) // HUGE * HUGE, HUGE)), "full since the last call"
        assert not [one for one in asked if one[2] == POPULATE_WRITE]
        assert slab.bytes(end // slab.row_bytes) == end


@pytest.mark.parametrize("columns", [1, 7, 40, 134])
def test_a_slab_takes_no_more_than_it_said_it_would(columns: int) -> None:
    slab, rows = Slab(np.uint32, columns, uneven=0.7), 0
    while rows * slab.row_bytes < 3 * LARGE:
        more = max(1, rows // 5)
        expected = slab.bytes(rows) + slab.bytes_for(rows, more)
        slab.grow(rows + more)
        rows += more
        assert expected - HUGE <= slab.bytes(rows) <= expected


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is copied")
def test_a_large_slab_moves_without_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.store.slabs.RESERVED", 4 * HUGE)
    monkeypatch.setattr("ps.store.slabs._fetching.submit", lambda work: None)  # the threads have much to do
    monkeypatch.setattr("ps.store.slabs._joining.submit", lambda work: None)
    slab = Slab(np.uint32, 16, uneven=0.5)
    rows, mappings = 0, set()
    while rows < 30 * HUGE // slab.row_bytes:
        slab.grow(rows + 1500)
        slab.array[rows : rows + 1500] = 7
        rows += 1500
        mappings.add(slab._map)
    assert len(mappings - {None}) == 1
    assert (slab.array[:rows] == 7).all() and (slab.array[rows:] == 0).all()


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of slots entered into the next index, at each call."""
    fast = pytest.importorskip("ps.store.kernels.fast")
    counts: list[int] = []
    rebuild = fast.loops.rebuild

    def spied(block: int, index: int, capacity: int, begin: int, end: int) -> None:
        counts.append(end - begin)
        rebuild(block, index, capacity, begin, end)

    monkeypatch.setattr(fast.loops, "rebuild", spied)
    return counts


def shard_table_of(rows: int, batch: int) -> Any:
    """With keys 0 .. rows-1, so many at a time."""
    fast = pytest.importorskip("ps.store.kernels.fast")
    shard_table = fast.shard_tables(TableLayout.of(TableSpec("t", 2)))[0]
    for begin in range(0, rows, batch):
        shard_table.insert(np.arange(begin, min(begin + batch, rows)), 0, 0)
    return shard_table


def test_an_index_grows_a_little_at_each_call(entered: list[int]) -> None:
    shard_table = shard_table_of(100_000, 100)
    late = entered[-100:]
    assert max(late) < 4000, "all 70,000 at once would be too many"
    index = shard_table._map.copy()
    shard_table._next, shard_table._entered = np.zeros(0, np.uint32), 0
    whole = np.zeros(len(index), np.uint32)
    loops = pytest.importorskip("ps.store.kernels.loops")
    at = whole.__array_interface__["data"][0]
    loops.rebuild(shard_table._at, at, len(whole), 0, shard_table.top)
    assert (index == whole).all()


def test_rows_that_go_while_an_index_grows_are_not_in_it(entered: list[int]) -> None:
    shard_table = shard_table_of(16_000, 100)
    key = 16_000
    while not 0 < shard_table._entered < shard_table.top or not len(shard_table._next):
        shard_table.insert(np.arange(key, key + 100), 0, 0)
        key += 100
    gone = np.arange(0, 3000, 3)
    shard_table.remove(shard_table.find(gone))
    assert shard_table.bytes_for(100) == 0, "their places are free"
    size = len(shard_table._map)
    while len(shard_table._map) == size:
        shard_table.insert(np.arange(key, key + 100), 0, 0)
        key += 100
    assert (shard_table.find(gone) == -1).all()
    kept = np.setdiff1d(np.arange(key), gone)
    assert (shard_table.keys[shard_table.find(kept)] == kept).all()
    assert np.count_nonzero(shard_table._map) == shard_table.rows == len(kept)


def test_what_an_index_takes_is_foretold(entered: list[int]) -> None:
    shard_table = shard_table_of(16_000, 100)
    for begin in range(16_000, 60_000, 100):
        before, foretold = shard_table.bytes(), shard_table.bytes_for(100)
        shard_table.insert(np.arange(begin, begin + 100), 0, 0)
        assert shard_table.bytes() - before <= foretold
        shard_table.insert(np.zeros(0, np.int64), 0, 0)


@both_kernels
def test_a_table_without_state(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 3, Optimizer(UpdateRule.SGD, lr=1.0), ZEROS))
    push(store, KEYS, np.ones((2000, 3)))
    assert (pull(store, KEYS) == -1).all()
    assert sum(one.state.size for bucket in range(4096) for one in store.image(bucket).rows.values()) == 0
