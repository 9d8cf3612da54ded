"""Carrying out what a pserver is to do, where threads meet: images that come late, restores of a life that is over."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.adapters.clock import SystemClock
from edl.adapters.files import PlainFiles
from edl.errors import PsError
from edl.job_records import Training
from edl.wire.snapshot import header_bytes, parse_header
from ps.checkpoint.directory import CheckpointDirectory
from ps.checkpoint.evicted import EvictedRows
from ps.checkpoint.reader import Loaded
from ps.hashing import SHARDS, buckets_of
from ps.protocol.messages import CheckpointOrder, FoundCheckpoints, Joined, Orders, PlacementMap, PserverAddress, pack
from ps.rows import Rows, ShardChange, TablePush, Taken, TrainerPush, concat
from ps.server import bucket_machine as h
from ps.server.bucket_shell import BucketShell
from ps.server.checkpoint_task import CheckpointTask
from ps.server.server import ParameterServer, Setup
from ps.spec import BUCKETS, Eviction, Optimizer, TableSpec, UpdateRule
from ps.store.store import RowStore
from tests.support.ps_servers import COUNTS
from tests.support.ps_stores import ZEROS, part, store_of


class CheckpointTaskDeps:
    """Dependencies without any reachable peer."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.loaded: list[int] = []

    def connect(self, follower: int) -> Any:
        raise PsError("nobody is there")

    def say(self, word: Any) -> None:
        self.said.append(word)

    def owned(self) -> Any:
        return np.ones(BUCKETS, np.uint8)

    def restored(self, number: int, buckets: tuple[int, ...]) -> None:
        self.loaded.append(number)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def orders(version: int, *, history: int = 1, since: int = 5, owner: int = 1, joining: int = 0) -> h.OrdersCame:
    """Orders for pserver 1, beside pserver 2, with the same roles for all buckets."""
    nobody, owners, joiners = (pack([number] * BUCKETS) for number in (0, owner, joining))
    placement = PlacementMap(version, history, (PserverAddress(2, "b", "host", 1),), owners, nobody, joiners)
    changed = pack([since] * BUCKETS, "i")
    return h.OrdersCame(Orders(0, 1, placement, 0, (), Training(), (), since=changed, giver=nobody))


@pytest.fixture
def bucket_shell() -> Iterator[BucketShell]:
    """A bucket shell without its thread: the test carries out effects."""
    one = BucketShell(h.BucketMachine("a"), RowStore(kernels="numpy"), CheckpointTaskDeps(), SystemClock())
    yield one
    one.stop()


def test_an_image_for_an_older_copy_does_not_stand_for_the_newer_one(bucket_shell: BucketShell) -> None:
    bucket = 5
    bucket_shell._carry([h.FeedFollowers((bucket,), (2,), ()), h.Copy(2, 1, (bucket,))])
    bucket_shell._carry([h.FeedFollowers((bucket,), (2,), ()), h.Copy(2, 7, (bucket,))])
    to_follower = bucket_shell._to_followers[2]
    bucket_shell.take_image(2, bucket, 1)  # the stream's thread had taken it up when the newer copy was asked for
    assert not to_follower.live[bucket], "the newer copy would have no image, and nobody would wait for the older one's"
    bucket_shell.take_image(2, bucket, 7)
    assert to_follower.live[bucket]
    bucket_shell._carry([h.FeedFollowers((bucket,), (), ())])
    assert not to_follower.live[bucket]


def test_async_pushes_wait_for_a_copy_that_is_far_behind_or_out_of_reach(
    bucket_shell: BucketShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = np.array([5], np.uint16), np.array([900], np.uint16)
    over = threading.Event()

    def connect(self: CheckpointTaskDeps, follower: int) -> Any:
        over.wait(30.0)
        raise PsError("too late")

    monkeypatch.setattr(CheckpointTaskDeps, "connect", connect)
    bucket_shell._carry([h.FeedFollowers((5,), (2,), ()), h.FeedFollowers((900,), (3,), ())])
    sent = bucket_shell.sent()
    for number, bucket in ((2, near), (3, far)):
        mark = bucket_shell._to_followers[number].stream.put(ShardChange(int(bucket[0]) >> 6, (), bucket), 1)
        sent.marks[bucket_shell._to_followers[number]] = mark
    assert bucket_shell.waits_for(sent, near, 60.0) == 0 and bucket_shell.waits_for(sent, near, 0.0) == 2
    bucket_shell._to_followers[2].stream._state = "down"  # and the coordinator has not heard of it yet
    assert bucket_shell.waits_for(sent, near, 60.0) == 2
    assert bucket_shell.waits_for(sent, far, 60.0) == 0
    bucket_shell._carry([h.FeedFollowers((5,), (), ())])
    assert bucket_shell.waits_for(sent, near, 60.0) == 0, "orders have taken the copy away"
    bucket_shell.stop()
    over.set()


def test_async_pushes_wait_for_the_orders_under_which_a_copy_has_refused_something(
    bucket_shell: BucketShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = np.array([5], np.uint16)
    bucket_shell._take(orders(5))
    bucket_shell._carry([h.FeedFollowers((5, 6), (2,), ())])
    monkeypatch.setattr(bucket_shell._to_followers[2].stream, "behind", lambda lag_s: False)
    sent = bucket_shell.behind(bucket_shell.sent(), near)
    assert bucket_shell.waits_for(sent, near, 0.5) == 0
    bucket_shell.fenced(2, 7, [6])
    assert bucket_shell.waits_for(sent, near, 0.5) == 2, "it may own this bucket as well"
    bucket_shell._take(orders(6))
    assert bucket_shell.waits_for(sent, near, 0.5) == 2
    bucket_shell._take(orders(7))
    assert bucket_shell.waits_for(sent, near, 0.5) == 0


@pytest.mark.parametrize("lost_before", [False, True])
def test_what_a_copy_refused_is_not_acknowledged_before_the_machine_knows(
    bucket_shell: BucketShell, monkeypatch: pytest.MonkeyPatch, lost_before: bool
) -> None:
    near = np.array([5], np.uint16)
    bucket_shell._take(orders(5))
    bucket_shell._carry([h.FeedFollowers((5,), (2,), (2,))])
    monkeypatch.setattr(bucket_shell._to_followers[2].stream, "has", lambda mark: True)
    assert bucket_shell.waits_for(bucket_shell.sent(), near, None) == 0
    if lost_before:  # nobody listens at the follower's address, which its thread reports at a time of its own
        bucket_shell.lost(2, "nobody is there")
    bucket_shell.fenced(2, 7, [5])
    repeated = bucket_shell.behind(bucket_shell.sent(), near)  # the push that was refused comes once more
    assert not bucket_shell.stopped(repeated, near)
    event: h.Event | None = None
    while not isinstance(event, h.FollowerFenced):
        assert bucket_shell.waits_for(repeated, near, None) == 2
        event = bucket_shell._events.get()
        assert event is not None
        bucket_shell._take(event)
    assert bucket_shell.waits_for(repeated, near, None) == 0 and bucket_shell.stopped(repeated, near)


def test_an_image_taken_between_orders_of_a_new_history_and_their_reset_stays(
    bucket_shell: BucketShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has accepted it under the new orders, so nobody sends it again."""
    keys = np.array([11, 12], np.int64)
    comes, goes = (int(bucket) for bucket in buckets_of(keys))
    mine, theirs = bucket_shell._store, RowStore(kernels="numpy")
    for seq, store in ((1, mine), (1, theirs), (2, theirs)):
        store.define(COUNTS)
        store.push([TrainerPush(1, seq, [TablePush("counts", keys, np.ones((2, 2), np.float32))])], step=seq)
    carry = bucket_shell._carry

    def carry_late(effects: Sequence[h.Effect]) -> None:
        assert any(isinstance(effect, h.Reset) for effect in effects)
        assert bucket_shell.refuses(2, 9, [comes]) == []
        mine.take_image(theirs.image(comes))
        carry(effects)

    monkeypatch.setattr(bucket_shell, "_carry", carry_late)
    bucket_shell._take(orders(9, history=2, since=9, owner=2, joining=1))
    assert mine.image(comes).rows["counts"].weights[0, 0] == 2.0
    assert "counts" not in mine.image(goes).rows


@pytest.mark.parametrize("early", [False, True], ids=["served", "about to be served"])
def test_a_bucket_that_comes_under_newer_orders_is_served_no_more(
    bucket_shell: BucketShell, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    carry = bucket_shell._carry

    def another_one_sends(bucket: int) -> None:
        assert bucket_shell.refuses(2, 6, [bucket]) == []

    def carry_late(effects: Sequence[h.Effect]) -> None:
        another_one_sends(5)
        carry(effects)

    if early:
        monkeypatch.setattr(bucket_shell, "_carry", carry_late)
    bucket_shell._take(orders(5))
    sent = bucket_shell.sent()
    if not early:
        another_one_sends(5)
        assert bucket_shell.stopped(sent, np.array([5], np.uint16))
    assert bucket_shell.served[5] == 0 and bucket_shell.served[6] == 1
    assert not bucket_shell.stopped(sent, np.array([6], np.uint16))


def test_a_full_stream_holds_only_what_goes_into_it(bucket_shell: BucketShell) -> None:
    bucket_shell._carry([h.FeedFollowers((5,), (2,), ()), h.FeedFollowers((900,), (3,), ())])
    bucket_shell._to_followers[2].stream._bytes = 11
    assert bucket_shell.fullest(10, np.array([5, 900], np.uint16)) == 2
    assert bucket_shell.fullest(10, np.array([900, 901], np.uint16)) == 0


class Reading:
    """A directory that reads one row; meanwhile something happens."""

    def __init__(self, loaded: Loaded, meanwhile: Callable[[], None]) -> None:
        self._loaded, self._meanwhile = loaded, meanwhile

    def restore(self, run: str, mine: Any, put: Callable[[Loaded], None], *, threads: int) -> str:
        self._meanwhile()
        put(self._loaded)
        return ""


def test_what_is_being_restored_when_the_rows_go_is_nothing_to_those_that_come() -> None:
    key = np.array([11], np.int64)
    bucket = int(buckets_of(key)[0])
    store, around = RowStore(kernels="numpy"), CheckpointTaskDeps()
    store.define(COUNTS)

    def push(seq: int) -> None:
        store.push([TrainerPush(1, seq, [TablePush("counts", key, np.ones((1, 2), np.float32))])], step=seq)

    def value() -> float:
        return float(store.image(bucket).rows["counts"].weights[0, 0])

    push(1)
    rows = store.image(bucket).rows
    checkpoint_task = CheckpointTask(store, None, "job", around, SystemClock())
    checkpoint = CheckpointOrder(3, "restore", "there")
    orders = Orders(0, 1, PlacementMap(), 0, (), Training(), ())

    def starts_over() -> None:
        store.drop([bucket])
        checkpoint_task.reset()
        push(1)
        push(2)

    checkpoint_task._opened = lambda number: Reading(Loaded(bucket >> 6, (bucket,), rows), starts_over)  # type: ignore[assignment, method-assign, return-value]
    checkpoint_task.restore(orders, checkpoint, (bucket,))
    checkpoint_task.restore(orders, checkpoint, (bucket,))  # not begun when the rows go
    checkpoint_task.stop()
    checkpoint_task.start()
    checkpoint_task._thread.join()
    assert value() == 2.0 and around.loaded == []


def test_checkpoints_are_searched_again_when_the_rows_are_gone_again() -> None:
    around = CheckpointTaskDeps()
    checkpoint_task = CheckpointTask(RowStore(kernels="numpy"), None, "job", around, SystemClock())
    orders = Orders(0, 1, PlacementMap(), 0, (), Training(), (), checkpoint=CheckpointOrder(0, "find"))
    for _ in range(2):
        checkpoint_task.reset()
        checkpoint_task.orders(orders)
        checkpoint_task.orders(orders)  # repeated
    checkpoint_task.stop()
    checkpoint_task.start()
    checkpoint_task._thread.join()
    assert around.said == [FoundCheckpoints(0), FoundCheckpoints(0)]


def test_a_search_that_has_failed_may_be_repeated(tmp_path: Path) -> None:
    around = CheckpointTaskDeps()
    checkpoint_task = CheckpointTask(RowStore(kernels="numpy"), PlainFiles(tmp_path), "job", around, SystemClock())
    orders = Orders(0, 1, PlacementMap(), 0, (), Training(), (), checkpoint=CheckpointOrder(0, "find"))
    (tmp_path / "ps").mkdir()
    (tmp_path / "ps" / "job").write_text("")

    def search() -> None:
        checkpoint_task.orders(orders)
        checkpoint_task.orders(orders)  # repeated
        checkpoint_task.stop()
        checkpoint_task.start()
        checkpoint_task._thread.join()

    search()
    (tmp_path / "ps" / "job").unlink()
    search()
    failed, found = around.said
    assert failed.phase == "find" and "cannot read the checkpoint directory" in failed.failed
    assert found == FoundCheckpoints(0)


def marked(tmp_path: Path) -> tuple[RowStore, CheckpointTask, Callable[[str], None]]:
    """A store with a row in each shard, its task, and a function that begins a phase of checkpoint 1; "" abandons
    it."""
    store = RowStore(kernels="numpy")
    store.define(COUNTS)
    keys = np.arange(1000, dtype=np.int64)
    store.push([TrainerPush(1, 1, [TablePush("counts", keys, np.ones((1000, 2), np.float32))])], step=1)
    task = CheckpointTask(store, PlainFiles(tmp_path), "job", CheckpointTaskDeps(), SystemClock())

    def order(phase: str) -> None:
        checkpoint = CheckpointOrder(1, phase) if phase else None
        task.orders(Orders(0, 1, PlacementMap(), 0, (), Training(), (), checkpoint=checkpoint))

    order("mark")
    return store, task, order


def test_after_an_abandoned_checkpoint_no_row_is_copied_before_it_changes(tmp_path: Path) -> None:
    store, task, order = marked(tmp_path)
    assert store._snapshot is not None and store._snapshot.open
    order("")
    assert not store._snapshot.open
    task.stop()


def test_a_part_of_a_checkpoint_that_is_abandoned_meanwhile_is_not_reported_as_written(tmp_path: Path) -> None:
    store, task, order = marked(tmp_path)
    assert store._snapshot is not None
    take, deps = store._snapshot.take, task._deps

    def take_late(shard: int, changed_since: int | None = None) -> Taken:
        if shard == 9:
            order("")
        return take(shard, changed_since)

    store._snapshot.take = take_late  # type: ignore[method-assign]
    order("write")
    task.stop()
    task.start()
    task._thread.join()
    assert isinstance(deps, CheckpointTaskDeps)
    assert "abandoned" in deps.said[-1].failed


class Half(CheckpointTaskDeps):
    """Dependencies of a pserver that owns half of the buckets, or all."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.mine = np.zeros(BUCKETS, np.uint8)
        self.mine[first : first + BUCKETS // 2] = 1

    def owned(self) -> Any:
        return self.mine.copy()


def test_changes_that_came_between_the_owner_s_mark_and_the_replica_s_are_saved(tmp_path: Path) -> None:
    """No trainer pushes gradients then, but rows are evicted, or set by a trainer that is no member yet."""
    spec = TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, eviction=Eviction(unseen_steps=5))
    around, (owner, heir) = (Half(0), Half(BUCKETS // 2)), (store_of("numpy", spec), store_of("numpy", spec))
    tasks = [CheckpointTask(one, PlainFiles(tmp_path), "job", deps, SystemClock())
             for one, deps in zip((owner, heir), around, strict=True)]  # fmt: skip
    keys = np.arange(900, dtype=np.int64)
    keys = keys[buckets_of(keys) < BUCKETS // 2]

    def order(which: int, number: int, phase: str, **more: Any) -> str:
        placement = PlacementMap(history=1)
        checkpoint = CheckpointOrder(number, phase, **more)
        tasks[which].orders(Orders(0, which + 1, placement, 0, (), Training(), (spec,), checkpoint=checkpoint))
        if phase != "mark":
            work = tasks[which]._work.get()
            assert work is not None
            work()
        done = around[which].said[-1]
        assert not done.failed
        return str(done.report)

    owner.push([TrainerPush(1, 1, [part(keys, 1.0)])], step=1, each=heir.apply_piece)
    order(0, 1, "mark")
    owner.sweep("t", step=9, each=heir.apply_piece)
    owner.push([TrainerPush(1, 2, [part(keys[:9], 2.0)])], step=9, each=heir.apply_piece)
    order(1, 1, "mark")
    run = json.loads(order(0, 1, "complete", parts=(order(0, 1, "write"), order(1, 1, "write"))))["run"]
    around[1].mine[:] = 1
    order(1, 2, "mark")
    run = json.loads(order(1, 2, "complete", parts=(order(1, 2, "write", run=run),)))["run"]
    saved = CheckpointDirectory(PlainFiles(tmp_path), "job").read(run, np.ones(BUCKETS, np.uint8))
    found = {int(key): row[0] for one in saved for rows in one.rows.values()
             for key, row in zip(rows.keys, rows.weights, strict=True)}  # fmt: skip
    assert found == dict.fromkeys(keys[:9].tolist(), 2.0)


def rows_in(store: RowStore) -> Rows:
    """All rows of the table that ``marked`` defines."""
    return concat([rows for bucket in range(BUCKETS) if (rows := store.image(bucket).rows.get("counts"))])


@pytest.mark.parametrize("error", [OSError(28, "full"), MemoryError(), RuntimeError("a defect")])
def test_an_error_with_evicted_rows_does_not_end_the_thread_that_restores(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, task, _ = marked(tmp_path)
    monkeypatch.setattr("ps.checkpoint.evicted.EVICTED_BYTES", 100)

    def write(self: EvictedRows, server: int) -> None:
        raise error

    monkeypatch.setattr(EvictedRows, "write", write)
    task.evicted("counts", rows_in(store))
    task.orders(Orders(0, 1, PlacementMap(), 0, (), Training(), (), checkpoint=CheckpointOrder(0, "find")))
    task.stop()
    task.start()
    task._thread.join()
    assert isinstance(task._deps, CheckpointTaskDeps) and task._deps.said[-1] == FoundCheckpoints(0)


def test_evicted_rows_do_not_pile_up_while_something_else_is_being_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, task, _ = marked(tmp_path)
    rows = rows_in(store)
    monkeypatch.setattr("ps.checkpoint.evicted.EVICTED_BYTES", 30_000)
    monkeypatch.setattr("ps.checkpoint.evicted.EVICTED_MOST_BYTES", 100_000)
    for _ in range(50):
        task.evicted("counts", rows)
    assert task._work.qsize() == 1  # type: ignore[attr-defined]
    assert task._directory is not None and task._directory.evicted._bytes <= 100_000
    assert "evicted rows, which take" in caplog.text


def test_evicted_rows_are_written_while_a_checkpoint_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, task, order = marked(tmp_path)
    rows, folder = rows_in(store), tmp_path / "ps" / "job" / "evicted"
    monkeypatch.setattr("ps.checkpoint.evicted.EVICTED_BYTES", 100)
    assert store._snapshot is not None
    take, there = store._snapshot.take, []

    def take_late(shard: int, changed_since: int | None = None) -> Taken:
        if shard == 9:
            task.evicted("counts", rows)
        there.append(folder.exists())
        return take(shard, changed_since)

    store._snapshot.take = take_late  # type: ignore[method-assign]
    order("write")
    work = task._work.get()
    assert work is not None
    work()
    assert there == [False] * 10 + [True] * (SHARDS - 10)


def test_an_orderly_end_does_not_wait_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    store, task, order = marked(tmp_path)
    assert store._snapshot is not None
    take, taken = store._snapshot.take, []

    def take_late(shard: int, changed_since: int | None = None) -> Taken:
        if shard == 9:
            task.stop()
        taken.append(shard)
        return take(shard, changed_since)

    store._snapshot.take = take_late  # type: ignore[method-assign]
    order("write")
    task.evicted("counts", rows_in(store))
    task.start()
    task._thread.join()
    assert taken == list(range(10))
    assert len(list((tmp_path / "ps" / "job" / "evicted" / "counts").iterdir())) == 1


def test_a_pserver_that_leaves_writes_the_evicted_rows_that_it_has_kept_back(tmp_path: Path) -> None:
    store, task, _ = marked(tmp_path)
    task.evicted("counts", rows_in(store))
    task.start()
    task.stop()
    task.finish(60.0)
    (file,) = (tmp_path / "ps" / "job" / "evicted" / "counts").iterdir()
    assert file.stat().st_size > 1000 * 16


def test_rows_that_have_just_made_room_are_written_at_the_end(tmp_path: Path) -> None:
    """No further sweep finds them, not even where the buckets have moved away."""
    spec = TableSpec("t", 2, Optimizer(UpdateRule.ADD), ZEROS, eviction=Eviction(most_rows=64, export=True))
    one = ParameterServer(Setup("a", "job", "secret", kernels="numpy", files=PlainFiles(tmp_path)))
    one.store.define(spec)
    one.store.cap("t", 64)
    came = 0
    for step in range(10):
        keys = np.arange(50 * step, 50 * step + 50)
        came += one.store.push([TrainerPush(1, step, [part(keys, 1.0)])], step=step).applied
    one.checkpoint_task.start()
    one.stop()
    one.checkpoint_task.finish(60.0)
    (file,) = (tmp_path / "ps" / "job" / "evicted" / "t").iterdir()
    data = file.read_bytes()
    (count,) = parse_header(data[: header_bytes(data[:8])], len(data)).entries["t/keys"].shape
    assert count == came - one.store.rows("t") > 100


def test_a_restore_that_does_not_fit_names_need_and_limit() -> None:
    key = np.arange(40_000, dtype=np.int64)
    whole, around = RowStore(kernels="numpy"), CheckpointTaskDeps()
    whole.define(COUNTS)
    whole.push([TrainerPush(1, 1, [TablePush("counts", key, np.ones((40_000, 2), np.float32))])], step=1)
    store = RowStore(kernels="numpy", most_bytes=200_000)
    store.define(COUNTS)
    checkpoint_task = CheckpointTask(store, None, "job", around, SystemClock())
    snapshot = whole.snapshot(1)

    class Everything:
        def restore(self, run: str, mine: Any, put: Callable[[Loaded], None], *, threads: int) -> str:
            for shard in range(SHARDS):
                put(Loaded(shard, tuple(range(64 * shard, 64 * shard + 64)), snapshot.take(shard).rows))
            return ""

    checkpoint_task._opened = lambda number: Everything()  # type: ignore[assignment, method-assign, return-value]
    checkpoint_task.restore(
        Orders(0, 1, PlacementMap(), 0, (), Training(), ()),
        CheckpointOrder(3, "restore", "there"),
        tuple(range(BUCKETS)),
    )
    checkpoint_task.stop()
    checkpoint_task.start()
    checkpoint_task._thread.join()
    (told,) = around.said
    assert told.lasting and around.loaded == []
    assert all(part in told.failed for part in ("4096 buckets", "--pserver-memory allows 200,000", "more pservers"))


def test_secrets_are_not_in_what_is_printed() -> None:
    assert "hidden" not in repr(Setup("a", "job", "hidden"))
    assert "hidden" not in repr(Joined(1, 0, PlacementMap(), 0, (), Training(), (), 0, secret="hidden"))
