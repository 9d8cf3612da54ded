"""Which rows go: unseen for long, above the cap, down to the floor; and that slots and copies follow."""

from __future__ import annotations

import numpy as np
import pytest

from ps.hashing import SHARDS, buckets_of, shard_of_bucket
from ps.rows import ShardChange, TrainerPush
from ps.spec import BUCKETS, Eviction, Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore
from tests.support.ps_stores import ZEROS, both_kernels, part, pull, push, store_of

KEYS = np.arange(500, dtype=np.int64)


def table(**eviction: int) -> TableSpec:
    """A table with counters as rows."""
    return TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, eviction=Eviction(**eviction))  # type: ignore[arg-type]


def keys_in(store: RowStore, bucket: int) -> list[int]:
    """The keys that have a row in the bucket."""
    rows = store.image(bucket).rows.get("t")
    return [] if rows is None else rows.keys.tolist()


@both_kernels
def test_rows_unseen_for_long_go(kernels: str) -> None:
    store = store_of(kernels, table(unseen_steps=10))
    push(store, KEYS, 1.0, step=1)
    pull(store, KEYS[:50], step=5)
    push(store, KEYS[50:100], 1.0, step=6)
    pull(store, KEYS[100:120], step=9, insert=False)
    assert len(store.sweep("t", step=11)) == 0
    gone = store.sweep("t", step=14)
    assert sorted(gone.keys.tolist()) == list(range(100, 500))
    assert (gone.weights == 1).all()
    assert store.rows("t") == 100
    assert pull(store, KEYS, insert=False)[:, 0].tolist() == [1.0] * 50 + [2.0] * 50 + [0.0] * 400


@both_kernels
def test_rows_that_a_slow_trainer_uses_stay(kernels: str) -> None:
    """In mode async each trainer counts its own steps; rows get old by those of the fastest."""
    store = store_of(kernels, table(unseen_steps=10, most_rows=1))
    push(store, KEYS[:200], 1.0, step=1000)
    pull(store, KEYS[150:300], step=40)
    push(store, KEYS[300:], 1.0, step=41)
    assert len(store.sweep("t", step=store.most_seen_step)) == 0
    pull(store, KEYS[:100], step=1005)
    assert len(store.sweep("t", step=store.most_seen_step, most=499)) == 1
    assert len(store.sweep("t", step=1011)) == 399 and store.rows("t") == 100
    store.cap("t", 100)
    pull(store, KEYS[:10], step=1020)
    pull(store, KEYS[400:], step=50)
    assert any(key >= 400 for bucket in range(BUCKETS) for key in keys_in(store, bucket)), "others make room for them"


@both_kernels
def test_a_floor_stays(kernels: str) -> None:
    store = store_of(kernels, table(unseen_steps=1))
    for step in range(5):
        push(store, KEYS[step * 100 : step * 100 + 100], 1.0, step=step)
    gone = store.sweep("t", step=100, least=300)
    assert sorted(gone.keys.tolist()) == list(range(200))
    assert store.rows("t") == 300


@both_kernels
@pytest.mark.parametrize(("least", "count"), [(0, 5), (498, 2)])
def test_only_due_rows_of_a_sampled_table_go(
    kernels: str, least: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age limit of a sample is an estimate: it may be above that of rows which are not due."""
    monkeypatch.setattr("ps.store.store.SAMPLE", 16)
    store = store_of(kernels, table(unseen_steps=10))
    due = KEYS[::100]
    push(store, due, 1.0, step=1)
    for number, some in enumerate(np.array_split(np.setdiff1d(KEYS, due), 99)):
        push(store, some, 1.0, step=4 + number)
    gone = store.sweep("t", step=12, least=least).keys
    assert len(gone) == count and np.isin(gone, due).all()


@both_kernels
def test_above_the_cap_the_least_recently_seen_go_then_the_least_frequent(kernels: str) -> None:
    store = store_of(kernels, table(most_rows=1))
    pull(store, KEYS[:100], step=1)
    pull(store, np.repeat(KEYS[100:200], 3), step=2)
    pull(store, KEYS[200:300], step=2)
    gone = store.sweep("t", step=3, most=150)
    assert sorted(gone.keys.tolist()) == [*range(100), *(key for key in range(200, 300) if key in gone.keys)]
    assert len(gone) == 150 and store.rows("t") == 150


@both_kernels
def test_the_cap_is_hard(kernels: str) -> None:
    store = store_of(kernels, table(most_rows=1))
    store.cap("t", 200)
    for step in range(10):
        pull(store, KEYS[step * 50 : step * 50 + 50], step=step)
        assert store.rows("t") <= 200
    assert store.rows("t") > 100
    pushed = push(store, KEYS, 1.0, step=10)
    assert store.rows("t") <= 200 and pushed.dropped == 500 - pushed.applied


@both_kernels
def test_rows_that_made_room_are_exported(kernels: str) -> None:
    spec = TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, eviction=Eviction(most_rows=1, export=True))
    store = store_of(kernels, spec)
    store.cap("t", 64)
    for step in range(10):
        push(store, KEYS[step * 50 : step * 50 + 50], 1.0, step=step)
    gone = store.sweep("t", step=10, most=64)
    assert len(gone) + store.rows("t") <= 500
    assert len(gone) > 100 and (gone.weights == 1).all()
    assert len(store.sweep("t", step=10, most=64)) == 0


@both_kernels
def test_copies_hear_of_it(kernels: str) -> None:
    store, copy = store_of(kernels, table(unseen_steps=10)), store_of(kernels, table(unseen_steps=10))
    pieces: list[ShardChange] = []

    def each(piece: ShardChange) -> None:
        pieces.append(piece)
        copy.apply_piece(piece)

    store.push([TrainerPush(1, 1, [part(KEYS, 1.0)])], step=1, each=each)
    store.push([TrainerPush(1, 2, [part(KEYS[:9], 1.0)])], step=15, each=each)
    pieces.clear()
    store.sweep("t", step=15, each=each)
    assert copy.rows("t") == 9
    assert sorted(np.concatenate([piece.removed["t"] for piece in pieces]).tolist()) == list(range(9, 500))
    assert all(shard_of_bucket(int(bucket)) == piece.shard for piece in pieces for bucket in piece.buckets)


@both_kernels
def test_an_heir_tells_its_own_copies_of_no_eviction_that_it_heard_of_as_a_copy(kernels: str) -> None:
    owner, heir, copy = (store_of(kernels, table(unseen_steps=10)) for _ in range(3))
    heir.push([], step=1, each=copy.apply_piece)
    owner.push([TrainerPush(1, 1, [part(KEYS, 1.0)])], step=1, each=heir.apply_piece)
    owner.sweep("t", step=15, each=heir.apply_piece)
    owner.push([TrainerPush(1, 2, [part(KEYS, 3.0)])], step=16, each=heir.apply_piece)
    for bucket in np.unique(buckets_of(KEYS)).tolist():
        copy.take_image(heir.image(bucket))
    heir.push([TrainerPush(1, 3, [part(KEYS[:250], 1.0)])], step=17, each=copy.apply_piece)
    assert copy.rows("t") == heir.rows("t") == 500
    assert (pull(copy, KEYS, insert=False) == pull(heir, KEYS, insert=False)).all()


@pytest.mark.slow
@both_kernels
def test_a_copy_remembers_no_keys_of_evicted_rows_for_others(kernels: str) -> None:
    """It may never push to these shards itself, which would discard them."""
    owner, copy = (store_of(kernels, table(unseen_steps=10)) for _ in range(2))
    copy.push([], step=1, each=lambda piece: None)
    for step in range(0, 1000, 20):
        owner.push([TrainerPush(1, step, [part(KEYS, 1.0)])], step=step, each=copy.apply_piece)
        owner.sweep("t", step=step + 15, each=copy.apply_piece)
    assert copy.rows("t") == 0
    assert sum(len(copy.tables["t"].unreported(shard)) for shard in range(SHARDS)) == 0


@both_kernels
def test_a_bucket_that_was_away_keeps_rows_that_were_evicted_before(kernels: str) -> None:
    """A pull had to make room, and no push to the shard reported that before another pserver took the bucket."""
    first, copy = store_of(kernels, table(most_rows=1)), store_of(kernels, table(most_rows=1))
    first.cap("t", 64)
    first.push([TrainerPush(1, 1, [part(KEYS[:64], 1.0)])], step=1, each=copy.apply_piece)
    pull(first, KEYS[64:128], step=2)
    gone = np.setdiff1d(KEYS[:64], [key for bucket in range(BUCKETS) for key in keys_in(first, bucket)])
    assert len(gone)
    second = store_of(kernels, table(most_rows=1))
    second.push([TrainerPush(1, 2, [part(gone, 5.0)])], step=3, each=first.apply_piece)
    for bucket in range(BUCKETS):
        copy.take_image(first.image(bucket))
    first.cap("t", 0)
    first.push([TrainerPush(1, 3, [part(KEYS[128:], 1.0)])], step=4, each=copy.apply_piece)
    assert (pull(copy, gone, insert=False) == 5).all() and copy.rows("t") == first.rows("t")


@both_kernels
def test_copies_hear_of_rows_that_went_before_the_owner_s_first_push(kernels: str) -> None:
    owner, copy = store_of(kernels, table(most_rows=1)), store_of(kernels, table(most_rows=1))
    push(owner, KEYS[:64], 1.0, step=1)
    fresh = store_of(kernels, table(most_rows=1))
    for bucket in range(BUCKETS):
        fresh.take_image(owner.image(bucket))
        copy.take_image(owner.image(bucket))
    fresh.cap("t", 64, np.ones(BUCKETS, np.uint8))
    pull(fresh, KEYS[64:128], step=2)
    fresh.push([TrainerPush(1, 1, [part(KEYS[64:], 1.0)])], step=3, each=copy.apply_piece)
    assert {key for bucket in range(BUCKETS) for key in keys_in(copy, bucket)} == {
        key for bucket in range(BUCKETS) for key in keys_in(fresh, bucket)
    }


@both_kernels
def test_a_large_sweep_goes_a_bit_at_a_time(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.store.store.SWEPT", 2)
    store = store_of(kernels, table(unseen_steps=1))
    push(store, KEYS, 1.0, step=1)
    pieces: list[ShardChange] = []
    assert len(store.sweep("t", step=10, each=pieces.append)) == 500
    assert store.rows("t") == 0
    assert max(len(piece.removed["t"]) for piece in pieces) == 2


@both_kernels
def test_rows_come_and_go_and_stay_what_they_are(kernels: str) -> None:
    """Against a dict, over many rounds: searches end neither too early nor at the wrong row."""
    store = store_of(kernels, table(unseen_steps=1))
    generator = np.random.default_rng(3)
    known: dict[int, list[float]] = {}
    for step in range(1, 60):
        keys = generator.integers(0, 3000, 400)
        push(store, keys, 1.0, step=step)
        for key in keys.tolist():
            held = known.setdefault(key, [0.0, 0])
            held[0] += 1
            held[1] = step
        gone = store.sweep("t", step=step, least=500)
        for key, row in zip(gone.keys.tolist(), gone.weights, strict=True):
            assert known.pop(key)[0] == row[0]
        assert store.rows("t") == len(known)
    held_keys = np.array(sorted(known))
    assert pull(store, held_keys, insert=False)[:, 0].tolist() == [known[key][0] for key in held_keys.tolist()]
