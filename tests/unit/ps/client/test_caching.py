"""Rows kept by a trainer: how old they may get, what its own writes do to them, who stays when places are few."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edl.job_records import Mode, Training
from ps.client.cache import RowCache
from ps.protocol.frames import FrameOp
from tests.support.ps_fixture import PLAIN, Bench

KEYS = np.arange(10)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.stop()


def keep(cache: RowCache, keys: np.ndarray, step: int, count: int = 1, value: float = 1.0) -> None:
    rows = np.full((len(keys), 2), value, np.float32)
    cache.keep(keys, np.full(len(keys), count, np.uint32), rows, step, cache.writes)


def lookup(cache: RowCache, keys: np.ndarray, step: int) -> tuple[list[int], np.ndarray]:
    """Which are here, and all rows, with -1 for others."""
    out = np.full((len(keys), 2), -1, np.float32)
    missing = cache.lookup(keys, out, step)
    return keys[~missing].tolist(), out


def test_no_row_is_older_than_allowed() -> None:
    cache = RowCache(1 << 12, 2, 3)
    keep(cache, KEYS, 5)
    for step in (5, 6, 8):
        here, rows = lookup(cache, KEYS, step)
        assert here == KEYS.tolist() and (rows == 1).all()
    assert lookup(cache, KEYS, 9)[0] == []
    keep(cache, KEYS, 9, value=2)
    assert (lookup(cache, KEYS, 12)[1] == 2).all()


def test_rows_that_this_trainer_has_written_are_forgotten() -> None:
    cache = RowCache(1 << 12, 2, 3)
    keep(cache, KEYS, 5)
    cache.forget(np.array([3, 4, 77]))
    here, rows = lookup(cache, KEYS, 5)
    assert here == [0, 1, 2, 5, 6, 7, 8, 9] and (rows[3:5] == -1).all()
    # Fetched before a write, kept after it: they could be from before.
    before = cache.writes
    cache.forget(np.array([3]))
    cache.keep(np.array([3]), np.ones(1, np.uint32), np.ones((1, 2), np.float32), 5, before)
    assert lookup(cache, np.array([3]), 5)[0] == []


def test_more_rows_than_places() -> None:
    cache = RowCache(16, 2, 3)
    keys = np.arange(1000)
    cache.keep(keys, np.ones(1000, np.uint32), np.repeat(keys[:, None], 2, axis=1).astype(np.float32), 1, 0)
    here, rows = lookup(cache, keys, 1)
    assert len(here) == 16
    assert (rows[here] == np.array(here)[:, None]).all()


def test_the_more_frequent_of_two_stays_for_a_while() -> None:
    cache = RowCache(1, 2, 100)
    keep(cache, np.array([1]), 1, count=8)
    for _ in range(2):
        keep(cache, np.array([2]), 1)
        assert lookup(cache, np.array([1]), 1)[0] == [1]
    for _ in range(8):
        keep(cache, np.array([2]), 1)
    assert lookup(cache, np.array([2]), 1)[0] == [2]
    keep(cache, np.array([1]), 1)
    cache.lookup(np.array([1]), np.empty((1, 2), np.float32), 200)
    keep(cache, np.array([3]), 200)
    assert lookup(cache, np.array([3]), 200)[0] == [3]  # one that is too old makes room at once


def test_a_client_sees_others_updates_after_the_bound_and_its_own_at_once(bench: Bench) -> None:
    client = bench.start(2).client(cache_rows=1 << 14, cache_steps=2)
    other = bench.client(number=2)
    ones = np.ones((10, 4), np.float32)
    assert not client.pull("plain", KEYS).any()
    other.push({"plain": (KEYS, ones)})
    seen = []
    for _ in range(4):
        seen.append(float(client.pull("plain", KEYS).mean()))
        client.push({})
    assert seen == [0, 0, 0, -1]
    assert client.statistics["cached"] == 30 and len(bench.pservers[1].seen(FrameOp.PULL)) == 2
    fetched = client.statistics["fetched"]
    client.push({"plain": (KEYS[:3], ones[:3])})
    rows = client.pull("plain", np.concatenate([KEYS, KEYS]))
    assert (rows[[0, 1, 2, 10, 11, 12]] == -2).all() and (rows[3:10] == -1).all()
    assert client.statistics["fetched"] == fetched + 3


def test_dense_tables_and_reads_are_never_cached(bench: Bench) -> None:
    client = bench.start(1).client(cache_rows=1 << 14, cache_steps=2, training=Training(Mode.ASYNC))
    client.pull("plain", KEYS)
    other = bench.client(number=2)
    other.push({"plain": (KEYS, np.ones((10, PLAIN.dim)))})
    assert (client.read("plain", KEYS) == -1).all() and not client.pull("plain", KEYS).any()
