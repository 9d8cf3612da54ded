"""The store: pushes once and only once, images, pieces, snapshots, memory, threads; with both sets of kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from edl.errors import PsError
from ps.hashing import SHARDS, bucket_of, buckets_of, shard_of_bucket
from ps.rows import RowOp, Rows, ShardChange, TablePush, TrainerPush
from ps.spec import BUCKETS, Damaged, Eviction, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.budget import Full
from ps.store.snapshot import StoreSnapshot
from ps.store.store import RowStore
from tests.support.ps_stores import COUNTER, ZEROS, both_kernels, keys_of, part, pull, push, store_of

MANY = np.random.default_rng(7).integers(-(1 << 62), 1 << 62, 3000)
NORMAL = TableSpec("t", 5, Optimizer(UpdateRule.ADAGRAD, lr=0.1), Initial(InitMethod.NORMAL, 1.0))


def by_key(rows: Rows) -> dict[int, tuple[object, ...]]:
    """All fields of each row, by key."""
    parts = (rows.keys, rows.weights, rows.state, rows.frequency, rows.updates, rows.seen)
    return {key: tuple(one) for key, *one in zip(*(array.tolist() for array in parts), strict=True)}


def everything(store: RowStore, table: str = "t") -> dict[int, tuple[object, ...]]:
    """All rows of a table, by key."""
    found: dict[int, tuple[object, ...]] = {}
    for bucket in range(BUCKETS):
        rows = store.image(bucket).rows.get(table)
        if rows is not None:
            found.update(by_key(rows))
    return found


# --- pull and push ----------------------------------------------------------------------------------------------------


@both_kernels
def test_rows_begin_when_they_are_first_pulled(kernels: str) -> None:
    store = store_of(kernels, NORMAL)
    first = pull(store, MANY, step=3)
    assert len(np.unique(first)) > 14000
    assert store.rows("t") == len(MANY)
    assert (pull(store, MANY[::-1])[::-1] == first).all()
    rows = by_key(store.image(bucket_of(int(MANY[0]))).rows["t"])
    assert rows[int(MANY[0])][2:] == (2, 0, 3)


@both_kernels
def test_a_pull_without_insert_leaves_nothing(kernels: str) -> None:
    store = store_of(kernels, NORMAL)
    assert (pull(store, MANY, insert=False) == pull(store_of(kernels, NORMAL), MANY)).all()
    assert store.rows("t") == 0 and store.most_seen_step == 0


@both_kernels
def test_occurrences_are_counted_each(kernels: str) -> None:
    store = store_of(kernels, COUNTER)
    pull(store, [5, 5, 6, 5])
    store.pull("t", keys_of(5, 6), np.empty((2, 2), np.float32), step=2, counts=np.array([10, 20], np.uint32))
    rows = everything(store)
    assert (rows[5][2], rows[6][2]) == (13, 21)


@both_kernels
def test_values_of_one_key_are_summed_before_the_rule_sees_them(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 2, Optimizer(UpdateRule.ADAGRAD, lr=1.0, eps=0.0), ZEROS))
    pushed = push(store, [1, 2, 1, 1], [[1, 1], [2, 2], [3, 3], [4, 4]])
    assert (pushed.applied, pushed.fresh) == (2, 4)
    assert pull(store, [1, 2]).tolist() == [[-1, -1], [-1, -1]]
    assert everything(store)[1][1] == [64, 64]


@both_kernels
def test_sums_agree_with_numpy(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 33, Optimizer(UpdateRule.ADD), ZEROS))
    generator = np.random.default_rng(1)
    keys = generator.zipf(1.3, 20000) % 5000
    values = generator.integers(-50, 50, (20000, 33)).astype(np.float32)
    push(store, keys, values)
    expected = np.zeros((5000, 33))
    np.add.at(expected, keys, values)
    assert (pull(store, np.arange(5000)) == expected).all()


@both_kernels
def test_a_push_is_applied_once(kernels: str) -> None:
    store = store_of(kernels, COUNTER)
    assert push(store, MANY, 1.0, trainer=1, seq=1).applied == len(MANY)
    again = push(store, MANY, 1.0, trainer=1, seq=1)
    assert (again.applied, again.fresh, again.skipped) == (0, 0, len(MANY))
    assert push(store, MANY, 1.0, trainer=2, seq=1).applied == len(MANY)
    assert push(store, MANY, 1.0, trainer=1, seq=2).applied == len(MANY)
    assert (pull(store, MANY) == 3).all()


@both_kernels
def test_buckets_that_are_not_served_are_left_out_and_may_come_later(kernels: str) -> None:
    store = store_of(kernels, COUNTER)
    allowed = np.ones(BUCKETS, np.uint8)
    away = np.unique(buckets_of(MANY))[::2]
    allowed[away] = 2
    pieces: list[ShardChange] = []
    parts = [part(MANY, 1.0)]
    pushed = store.push([TrainerPush(1, 1, parts)], step=1, allowed=bytearray(allowed), each=pieces.append)
    assert pushed.refused == len(away)
    there = ~np.isin(buckets_of(MANY), away)
    assert pushed.applied == np.count_nonzero(there)
    assert not np.isin(np.concatenate([piece.buckets for piece in pieces]), away).any()
    out = np.full((len(MANY), 2), 9, np.float32)
    assert store.pull("t", MANY, out, step=1, allowed=allowed) == np.count_nonzero(~there)
    assert (out == 9).all()
    again = store.push([TrainerPush(1, 1, parts)], step=1)
    assert again.skipped == np.count_nonzero(there)
    assert again.fresh == np.count_nonzero(~there)
    assert (pull(store, MANY) == 1).all()


@both_kernels
def test_a_step_of_several_trainers_is_applied_as_one(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 2, Optimizer(UpdateRule.SGD, lr=1.0), ZEROS))
    push(store, [1, 2], 0.0, trainer=2, seq=5)
    pieces: list[ShardChange] = []
    pushes = [
        TrainerPush(1, 5, [part([1, 2, 3], 2.0)]),
        TrainerPush(2, 5, [part([1, 2], 100.0)]),
        TrainerPush(3, 5, [part([1], 4.0)]),
    ]
    pushed = store.push(pushes, step=1, scale=0.5, each=pieces.append)
    assert pull(store, [1, 2, 3]).tolist() == [[-3, -3], [-1, -1], [-1, -1]]
    assert pushed.skipped == 2 and pushed.fresh == 4
    told = {(trainer, int(bucket)) for piece in pieces for trainer, _, buckets in piece.pushes for bucket in buckets}
    b1, b2, b3 = bucket_of(1), bucket_of(2), bucket_of(3)
    assert told == {(1, b1), (1, b2), (1, b3), (3, b1)}
    assert push(store, [2], 1.0, trainer=3, seq=5).fresh == 1, "its number has not moved where it had no keys"


@both_kernels
def test_what_a_part_can_ask_for(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 2, Optimizer(UpdateRule.ADAGRAD), ZEROS))
    push(store, [1, 1], [[3, 3], [4, 4]], op=RowOp.FIRST)
    push(store, [1, 2], [[9, 9], [5, 5]], op=RowOp.FIRST)
    assert pull(store, [1, 2]).tolist() == [[4, 4], [5, 5]]
    push(store, [2, 2, 3], [[1, 1], [1, 1], [7, 7]], op=RowOp.ADD)
    assert pull(store, [2, 3]).tolist() == [[7, 7], [7, 7]]
    push(store, [2, 2], [[1, 1], [8, 8]], op=RowOp.ASSIGN)
    assert pull(store, [2]).tolist() == [[8, 8]]
    assert everything(store)[2][1] == [0, 0]
    with pytest.raises(PsError, match="cannot be 'mul'"):
        push(store, [1], 1.0, op="mul")


@both_kernels
def test_counters_know_neither_rate_nor_scale(kernels: str) -> None:
    store = store_of(kernels, COUNTER)
    store.push([TrainerPush(0, 0, [part([1], 2.0)])], step=1, lr={"t": 0.1}, scale=0.5)
    assert pull(store, [1]).tolist() == [[2, 2]]


@both_kernels
def test_what_does_not_fit_is_refused(kernels: str) -> None:
    store = store_of(kernels, COUNTER, TableSpec("d", 2, dense=True, rows=3))
    with pytest.raises(PsError, match=r"needs? values of shape \(2, 2\)"):
        push(store, [1, 2], np.ones((2, 3)))
    with pytest.raises(PsError, match="no table x"):
        store.push([TrainerPush(1, 1, [TablePush("x", keys_of(1), np.ones((1, 2), np.float32))])], step=1)
    with pytest.raises(PsError, match=r"dense table d has keys 0 to 2, not 3"):
        store.push([TrainerPush(1, 1, [TablePush("d", keys_of(3), np.ones((1, 2), np.float32))])], step=1)
    with pytest.raises(PsError, match="float32 array"):
        store.pull("t", keys_of(1), np.empty((1, 3), np.float32), step=1)
    with pytest.raises(PsError, match="dim 2 here, 3 there"):
        store.define(TableSpec("t", 3, Optimizer(UpdateRule.ADD), ZEROS))
    store.define(COUNTER)


@both_kernels
def test_keys_and_values_may_lie_anywhere(kernels: str) -> None:
    store = store_of(kernels, COUNTER)
    text = b"xxx" + keys_of(1, 2).tobytes() + np.ones((2, 2), np.float32).tobytes()
    keys = np.frombuffer(text, np.int64, 2, 3)
    values = np.frombuffer(text, np.float32, 4, 19).reshape(2, 2)
    push(store, keys, values)
    push(store, np.arange(4)[1:3], np.ones((4, 4), np.float32)[::2, ::2])
    assert pull(store, keys).tolist() == [[2, 2], [2, 2]]


# --- damaged values ---------------------------------------------------------------------------------------------------


@both_kernels
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_damaged_push_is_refused_as_a_whole(kernels: str, bad: float) -> None:
    store = store_of(kernels, COUNTER)
    values = np.ones((len(MANY), 2), np.float32)
    values[1234, 1] = bad
    with pytest.raises(PsError, match=f"table t, key {MANY[1234]}"):
        store.push([TrainerPush(1, 1, [part(MANY, 1.0), part(MANY, values)])], step=1)
    assert store.rows("t") == 0


@both_kernels
def test_damaged_rows_are_skipped(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, damaged=Damaged.SKIP))
    pushed = push(store, [1, 2, 2, 3], [[1, 1], [1, np.nan], [1, 1], [np.inf, 1]])
    assert (pushed.damaged, pushed.applied) == (2, 1)
    assert pull(store, [1, 2, 3]).tolist() == [[1, 1], [0, 0], [0, 0]]


@both_kernels
def test_damaged_values_are_replaced(kernels: str) -> None:
    spec = TableSpec("t", 2, Optimizer(UpdateRule.SGD, lr=1.0, clip_value=2.0), ZEROS, damaged=Damaged.CLIP)
    store = store_of(kernels, spec)
    pushed = push(store, [1, 2, 2, 3, 3], [[1, np.nan], [1, -np.inf], [1, 1], [np.inf, 1], [np.inf, 0.5]])
    assert pushed.damaged == 4
    assert pull(store, [1, 2, 3]).tolist() == [[-1, 0], [-2, 2], [-2, -1.5]]


# --- copies -----------------------------------------------------------------------------------------------------------


@both_kernels
def test_a_copy_that_takes_images_and_pieces_is_the_same(kernels: str) -> None:
    store, copy = store_of(kernels, NORMAL), store_of(kernels, NORMAL)
    push(store, MANY[:2000], np.ones((2000, 5)), trainer=1, seq=1)
    pull(copy, MANY[500:700])  # what a copy has of its own goes
    for bucket in range(BUCKETS):
        copy.take_image(store.image(bucket))
    parts = [part(MANY[1000:], np.full((2000, 5), 2.0))]
    store.push([TrainerPush(1, 2, parts)], step=8, each=copy.apply_piece)
    assert everything(copy) == everything(store)
    assert copy.push([TrainerPush(1, 2, parts)], step=8).skipped == 2000
    assert copy.push([TrainerPush(1, 1, [part(MANY[:500], np.ones((500, 5)))])], step=8).skipped == 500


@both_kernels
def test_a_piece_says_what_it_holds(kernels: str) -> None:
    store = store_of(kernels, COUNTER, TableSpec("u", 1, Optimizer(UpdateRule.SGD), ZEROS))
    pieces: list[ShardChange] = []
    other = TablePush("u", MANY[:10], np.ones((10, 1), np.float32))
    store.push([TrainerPush(4, 9, [part(MANY, 1.0), other])], step=1, each=pieces.append)
    assert [piece.shard for piece in pieces] == sorted({shard_of_bucket(b) for b in buckets_of(MANY).tolist()})
    for piece in pieces:
        assert (buckets_of(piece.rows["t"].keys) // 64 == piece.shard).all()
        assert len(np.unique(piece.rows["t"].keys)) == len(piece.rows["t"])
        assert [(trainer, seq) for trainer, seq, _ in piece.pushes] == [(4, 9)]
        assert set(piece.buckets) == set(piece.pushes[0][2]) == set(buckets_of(piece.rows["t"].keys).tolist())
    assert sum(len(piece.rows["u"]) for piece in pieces if "u" in piece.rows) == 10
    before = pieces[0].rows["t"].weights.copy()
    push(store, MANY, 1.0)
    assert (pieces[0].rows["t"].weights == before).all(), "later pushes do not reach into a piece"


@both_kernels
def test_nothing_is_left_of_dropped_buckets(kernels: str) -> None:
    store = store_of(kernels, COUNTER)
    push(store, MANY, 1.0, trainer=1, seq=1)
    kept = {int(key) for key in MANY if bucket_of(int(key)) % 2}
    store.drop(range(0, BUCKETS, 2))
    assert set(everything(store)) == kept
    assert push(store, MANY, 1.0, trainer=1, seq=1).fresh == len(MANY) - len(kept)
    assert (pull(store, MANY) == 1).all()


@both_kernels
def test_slots_are_used_again(kernels: str) -> None:
    store = store_of(kernels, NORMAL)
    first = pull(store, MANY)
    size = store.bytes()
    for _ in range(4):
        store.drop(range(BUCKETS))
        assert store.rows("t") == 0
        assert (pull(store, MANY) == first).all()
    assert store.bytes() < 1.1 * size


# --- snapshots --------------------------------------------------------------------------------------------------------


def all_taken(snapshot: StoreSnapshot, since: int | None = None) -> dict[int, tuple[object, ...]]:
    found: dict[int, tuple[object, ...]] = {}
    for shard in range(SHARDS):
        found.update(by_key(snapshot.take(shard, since).rows["t"]))
    return found


@both_kernels
@pytest.mark.parametrize("count", [10, 3000])
def test_a_pull_notices_a_bucket_that_leaves_before_its_rows_are_read(kernels: str, count: int) -> None:
    """Its rows are gone by then; initial weights in their place would be wrong."""
    store = store_of(kernels, COUNTER)
    keys, allowed = MANY[:count], np.ones(BUCKETS, np.uint8)
    push(store, keys, 1.0)
    bucket, in_turn = bucket_of(int(keys[3])), store._in_turn

    def leaves(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        allowed[bucket] = 0
        store.drop([bucket])
        return in_turn(ranges)

    store._in_turn = leaves  # type: ignore[method-assign]
    out = np.empty((count, 2), np.float32)
    assert store.pull("t", keys, out, step=1, allowed=allowed) > 0
    assert store.image(bucket).rows == {}


@both_kernels
def test_a_snapshot_is_the_store_at_its_mark(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.store.snapshot.STRETCH", 8)
    store = store_of(kernels, NORMAL)
    push(store, MANY[:2000], np.ones((2000, 5)))
    expected = everything(store)
    snapshot = store.snapshot(1)
    taken = [by_key(snapshot.take(0).rows["t"])]
    push(store, MANY, np.ones((3000, 5)))
    store.drop(range(64, 128))
    push(store, MANY[::2], np.ones((1500, 5)))
    pull(store, MANY)
    store.take_image(store.image(700))
    store.sweep("t", step=9, most=1000)
    taken += [by_key(snapshot.take(shard).rows["t"]) for shard in range(1, SHARDS)]
    found = {key: row for one in taken for key, row in one.items()}
    assert found == expected
    snapshot.close()


@both_kernels
def test_only_what_changed_since_a_mark(kernels: str) -> None:
    store = store_of(kernels, COUNTER)
    push(store, MANY, 1.0)
    assert len(all_taken(store.snapshot(1))) == len(MANY)
    push(store, MANY[:100], 1.0)
    drawn = store.snapshot(2)
    push(store, MANY[50:150], 1.0)
    second = all_taken(drawn, since=1)
    assert set(second) == set(MANY[:100].tolist())
    assert all(row[0] == [2, 2] for row in second.values())
    assert set(all_taken(store.snapshot(3), since=2)) == set(MANY[50:150].tolist())
    assert set(all_taken(store.snapshot(4), since=1)) == set(MANY[:150].tolist())
    with pytest.raises(PsError, match="mark 4"):
        store.snapshot(4)


@both_kernels
def test_rows_removed_since_a_mark_are_reported(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, eviction=Eviction(unseen_steps=5))
    store = store_of(kernels, spec)
    push(store, MANY[:1000], 1.0, step=1)
    push(store, MANY[1000:], 1.0, step=10)
    store.snapshot(1)
    gone = store.sweep("t", step=10)
    assert set(gone.keys.tolist()) == set(MANY[:1000].tolist())
    snapshot = store.snapshot(2)
    taken = [snapshot.take(shard, 1) for shard in range(SHARDS)]
    assert sum(len(one.rows["t"]) for one in taken) == 0
    assert set(np.concatenate([one.gone["t"] for one in taken]).tolist()) == set(MANY[:1000].tolist())
    assert all(not one.whole for one in taken)
    monkeypatch.setattr("ps.store.table.REMEMBERED", 3)
    store.sweep("t", step=100)
    snapshot = store.snapshot(3)
    taken = [snapshot.take(shard, 2) for shard in range(SHARDS)]
    assert set().union(*(one.whole for one in taken)) >= set(buckets_of(MANY[1000:]).tolist())


@both_kernels
def test_a_bucket_that_moved_in_is_given_as_a_whole(kernels: str) -> None:
    store = store_of(kernels, COUNTER)
    push(store, MANY, 1.0)
    store.snapshot(1)
    bucket = bucket_of(int(MANY[0]))
    store.take_image(store.image(bucket))
    taken = store.snapshot(2).take(shard_of_bucket(bucket), 1)
    assert taken.whole == {bucket}
    assert set(taken.rows["t"].keys.tolist()) == {int(key) for key in MANY if bucket_of(int(key)) == bucket}


# --- memory -----------------------------------------------------------------------------------------------------------


@both_kernels
def test_a_full_store_applies_nothing_of_a_push(kernels: str) -> None:
    store = store_of(kernels, COUNTER, most_bytes=100_000)
    push(store, MANY[:300], 1.0)
    with pytest.raises(Full, match="100,000 bytes"):
        store.push([TrainerPush(1, 1, [part(MANY[:300], 1.0), part(MANY, 1.0, RowOp.ADD)])], step=1)
    assert store.rows("t") == 300
    assert push(store, MANY[:300], 1.0, trainer=1, seq=1).applied == 300
    assert (pull(store, MANY[:300]) == 2).all()
    assert (pull(store, MANY[300:]) == 0).all()
    assert store.bytes() <= 100_000
    copy = store_of(kernels, COUNTER, most_bytes=1)
    copy.take_image(store.image(bucket_of(int(MANY[0]))))
    assert copy.rows("t") >= 1, "a copy follows its owner whatever it takes"


# --- threads ----------------------------------------------------------------------------------------------------------


def run_all(*works: Callable[[], None]) -> None:
    """Each in a thread of its own; raises what one of them raised."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (handed on to the test)
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@both_kernels
def test_threads_lose_nothing(kernels: str) -> None:
    """Pushes, pulls, images, snapshots and a copy fed by pieces, all at once: the sums are exact."""
    store, copy = store_of(kernels, COUNTER), store_of(kernels, COUNTER)
    rounds, pushers = 12, 4

    def pusher(number: int) -> Callable[[], None]:
        def work() -> None:
            generator = np.random.default_rng(number)
            for seq in range(rounds):
                keys = generator.permutation(MANY)
                values = np.full((len(keys), 2), number + 1, np.float32)
                parts = [part(keys, values), part(keys[:7], 1.0)]
                store.push([TrainerPush(number + 1, seq, parts)], step=seq, each=copy.apply_piece)
                store.push([TrainerPush(number + 1, seq, parts)], step=seq, each=copy.apply_piece)

        return work

    def reader() -> None:
        for step in range(rounds):
            assert (pull(store, MANY, step=step) >= 0).all()
            store.image(step)

    def saver() -> None:
        for mark in range(1, 4):
            snapshot = store.snapshot(mark)
            rows = [snapshot.take(shard).rows["t"] for shard in range(SHARDS)]
            assert sum(map(len, rows)) <= len(MANY)

    run_all(*(pusher(number) for number in range(pushers)), reader, saver)
    total = rounds * sum(range(1, pushers + 1))
    found = pull(store, MANY)[:, 0]
    assert found.sum() == total * len(MANY) + rounds * pushers * 7
    assert (found >= total).all()
    wanted = {key: row[:2] for key, row in everything(store).items()}
    assert {key: row[:2] for key, row in everything(copy).items()} == wanted


@both_kernels
def test_a_snapshot_has_rows_once_whose_damaged_gradients_are_skipped(kernels: str) -> None:
    store = store_of(kernels, TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, damaged=Damaged.SKIP))
    push(store, MANY, 1.0)
    snapshot = store.snapshot(1)
    for _ in range(2):
        push(store, MANY[:100], np.full((100, 2), np.nan))
    taken = [snapshot.take(shard).rows["t"] for shard in range(SHARDS)]
    assert sorted(key for rows in taken for key in rows.keys.tolist()) == sorted(MANY.tolist())
