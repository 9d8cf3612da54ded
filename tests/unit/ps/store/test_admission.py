"""Admission by count against an exact count of everything that came, over many ageings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ps.spec import Admission, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.admission import WINDOW, Pending, admitted
from ps.store.store import RowStore

Keys = NDArray[np.int64]
BATCH = 1024


def streams(kind: str, batches: int) -> Iterator[Keys]:
    rng = np.random.default_rng(5)
    for _ in range(batches):
        if kind == "zipf":
            yield (rng.zipf(1.05, BATCH) % (1 << 40)).astype(np.int64)
        else:  # half of them come again and again, the others never
            yield np.concatenate([rng.integers(0, 8000, BATCH // 2), rng.integers(1 << 20, 1 << 60, BATCH // 2)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zipf", "uniform"])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_key_gets_a_row_with_exactly_its_nth_occurrence(kind: str, count: int) -> None:
    """Unless it stayed away for the window: then its count may have started over."""
    rule, pending = Admission(count=count), Pending()
    exact: dict[int, int] = {}
    last: dict[int, int] = {}
    rows: set[int] = set()
    late: set[int] = set()
    unknown = early = 0
    for keys in streams(kind, 240):
        distinct, counts = np.unique(keys, return_counts=True)
        new = np.array([int(key) not in rows for key in distinct])
        distinct, counts = distinct[new], counts[new]
        found = admitted(rule, pending, distinct, counts.astype(np.int64))
        for key, times, row in zip(distinct.tolist(), counts.tolist(), found.tolist(), strict=True):
            if unknown - last.get(key, unknown) > WINDOW - BATCH:
                late.add(key)
            exact[key] = exact.get(key, 0) + times
            last[key] = unknown
            early += row and exact[key] < count
            assert row or key in late or exact[key] < count, f"{key} came {exact[key]} times"
            if row:
                rows.add(key)
        unknown += int(counts.sum())
    assert pending.generation >= 5, "it has been aged over and over"
    assert not early, "a key with fewer occurrences got a row"
    assert len(rows) > 500


def test_keys_that_come_once_get_no_row_at_two() -> None:
    rule, pending, admitted_ = Admission(count=2), Pending(), 0
    for begin in range(0, 40 * WINDOW, 8192):
        keys = np.arange(begin, begin + 8192)
        admitted_ += int(admitted(rule, pending, keys, np.ones(8192, np.int64)).sum())
    assert admitted_ <= 3, "of 2.6 million"
    assert len(pending) <= 1.25 * WINDOW + 8192
    assert pending.bytes() <= 2 << 20


@pytest.mark.slow
def test_a_rare_key_gets_its_row_at_ten() -> None:
    """It comes once in 512,000 unknown occurrences of its table."""
    spec = TableSpec("t", 1, Optimizer(UpdateRule.SGD), Initial(InitMethod.ZEROS), Admission(count=10))
    store = RowStore()
    store.define(spec)
    rare = np.arange(-20, 0)
    out = np.empty((1 << 15, 1), np.float32)
    fresh = 0
    for occurrence in range(1, 11):
        for _ in range(0, 512_000, 1 << 15):
            store.pull("t", np.arange(fresh, fresh + (1 << 15)), out, step=1)
            fresh += 1 << 15
        assert store.rows("t") == 0
        store.pull("t", rare, out[:20], step=1)
        assert store.rows("t") == (20 if occurrence == 10 else 0)
    assert store.bytes() < 160 << 20


def test_memory_follows_what_is_remembered() -> None:
    pending = Pending()
    assert pending.bytes() == 2048
    pending.add(np.arange(10_000), np.ones(10_000, np.int64))
    assert 16 * 10_000 <= pending.bytes() <= 48 * 10_000
    for _ in range(6):
        pending.add(np.arange(10), np.full(10, WINDOW // 40 + 1))
    assert len(pending) == 10 and pending.bytes() == 2048, "what never came again has been forgotten"


def test_counts_of_many_keys_in_one_slot_range_are_kept_apart() -> None:
    """Every key has its own count."""
    pending = Pending()
    keys = np.random.default_rng(0).integers(-(1 << 62), 1 << 62, 120)
    for times in range(1, 6):
        total = pending.add(keys, np.arange(1, 121))
        assert (total == times * np.arange(1, 121)).all()
    assert pending.bytes() == 4096


def test_a_key_that_has_got_a_row_is_counted_from_zero_when_it_loses_it() -> None:
    rule, pending = Admission(count=3), Pending()
    key = np.array([5])
    assert admitted(rule, pending, key, np.array([3]))[0]
    assert len(pending) == 0
    assert not admitted(rule, pending, key, np.array([2]))[0]
    assert admitted(rule, pending, key, np.array([1]))[0]


def test_very_large_counts_stop_at_the_largest() -> None:
    pending = Pending()
    key = np.array([5])
    assert pending.add(key, np.array([1 << 30]))[0] == 1 << 30
    assert pending.add(key, np.array([1]))[0] == 1 << 20
