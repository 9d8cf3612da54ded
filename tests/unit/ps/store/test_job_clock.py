"""Rows that get old by seconds: on a fake clock, through moves, replicas, checkpoints and between pservers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.adapters.remote_files import open_files
from edl.errors import SettingError
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.reader import Loaded
from ps.hashing import bucket_of
from ps.protocol import requests
from ps.protocol.frames import FrameOp
from ps.protocol.requests import Wanted
from ps.rows import ShardChange, TrainerPush
from ps.spec import BUCKETS, Eviction, Optimizer, TableSpec, UpdateRule
from ps.store.job_clock import MOST, JobClock
from ps.store.store import SHARDS, RowStore
from tests.support.checkpoint_rows import finish
from tests.support.ps_fixture import Bench
from tests.support.ps_servers import ALL, COUNTS, Boss, Plan, Trainer, place, server, tidy
from tests.support.ps_stores import ZEROS, both_kernels, part, pull, push, store_of

KEYS = np.arange(300, dtype=np.int64)
HOUR = 3600
TIMED = TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, eviction=Eviction(unseen_s=HOUR))


class Host:
    """The monotonic clock of a host."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def clock(self) -> JobClock:
        return JobClock(lambda: self.now_s, threading.Lock())


def timed(kernels: str, host: Host, spec: TableSpec = TIMED) -> RowStore:
    """A store whose clock is the host's."""
    store = store_of(kernels, spec)
    store.clock = host.clock()
    return store


def test_the_clock_counts_from_zero_and_only_advances() -> None:
    host = Host()
    clock = host.clock()
    assert clock.now() == 0
    host.now_s += 7.9
    assert clock.now() == 7
    clock.at_least(5)
    assert clock.now() == 7
    clock.at_least(20)
    assert clock.now() == 20
    host.now_s += 1
    assert clock.now() == 21
    clock.at_least(1 << 60)
    host.now_s += 10
    assert clock.now() == MOST, "it fits into a row"


@both_kernels
def test_rows_not_used_for_some_seconds_go(kernels: str) -> None:
    host = Host()
    store = timed(kernels, host)
    push(store, KEYS, 1.0, step=900)
    host.now_s += HOUR - 10
    pull(store, KEYS[:100], step=1)  # steps do not matter
    push(store, KEYS[100:150], 1.0, step=1)
    pull(store, KEYS[150:200], insert=False)
    assert len(store.sweep("t", step=10**6)) == 0
    host.now_s += 11
    gone = store.sweep("t", step=0)
    assert sorted(gone.keys.tolist()) == list(range(150, 300)) and (gone.weights == 1).all()
    assert store.rows("t") == 150
    host.now_s += 5 * HOUR
    assert len(store.sweep("t", step=0, least=40)) == 110, "a floor stays"


@both_kernels
def test_a_bucket_that_moves_keeps_its_age_wherever_clocks_stand(kernels: str) -> None:
    host, other = Host(), Host(5.0)
    store, heir = timed(kernels, host), timed(kernels, other)
    bucket = bucket_of(7)
    host.now_s += 10_000
    push(store, [7], 1.0)
    heir.take_image(store.image(bucket))
    other.now_s += HOUR
    assert len(heir.sweep("t", step=0)) == 0, "exactly an hour old"
    other.now_s += 1
    assert heir.sweep("t", step=0).keys.tolist() == [7]
    behind = timed(kernels, Host(5.0))
    pieces: list[ShardChange] = []
    store.push([TrainerPush(1, 1, [part([8], 1.0)])], step=1, each=pieces.append)
    for piece in pieces:
        behind.apply_piece(piece)
    assert behind.clock.now() == 10_000


@pytest.mark.parametrize(("came_early", "second"), [(False, 0), (True, 9000)])
def test_a_new_history_begins_with_the_second_of_its_own_rows(came_early: bool, second: int) -> None:
    """An image of it may be accepted while the rows of the previous history are being dropped."""
    host, other = Host(), Host()
    store, owner = timed("numpy", host), timed("numpy", other)
    other.now_s += 9000
    push(owner, [7], 1.0)
    host.now_s += 20_000
    push(store, KEYS, 1.0)
    store.drop(range(BUCKETS))
    if came_early:
        store.take_image(owner.image(bucket_of(7)))
    store.begin_history()
    assert store.clock.now() == second


@both_kernels
def test_while_a_job_is_down_nothing_gets_old(kernels: str, tmp_path: Path) -> None:
    host, later = Host(), Host(10**6)
    store = timed(kernels, host)
    directory = CheckpointDirectory(open_files(str(tmp_path)), "job", 1)
    push(store, KEYS[:100], 1.0)
    host.now_s += HOUR - 100
    push(store, KEYS[100:], 1.0)
    snapshot, everything = store.snapshot(1), np.ones(BUCKETS, np.uint8)
    told = directory.write(1, 1, everything, (snapshot.take(shard, None) for shard in range(SHARDS)))
    run = json.loads(finish([directory], 1, [told], tables=(TIMED,)))["run"]
    found = timed(kernels, later)

    def put(one: Loaded) -> None:
        found.apply_piece(ShardChange(one.shard, (), np.array(one.buckets), dict(one.rows)))

    directory.restore(run, everything, put)
    assert found.rows("t") == 300 and found.clock.now() == HOUR - 100
    later.now_s += 101
    assert sorted(found.sweep("t", step=0).keys.tolist()) == list(range(100))


@pytest.mark.parametrize("kernels", ["numpy"])
def test_other_tables_get_old_by_steps(kernels: str) -> None:
    host = Host()
    spec = TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, eviction=Eviction(unseen_steps=3))
    store = timed(kernels, host, spec)
    push(store, KEYS, 1.0, step=5)
    host.now_s += 10**6
    assert len(store.sweep("t", step=8)) == 0 and len(store.sweep("t", step=9)) == 300 and not store.timed


@pytest.fixture
def pservers() -> Iterator[None]:
    yield
    tidy()


def test_requests_carry_the_clock(pservers: None) -> None:
    one = server()
    boss, trainer = Boss(place(one)), Trainer(place(one))
    boss.say(Plan({1: place(one)}, {1: ALL}, tables=(COUNTS, TIMED)).orders(1))
    heads, body = requests.pull([Wanted("t", KEYS[:2], dim=2)])
    answer = trainer.ask(FrameOp.PULL, {"step": 0, "insert": True, "parts": heads, "clock": 5000}, body)
    assert answer.op is FrameOp.OK and answer.json()["clock"] >= 5000
    assert one.store.image(bucket_of(0)).rows["t"].seen[0] >= 5000
    bad = trainer.ask(FrameOp.PULL, {"step": 0, "insert": True, "parts": heads, "clock": "noon"}, body)
    assert bad.op is FrameOp.REFUSED and "clock 'noon' must be an integer" in bad.json()["text"]


def test_a_trainer_passes_the_latest_second_on() -> None:
    bench = Bench((TIMED,)).start(2)
    try:
        for number, one in bench.pservers.items():
            one.clock = 100 * number
        client = bench.client()
        client.pull("t", KEYS)
        assert all("clock" not in head for one in bench.pservers.values() for head in one.seen(FrameOp.PULL))
        client.pull("t", KEYS)
        assert [one.seen(FrameOp.PULL)[-1]["clock"] for one in bench.pservers.values()] == [200, 200]
    finally:
        bench.stop()


@pytest.mark.parametrize("bad", [-1, (1 << 31) + 1])
def test_bad_values_are_named(bad: int) -> None:
    with pytest.raises(SettingError, match=f"unseen_s={bad}: must be a whole number of seconds"):
        Eviction(unseen_s=bad)
    with pytest.raises(SettingError, match="cannot be combined with unseen_steps=2"):
        Eviction(unseen_s=1, unseen_steps=2)
