"""Checkpoints of real stores: two pservers write, three and one go on from there, with every optimizer's state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edl.adapters.remote_files import open_files
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.reader import Loaded
from ps.hashing import buckets_of
from ps.rows import ShardChange, TablePush, Taken, TrainerPush
from ps.spec import BUCKETS, Eviction, Initial, Optimizer, TableSpec, UpdateRule
from ps.store.store import SHARDS, RowStore
from tests.support.checkpoint_rows import finish, split

RULES = [
    UpdateRule.SGD,
    UpdateRule.MOMENTUM,
    UpdateRule.ADAGRAD,
    UpdateRule.ROW_ADAGRAD,
    UpdateRule.ADAM,
    UpdateRule.FTRL,
]
SPECS = [TableSpec(rule.value, 4, Optimizer(rule, lr=0.1), Initial(seed=3)) for rule in RULES]
DENSE = TableSpec("dense", 4, Optimizer(UpdateRule.ADAM), dense=True, rows=9)
SHORT = TableSpec("short", 4, eviction=Eviction(unseen_steps=3))
TABLES = (*SPECS, DENSE, SHORT)
KEYS = 800


class Server:
    """A store that serves some buckets."""

    def __init__(self, number: int, owned: NDArray[np.uint8], folder: Path) -> None:
        self.store = RowStore(kernels="numpy")
        self.owned = owned
        self.directory = CheckpointDirectory(open_files(str(folder)), "job", number, file_bytes=50_000)
        for spec in TABLES:
            self.store.define(spec)

    def put(self, loaded: Loaded) -> None:
        buckets = np.array(loaded.buckets, np.uint16)
        self.store.apply_piece(ShardChange(loaded.shard, (), buckets, dict(loaded.rows)))

    def write(self, number: int, base: str = "") -> str:
        snapshot = self.store.snapshot(number)
        since = self.directory.since(base)
        taken = (snapshot.take(shard, since) for shard in range(SHARDS))
        told = self.directory.write(number, 1, self.owned, taken, since=since)
        snapshot.close()
        return told


def servers(count: int, folder: Path, seed: int = 0) -> list[Server]:
    return [Server(number + 1, owned, folder) for number, owned in enumerate(split(count, seed))]


def restored(count: int, folder: Path, run: str) -> list[Server]:
    several = servers(count, folder, 7 + count)
    for one in several:
        one.directory.restore(run, one.owned, one.put)
    return several


def step(several: list[Server], number: int) -> NDArray[np.float32]:
    """One step of training on all of them; gives all weights."""
    draw = np.random.default_rng(number)
    found = []
    for spec in (*SPECS, DENSE):
        keys = draw.integers(0, spec.rows or KEYS, 300) * (1 if spec.dense else 1_000_003)
        grads = draw.standard_normal((300, 4)).astype(np.float32)
        every = np.arange(spec.rows or KEYS) * (1 if spec.dense else 1_000_003)
        weights = np.zeros((len(every), 4), np.float32)
        for one in several:
            mine = one.owned[buckets_of(keys)] == 1
            one.store.push([TrainerPush(0, 0, (TablePush(spec.name, keys[mine], grads[mine]),))], step=number)
            its = one.owned[buckets_of(every)] == 1
            out = np.zeros((int(its.sum()), 4), np.float32)
            one.store.pull(spec.name, every[its], out, step=number, insert=False)
            weights[its] = out
        found.append(weights)
    return np.concatenate(found)


def all_rows(several: list[Server]) -> dict[tuple[str, int], bytes]:
    found: dict[tuple[str, int], bytes] = {}
    for one in several:
        for bucket in np.flatnonzero(one.owned).tolist():
            for table, rows in one.store.image(bucket).rows.items():
                arrays = (rows.weights, rows.state, rows.frequency, rows.updates, rows.seen)
                for place, key in enumerate(rows.keys.tolist()):
                    found[table, key] = b"".join(array[place].tobytes() for array in arrays)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 1])
def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, count: int) -> None:
    before = servers(2, tmp_path)
    for number in range(1, 6):
        step(before, number)
    told = [one.write(5) for one in before]
    run = str(json.loads(finish([one.directory for one in before], 5, told, tables=TABLES))["run"])
    after = restored(count, tmp_path, run)
    assert all_rows(after) == all_rows(before) and len(all_rows(after)) > 2000
    for number in range(6, 9):
        assert np.array_equal(step(before, number), step(after, number)), number


@pytest.mark.slow
def test_changes_only_are_as_good_as_everything(tmp_path: Path) -> None:
    before = servers(2, tmp_path)
    run, sizes = "", []
    for number in range(1, 8):
        step(before, number)
        if number == 4:  # a bucket moves, and its rows are seen as a whole
            moved = np.flatnonzero(before[0].owned)[:200]
            for bucket in moved.tolist():
                before[1].store.take_image(before[0].store.image(bucket))
                before[0].store.drop([bucket])
            before[0].owned[moved], before[1].owned[moved] = 0, 1
        if number == 6:
            for one in before:
                one.store.drop([])
        told = [one.write(number, run) for one in before]
        done = json.loads(finish([one.directory for one in before], number, told, tables=TABLES))
        run = str(done["run"])
        sizes.append(len(before[0].directory.chain(run)))
        if number in (3, 7):  # before and after what happens in between
            assert all_rows(restored(3, tmp_path, run)) == all_rows(before), number
    assert max(sizes) > 2


@pytest.mark.slow
def test_a_pserver_that_came_since_writes_all_that_it_owns(tmp_path: Path) -> None:
    """It cannot tell what has changed since a mark that it has not seen."""
    before = servers(2, tmp_path)
    step(before, 1)
    told = [one.write(1) for one in before]
    run = str(json.loads(finish([one.directory for one in before], 1, told, tables=TABLES))["run"])
    step(before, 2)
    third = Server(3, np.zeros(BUCKETS, np.uint8), tmp_path)
    moved = np.flatnonzero(before[0].owned)[:900]
    for bucket in moved.tolist():
        third.store.take_image(before[0].store.image(bucket))
        before[0].store.drop([bucket])
    before[0].owned[moved], third.owned[moved] = 0, 1
    several = [*before, third]
    step(several, 3)
    told = [one.write(2, run) for one in several]
    run = str(json.loads(finish([one.directory for one in several], 2, told, tables=TABLES))["run"])
    assert len(third.directory.chain(run)) == 2
    assert all_rows(restored(2, tmp_path, run)) == all_rows(several)


def test_evicted_rows_do_not_come_back(tmp_path: Path) -> None:
    several = servers(1, tmp_path)
    store, directory = several[0].store, several[0].directory
    run = ""
    for number in range(1, 9):
        keys = np.arange(number * 50, number * 50 + 100)
        store.push([TrainerPush(0, 0, (TablePush("short", keys, np.ones((100, 4), np.float32)),))], step=number)
        store.sweep("short", step=number)
        run = str(json.loads(finish([directory], number, [several[0].write(number, run)], tables=TABLES))["run"])
    assert len(directory.chain(run)) > 1
    after = Server(2, np.ones(BUCKETS, np.uint8), tmp_path)
    after.directory.restore(run, after.owned, after.put)
    assert all_rows([after]) == all_rows(several) and 0 < after.store.rows("short") < 450


@pytest.mark.slow
def test_what_is_written_is_what_was_there_at_the_mark(tmp_path: Path) -> None:
    several = servers(1, tmp_path)
    for number in range(1, 4):
        step(several, number)
    one = several[0]
    rows = all_rows(several)
    snapshot = one.store.snapshot(3)

    def taken() -> Iterator[Taken]:
        for shard in range(SHARDS):
            if shard % 16 == 0:
                step(several, 100 + shard)
            yield snapshot.take(shard)

    told = one.directory.write(3, 1, one.owned, taken())
    snapshot.close()
    run = json.loads(finish([one.directory], 3, [told], tables=TABLES))["run"]
    found = all_rows(restored(2, tmp_path, run))
    # Counts of pulls are those of some moment between; weights, state and updates are those of the mark.
    assert {key: value[:16] for key, value in found.items()} == {key: value[:16] for key, value in rows.items()}
    assert all_rows(several) != rows
