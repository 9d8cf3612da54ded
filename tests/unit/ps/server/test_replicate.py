"""Copies of buckets: in step before a push is acknowledged, released in order, fenced when orders are older."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edl.adapters.clock import SystemClock
from edl.job_records import Mode, Replication, Training
from ps.hashing import SHARDS, bucket_of, buckets_of
from ps.net.caller import EndpointPeer, FrameCaller, FrameEndpoint, FrameReply
from ps.protocol import messages, replication
from ps.protocol.frames import Frame, FrameOp, pack_head
from ps.rows import BucketImage, ShardChange, TablePush, TrainerPush, no_rows
from ps.server.replicate_out import IMAGES_BYTES, ReplicationStream
from ps.server.server import ParameterServer
from ps.spec import BUCKETS
from ps.store.store import RowStore
from tests.support.ps_servers import (
    ALL,
    COUNTS,
    OPEN,
    SECRET,
    SGD,
    At,
    Boss,
    Plan,
    Pusher,
    Trainer,
    place,
    server,
    tidy,
    until,
)

KEYS = list(range(3000))


@pytest.fixture(autouse=True)
def tidied() -> Iterator[None]:
    """Close what the test left open."""
    yield
    tidy()


class Pair:
    """Two pservers: the first owns all buckets, the second is given copies."""

    def __init__(self, training: Training | None = None, members: tuple[int, ...] = ()) -> None:
        self.servers = {1: server("a"), 2: server("b")}
        self.places = {number: place(one, "ab"[number - 1]) for number, one in self.servers.items()}
        self.bosses = {number: Boss(where) for number, where in self.places.items()}
        training = training or Training()
        self.plan = Plan(self.places, {1: ALL}, joining={2: ALL}, training=training, members=members)

    def begin(self) -> None:
        """Send orders to both."""
        self.all(self.plan)

    def all(self, plan: Plan) -> None:
        """Send orders to all live pservers."""
        self.plan = plan
        for number in plan.places:
            self.bosses[number].tell(plan.orders(number))
        for number in plan.places:
            self.bosses[number].heard(messages.Followed, lambda word: word.version >= plan.version)

    def synced(self, owner: int, buckets: int = BUCKETS) -> None:
        """The owner has said that the other one has everything, under the newest orders."""
        self.bosses[owner].synced(self.plan.since[0], buckets)

    def in_step(self) -> None:
        """The second one is the backup."""
        self.begin()
        self.synced(1)
        self.all(self.plan.next(joining={}, backup={2: ALL}, changed=ALL))

    def kill(self, number: int) -> None:
        """Kill a pserver, and notify the others."""
        self.servers[number].stop()


def count(one: ParameterServer, keys: list[int]) -> list[float]:
    """Counter of each key, from the store."""
    found: dict[int, float] = {}
    for bucket in {bucket_of(key) for key in keys}:
        rows = one.store.image(bucket).rows.get("counts")
        if rows is not None:
            found.update(zip(rows.keys.tolist(), rows.weights[:, 0].tolist(), strict=True))
    return [found.get(key, 0.0) for key in keys]


def test_nothing_acknowledged_is_lost_with_the_owner() -> None:
    pair = Pair()
    pair.begin()
    pusher = Pusher(1, pair.plan)
    for _ in range(5):
        pusher.push(COUNTS, KEYS)  # before, and while, images are made
    pair.synced(1)
    pair.all(pair.plan.next(joining={}, backup={2: ALL}, changed=ALL))
    pusher.plan = pair.plan
    over = threading.Event()

    def push() -> None:
        while not over.is_set():
            pusher.push(COUNTS, KEYS)

    thread = threading.Thread(target=push)
    seen = pusher.acknowledged
    thread.start()
    until(pair.servers[1].bucket_shell.changed, lambda: pusher.acknowledged > seen + 20)
    pair.kill(1)
    heir = pair.plan.next(owner={2: ALL}, backup={}, changed=ALL)
    heir.places = {2: pair.places[2]}
    pair.all(heir)
    pusher.plan = heir
    seen = pusher.acknowledged
    until(pair.servers[2].bucket_shell.changed, lambda: pusher.acknowledged > seen + 3 or not count_up(pair.servers[2]))
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert set(count(pair.servers[2], KEYS)) == {float(pusher.acknowledged)}


def count_up(one: ParameterServer) -> bool:
    """Notify waiting threads shortly after, in place of the usual notification."""
    timer = threading.Timer(0.05, lambda: notify(one))
    timer.daemon = True
    timer.start()
    return True


def notify(one: ParameterServer) -> None:
    with one.bucket_shell.changed:
        one.bucket_shell.changed.notify_all()


@pytest.mark.slow
def test_hand_over_under_load() -> None:
    pair = Pair(members=(1, 2))
    pair.in_step()
    pushers = [Pusher(number, pair.plan) for number in (1, 2)]
    over = threading.Event()

    def push(pusher: Pusher) -> None:
        while not over.is_set():
            pusher.push(COUNTS, KEYS)

    threads = [threading.Thread(target=push, args=(pusher,)) for pusher in pushers]
    for thread in threads:
        thread.start()
    lower, upper = range(1500), range(1500, BUCKETS)
    owners = [{1: lower, 2: upper}, {2: ALL}, {2: lower, 1: upper}, {1: ALL}]
    for owner in owners:
        before, plan = pair.plan, pair.plan
        was = {bucket: number for number, buckets in plan.owner.items() for bucket in buckets}
        now = {bucket: number for number, buckets in owner.items() for bucket in buckets}
        changed = [bucket for bucket in ALL if was[bucket] != now[bucket]]
        backup = {number: [bucket for bucket in ALL if now[bucket] != number] for number in (1, 2)}
        giver = {number: [bucket for bucket in changed if was[bucket] == number] for number in (1, 2)}
        pair.all(before.next(owner=owner, backup=backup, giver=giver, changed=changed))
        version = pair.plan.version
        for number in (1, 2):
            mine = [bucket for bucket in changed if now[bucket] == number]
            if mine:
                took(pair.bosses[number], version, mine)
        for pusher in pushers:
            pusher.plan = pair.plan
        seen = [pusher.acknowledged for pusher in pushers]
        one = pair.servers[1]
        until(
            one.bucket_shell.changed,
            lambda: all(p.acknowledged > s + 2 for p, s in zip(pushers, seen, strict=True)) or not count_up(one),  # noqa: B023
        )
    over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    total = float(sum(pusher.acknowledged for pusher in pushers))
    assert set(count(pair.servers[1], KEYS)) == {total}
    assert set(count(pair.servers[2], KEYS)) == {total}, "the backup has the same"
    assert sum(pusher.moved for pusher in pushers), "nobody was sent elsewhere: this test tests nothing"


def took(boss: Boss, version: int, buckets: list[int]) -> None:
    def all_of_them() -> bool:
        told = [word for word in boss.words if isinstance(word, messages.Took) and word.version >= version]
        return {bucket for word in told for bucket in messages.of_ranges(word.buckets)} >= set(buckets)

    until(boss.changed, all_of_them, "Took")


def test_no_push_is_acknowledged_that_the_lost_copy_should_have() -> None:
    pair = Pair()
    pair.in_step()
    trainer = Trainer(pair.places[1])
    assert trainer.push(1, COUNTS, KEYS).op is FrameOp.OK
    pair.kill(2)
    answer = trainer.push(2, COUNTS, KEYS, wait_s=0.5)
    assert (answer.op, answer.head["for"]) == (FrameOp.WAIT, "copies")
    assert "pserver 2" in answer.head["text"]
    told = pair.bosses[1].heard(messages.Unsynced)
    assert told.follower == 2 and messages.of_ranges(told.buckets) == list(ALL)
    results: list[Any] = []
    again = threading.Thread(target=lambda: results.append(trainer.push(2, COUNTS, KEYS)))
    again.start()
    alone = pair.plan.next(backup={}, changed=ALL)
    alone.places = {1: pair.places[1]}
    pair.all(alone)
    again.join(30)
    assert (results[0].op, results[0].head["again"]) == (FrameOp.OK, len(KEYS))
    assert set(count(pair.servers[1], KEYS)) == {2.0}


def test_a_copy_has_seqs_state_and_counters() -> None:
    pair = Pair()
    momentum = replace(SGD, name="m", optimizer=replace(SGD.optimizer, rule=type(SGD.optimizer.rule).MOMENTUM))
    pair.plan = replace(pair.plan, tables=(COUNTS, SGD, momentum))
    pair.begin()
    trainer = Trainer(pair.places[1], 7)
    trainer.pull(momentum, KEYS, step=3)
    trainer.push(1, momentum, KEYS, 0.5, step=3)
    pair.synced(1)
    trainer.push(2, momentum, KEYS, 0.5, step=4)
    for bucket in range(0, BUCKETS, 97):
        here, there = (pair.servers[number].store.image(bucket) for number in (1, 2))
        assert here.seqs == there.seqs
        assert set(here.rows) == set(there.rows)
        for name, rows in here.rows.items():
            mine, theirs = np.argsort(rows.keys), np.argsort(there.rows[name].keys)
            for column in ("keys", "weights", "state", "updates", "seen"):
                assert np.array_equal(getattr(rows, column)[mine], getattr(there.rows[name], column)[theirs]), column


def test_a_former_owner_is_fenced() -> None:
    pair = Pair()
    pair.in_step()
    trainer = Trainer(pair.places[1])
    trainer.push(1, COUNTS, KEYS)
    heir = pair.plan.next(owner={2: ALL}, backup={}, changed=ALL)
    heir.places = {2: pair.places[2]}
    pair.bosses[2].say(heir.orders(2))  # the first one does not hear of it
    after = Trainer(pair.places[2])
    answer = trainer.push(2, COUNTS, KEYS, wait_s=2.0)
    assert answer.op in (FrameOp.WAIT, FrameOp.MOVED)
    assert after.push(2, COUNTS, KEYS).op is FrameOp.OK
    assert set(count(pair.servers[2], KEYS)) == {2.0}


def test_buckets_without_a_role_are_dropped() -> None:
    pair = Pair()
    pair.in_step()
    Trainer(pair.places[1]).push(1, COUNTS, KEYS)
    assert pair.servers[2].store.rows("counts") == len(KEYS)
    pair.all(pair.plan.next(backup={2: range(100)}, changed=range(100, BUCKETS)))
    left = int((buckets_of(np.array(KEYS)) < 100).sum())
    assert pair.servers[2].store.rows("counts") == left


def test_a_bucket_that_is_stopped_during_a_push_gets_nothing_more_of_it() -> None:
    store = RowStore(kernels="numpy")
    store.define(COUNTS)
    allowed = np.ones(BUCKETS, np.uint8)
    keys = np.arange(20_000)  # more than are worked on under one hold of locks
    parts = [TablePush("counts", keys, np.ones((len(keys), 2), np.float32))]

    def stop(piece: ShardChange) -> None:
        if piece.shard < SHARDS - 1:
            with store.lock(shard=SHARDS - 1):
                allowed[-BUCKETS // SHARDS :] = 0

    pushed = store.push([TrainerPush(1, 1, parts)], step=1, allowed=allowed, each=stop)
    assert pushed.refused and not any(store.image(bucket).rows for bucket in range(BUCKETS - 64, BUCKETS))


def test_evicted_rows_go_from_copies_too() -> None:
    from ps.spec import Eviction

    pair = Pair()
    table = replace(COUNTS, eviction=Eviction(unseen_steps=5))
    pair.plan = replace(pair.plan, tables=(table,))
    pair.in_step()
    trainer = Trainer(pair.places[1])
    trainer.push(1, table, KEYS[:1000], step=1)
    trainer.push(2, table, KEYS[1000:], step=10)
    pair.servers[1].eviction_task.sweep("counts")
    assert trainer.push(3, table, KEYS[1000:], step=10).op is FrameOp.OK  # behind the removal, in the same stream
    assert pair.servers[1].store.rows("counts") == pair.servers[2].store.rows("counts") == 2000


@pytest.mark.parametrize(("most_rows", "unseen_steps"), [(2000, 0), (0, 5)])
def test_copies_are_never_evicted_where_they_are_copies(most_rows: int, unseen_steps: int) -> None:
    from ps.spec import Eviction

    table = replace(COUNTS, eviction=Eviction(most_rows=most_rows, unseen_steps=unseen_steps))
    first, second = range(BUCKETS // 2), range(BUCKETS // 2, BUCKETS)
    pair = Pair()
    pair.plan = Plan(pair.places, {1: first, 2: second}, joining={2: first, 1: second}, tables=(table,))
    pair.begin()
    pair.synced(1, len(first))
    pair.synced(2, len(second))
    pair.all(pair.plan.next(joining={}, backup={2: first, 1: second}, changed=ALL))
    trainer = Trainer(pair.places[1])
    mine = [key for key in KEYS if bucket_of(key) in first]
    assert trainer.push(1, table, mine[:800], step=1).op is FrameOp.OK
    other = Trainer(pair.places[2], number=2)
    others = [key for key in KEYS if bucket_of(key) in second]
    assert other.push(1, table, others[:800], step=20).op is FrameOp.OK  # steps are far on there
    pair.servers[2].eviction_task.sweep("counts")
    assert count(pair.servers[2], mine[:800]) == [1.0] * 800, "it is the owner who lets them go"
    pair.servers[1].eviction_task.sweep("counts")
    assert pair.servers[1].store.rows("counts") == 1600, "there is room for all; nothing is old for this one"
    assert trainer.push(2, table, mine[800:820], step=20).op is FrameOp.OK
    pair.servers[1].eviction_task.sweep("counts")
    assert trainer.push(3, table, mine[800:820], step=20).op is FrameOp.OK  # behind the removal, in the same stream
    assert count(pair.servers[1], mine) == count(pair.servers[2], mine)


def test_an_async_copy_holds_acknowledgements_up_when_it_lags() -> None:
    one = server()
    held, frames = threading.Event(), []

    def handle(peer: EndpointPeer, frame: Frame) -> FrameReply:
        if frame.op is FrameOp.STREAM:
            frames.append(frame.json()["items"])
            if any(item[0] == "piece" for item in frames[-1]):
                held.wait(30)
        return FrameReply()

    slow = FrameEndpoint(handle, secret=SECRET)
    slow.start("127.0.0.1")
    OPEN.append(slow)  # type: ignore[arg-type]
    training = Training(Mode.ASYNC, replication=Replication.ASYNC, lag_s=0.05)
    places = {1: place(one), 2: At("b", slow.host, slow.port, slow.path, slow.machine)}
    boss = Boss(places[1])
    plan = Plan(places, {1: ALL}, joining={2: ALL}, training=training)
    boss.say(plan.orders(1))
    boss.heard(messages.Synced)
    until(
        boss.changed,
        lambda: (
            sum(len(messages.of_ranges(w.buckets)) for w in boss.words if isinstance(w, messages.Synced)) >= BUCKETS
        ),
    )
    boss.say(plan.next(joining={}, backup={2: ALL}, changed=ALL).orders(1))
    trainer = Trainer(places[1])
    seq, answer = 1, trainer.push(1, COUNTS, [1], wait_s=0.3)
    while answer.op is FrameOp.OK:
        seq += 1
        answer = trainer.push(seq, COUNTS, [1], wait_s=0.3)
    assert answer.op is FrameOp.WAIT and answer.head["for"] == "copies"
    assert max(stream.lag_s for stream in one.bucket_shell.streams()) > 0.05
    held.set()
    assert trainer.push(seq, COUNTS, [1]).op is FrameOp.OK


def test_streams_that_are_full_hold_pushes_up() -> None:
    one = server()
    held = threading.Event()

    def handle(peer: EndpointPeer, frame: Frame) -> FrameReply:
        if frame.op is FrameOp.STREAM and any(item[0] == "piece" for item in frame.json()["items"]):
            held.wait(30)
        return FrameReply()

    slow = FrameEndpoint(handle, secret=SECRET)
    slow.start("127.0.0.1")
    OPEN.append(slow)  # type: ignore[arg-type]
    places = {1: place(one), 2: At("b", slow.host, slow.port, slow.path, slow.machine)}
    boss = Boss(places[1])
    boss.say(Plan(places, {1: ALL}, joining={2: ALL}).orders(1))
    until(
        boss.changed,
        lambda: (
            sum(len(messages.of_ranges(w.buckets)) for w in boss.words if isinstance(w, messages.Synced)) >= BUCKETS
        ),
    )
    one.handlers.stream_bytes = 1000
    trainer = Trainer(places[1])
    assert trainer.push(1, COUNTS, KEYS, wait_s=0.3).op is FrameOp.WAIT
    answer = trainer.push(2, COUNTS, KEYS, wait_s=0.3)
    assert answer.op is FrameOp.BUSY and "replicas lag behind" in answer.head["text"] and answer.head["after_s"] > 0
    held.set()
    assert trainer.push(2, COUNTS, KEYS).op is FrameOp.OK


# --- items and streams ---


def pieces() -> list[ShardChange]:
    """The pieces of a push of two trainers."""
    store = RowStore(kernels="numpy")
    store.define(COUNTS)
    store.define(SGD)
    keys = np.arange(500)
    part = TablePush("sgd", keys, np.ones((500, 4), np.float32))
    other = TablePush("counts", keys[:250], np.ones((250, 2), np.float32))
    found: list[ShardChange] = []
    store.push([TrainerPush(1, 4, [part]), TrainerPush(2, 9, [other])], step=3, each=found.append)
    return found


def test_items_go_and_come() -> None:
    sent: list[tuple[int, replication.Content]] = [(7, piece) for piece in pieces()]
    sent.append((8, replication.ReleaseItem((1, 2, 3, 700))))
    sent.append((9, BucketImage(bucket_of(3), {5: 6}, {"sgd": pieces()[0].rows["sgd"]})))
    sent.append((9, ShardChange(3, (), np.array([200], np.uint16), {}, {"sgd": np.array([17, -4])})))
    heads, arrays = replication.pack(sent)
    body = memoryview(b"".join(bytes(memoryview(array).cast("B")) for array in arrays))
    came = list(replication.unpack(heads, body))
    assert [version for version, _ in came] == [version for version, _ in sent]
    for (_, mine), (_, theirs) in zip(sent, came, strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, replication.ReleaseItem):
            assert mine == theirs
            continue
        assert isinstance(theirs, ShardChange | BucketImage)
        assert {name: rows.keys.tolist() for name, rows in mine.rows.items()} == {
            name: rows.keys.tolist() for name, rows in theirs.rows.items()
        }
        if isinstance(mine, ShardChange) and isinstance(theirs, ShardChange):
            assert [(t, s, b.tolist()) for t, s, b in mine.pushes] == [(t, s, b.tolist()) for t, s, b in theirs.pushes]
            assert {n: k.tolist() for n, k in mine.removed.items()} == {
                n: k.tolist() for n, k in theirs.removed.items()
            }
            assert mine.buckets.tolist() == theirs.buckets.tolist()


def test_a_part_of_a_piece() -> None:
    keep = np.zeros(BUCKETS, np.bool_)
    keep[::2] = True
    for piece in pieces():
        part = replication.part_of(piece, keep)
        assert all((buckets_of(rows.keys) % 2 == 0).all() for rows in part.rows.values())
        assert set(part.buckets.tolist()) == {bucket for bucket in piece.buckets.tolist() if bucket % 2 == 0}
        rest = replication.part_of(piece, ~keep)
        for name, rows in piece.rows.items():
            assert len(rows) == len(part.rows[name]) + len(rest.rows[name])


class Owner:
    """The sending side of a stream: creates images of one size, and counts them."""

    def __init__(self, where: At) -> None:
        self.where = where
        self.stream: ReplicationStream | None = None
        self.history = 1
        self.images: list[int] = []
        self.got: list[int] = []
        self.marks: list[int] = []
        self.said: list[str] = []
        self.changed = threading.Condition()
        self.most = 0
        self._rows = pieces()[0].rows["sgd"]

    def connect(self, follower: int) -> FrameCaller:
        from ps.protocol.handshake import SERVER, CallerHello

        return FrameCaller.connect(self.where, CallerHello(SERVER, 1, "a"), secret=SECRET, deadline_s=5)

    def take_image(self, follower: int, bucket: int, copy: int) -> None:
        assert self.stream is not None
        rows = self._rows.take(np.zeros(200_000, np.intp))
        self.stream.put(BucketImage(bucket, {}, {"sgd": rows}), 1, copy)
        self.images.append(bucket)
        self.most = max(self.most, self.stream.queued_bytes)

    def fenced(self, follower: int, version: int, buckets: Any) -> None:
        self.tell(f"fenced {list(buckets)} by {version}")

    def failed(self, what: str) -> None:
        self.tell(f"failed: {what}")

    def acked(self, follower: int, images: dict[int, list[int]], marks: Any) -> None:
        with self.changed:
            self.got += [bucket for some in images.values() for bucket in some]
            self.marks += marks
            self.changed.notify_all()

    def lost(self, follower: int, why: str) -> None:
        self.tell("lost")

    def made(self, follower: int) -> None:
        self.tell("made")

    def tell(self, what: str) -> None:
        with self.changed:
            self.said.append(what)
            self.changed.notify_all()


@pytest.fixture
def listening() -> Iterator[Callable[..., At]]:
    """Creates endpoints that accept streams."""
    endpoints = []

    def make(handler: Callable[[EndpointPeer, Frame], FrameReply], port: int = 0) -> At:
        endpoint = FrameEndpoint(handler, secret=SECRET)
        endpoint.start("127.0.0.1", port)
        endpoints.append(endpoint)
        return At("b", endpoint.host, endpoint.port)

    yield make
    for endpoint in endpoints:
        endpoint.stop()


def test_few_images_are_under_way_and_the_newest_copy_goes_first(listening: Callable[..., At]) -> None:
    go = threading.Event()

    def handle(peer: EndpointPeer, frame: Frame) -> FrameReply:
        go.wait(30)
        return FrameReply()

    owner = Owner(listening(handle))
    owner.stream = stream = ReplicationStream(2, owner, SystemClock())
    stream.copy(1, range(10))
    stream.copy(2, range(100, 105))
    go.set()
    until(owner.changed, lambda: len(owner.got) == 15)
    assert owner.images[:5] == list(range(100, 105))
    assert owner.most <= IMAGES_BYTES + 12_000_000
    stream.mark(5)
    until(owner.changed, lambda: owner.marks == [5])
    stream.close()


def test_frames_hold_no_more_items_than_fit_into_their_heads(listening: Callable[..., At]) -> None:
    """In mode sync a piece names all trainers; in jobs with many tables it names these."""
    go, some = threading.Event(), np.array([5], np.uint16)
    table = no_rows(1, 0)

    def handle(peer: EndpointPeer, frame: Frame) -> FrameReply:
        go.wait(30)
        return FrameReply()

    owner = Owner(listening(handle))
    owner.stream = stream = ReplicationStream(2, owner, SystemClock())
    for seq in range(1 << 40, (1 << 40) + 500):
        pushes = tuple((trainer, seq, some) for trainer in range(1, 300))
        stream.put(ShardChange(0, pushes, some, {"x" * 90 + str(number): table for number in range(20)}), 1)
    go.set()
    stream.mark(1)
    until(owner.changed, lambda: owner.marks == [1] or owner.said)
    assert owner.said == []
    stream.close()


def test_a_stream_that_breaks_is_made_again_when_it_is_asked_for(listening: Callable[..., At]) -> None:
    peers: list[EndpointPeer] = []

    def handle(peer: EndpointPeer, frame: Frame) -> FrameReply:
        peers.append(peer)
        return FrameReply()

    owner = Owner(listening(handle))
    owner.stream = stream = ReplicationStream(2, owner, SystemClock())
    life, first = stream.put(pieces()[0], 1)
    stream.mark(1)
    until(owner.changed, lambda: owner.marks == [1])
    assert stream.has((life, first)) and stream.has(None)
    peers[-1].hang_up()
    until(owner.changed, lambda: owner.said == ["lost"])
    assert not stream.up and stream.put(pieces()[0], 1) == (-1, 0)
    assert not stream.has((life, first)) and not stream.has((-1, 0)) and not stream.has(None)
    stream.again()
    until(owner.changed, lambda: owner.said == ["lost", "made"])
    again, number = stream.put(pieces()[0], 1)
    assert again != life and stream.has((life, first)) and not stream.has((again, number + 1))
    stream.mark(2)
    until(owner.changed, lambda: owner.marks == [1, 2])
    stream.close()
    assert SHARDS == 64


def test_what_was_refused_is_said_before_it_is_acknowledged(listening: Callable[..., At]) -> None:
    def handle(peer: EndpointPeer, frame: Frame) -> FrameReply:
        return (
            FrameReply(FrameOp.OK, pack_head({"fenced": [3], "version": 8})) if frame.json()["items"] else FrameReply()
        )

    owner = Owner(listening(handle))
    owner.stream = stream = ReplicationStream(2, owner, SystemClock())
    stream.put(pieces()[0], 1)
    stream.mark(1)
    until(owner.changed, lambda: owner.marks == [1])
    assert owner.said == ["fenced [3] by 8"]
    stream.close()
