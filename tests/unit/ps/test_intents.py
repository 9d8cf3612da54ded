"""Push intents: one place per trainer that declares, fences and is copied; and what becomes of numbers of the dead."""

from __future__ import annotations

import numpy as np
import pytest

from edl.errors import ProtocolError
from edl.master.service import Caller
from edl.types import NodeId
from ps.coordinator.membership import Membership
from ps.intents import MOST_TEXT, Intent, IntentFenced, Intents, home
from ps.protocol.frames import MOST_HEAD, pack_head
from ps.protocol.replication import pack, unpack
from ps.rows import BucketImage, ShardChange, TablePush, TrainerPush
from ps.spec import BUCKETS, Initial, InitMethod, Optimizer, TableSpec, UpdateRule
from ps.store.store import REMEMBERED, RowStore

TABLE = TableSpec("t", 1, Optimizer(UpdateRule.SGD, lr=1.0), Initial(InitMethod.ZEROS))


def store() -> RowStore:
    made = RowStore(kernels="numpy")
    made.define(TABLE)
    return made


def push(to: RowStore, trainer: int, seq: int, keys: range) -> int:
    part = TablePush("t", np.array(keys), np.ones((len(keys), 1), np.float32))
    return to.push([TrainerPush(trainer, seq, [part])], step=1).fresh


def test_the_last_declaration_counts_until_the_fence() -> None:
    intents = Intents()
    assert intents.declare(5, 1, "one") == Intent(1, "one")
    assert intents.declare(5, 2, "two") == Intent(2, "two")
    assert intents.declare(5, 1, "late") == Intent(2, "two"), "a request that was under way for long"
    assert intents.fence(5) == Intent(2, "two", True) == intents.fence(5)
    with pytest.raises(IntentFenced):
        intents.declare(5, 3, "three")
    assert intents.declare(6, 1, "another") == Intent(1, "another")
    assert intents.fence(7) == Intent(-1, "", True), "who has never said anything pushes nothing either"


def test_a_copy_never_unfences() -> None:
    intents = Intents()
    intents.take({5: Intent(3, "three", True)})
    intents.take({5: Intent(4, "four")})
    assert intents.of(home(5)) == {5: Intent(3, "three", True)}
    mask = np.zeros(BUCKETS, np.bool_)
    mask[home(5)] = True
    intents.drop(mask)
    assert not intents.of(home(5))


def test_they_travel_with_pieces_and_images() -> None:
    told = {5: Intent(2, 'a "text" with ü', True)}
    bucket = home(5)
    contents: list[ShardChange | BucketImage] = [
        ShardChange(bucket // 64, (), np.array([bucket], np.uint16), intents=told),
        BucketImage(bucket, {5: 2}, {}, told),
    ]
    heads, arrays = pack([(1, one) for one in contents])
    body = b"".join(bytes(memoryview(one).cast("B")) for one in arrays)
    for (_, found), sent in zip(unpack(heads, memoryview(body)), contents, strict=True):
        assert isinstance(found, ShardChange | BucketImage) and found.intents == sent.intents == told
        assert not isinstance(sent, BucketImage) or (isinstance(found, BucketImage) and found.seqs == sent.seqs)


def test_numbers_of_many_trainers_fit_into_a_frame() -> None:
    seqs = {trainer: 1 << 40 | trainer for trainer in range(1, 5000)}
    images = [BucketImage(bucket, seqs, {}, {}) for bucket in range(64)]
    heads, arrays = pack([(1, one) for one in images])
    assert len(pack_head({"items": heads})) < MOST_HEAD // 100
    body = memoryview(b"".join(bytes(memoryview(one).cast("B")) for one in arrays))
    assert [one for _, one in unpack(heads, body)] == images


def test_long_texts_of_many_trainers_fit_into_a_frame() -> None:
    bucket = home(5)
    many = [
        ShardChange(0, (), np.array([bucket], np.uint16), intents={one: Intent(7, 2400 * "t")}) for one in range(512)
    ]
    many.append(ShardChange(0, (), np.array([bucket], np.uint16), intents={5: Intent(1, MOST_TEXT * "u")}))
    heads, arrays = pack([(1, one) for one in many])
    assert len(pack_head({"items": heads})) < MOST_HEAD // 4
    body = memoryview(b"".join(bytes(memoryview(one).cast("B")) for one in arrays))
    assert [one for _, one in unpack(heads, body) if isinstance(one, ShardChange)][-1].intents == many[-1].intents
    with pytest.raises(ProtocolError, match="is truncated"):
        list(unpack(heads, body[:-8]))


def test_a_push_of_the_dead_is_completed_once() -> None:
    """After its trainer has been forgotten, its number still tells which buckets have it; also in a copy."""
    here = store()
    push(here, 5, 1, range(0, 200))
    push(here, 5, 2, range(0, 100))
    here.forget(5)
    copy = store()
    for bucket in range(BUCKETS):
        copy.take_image(here.image(bucket))
    for one in (here, copy):
        assert push(one, 5, 2, range(0, 100)) == 0
        out = np.empty((200, 1), np.float32)
        one.pull("t", np.arange(200), out, step=1, insert=False)
        assert (out[:100] == -2).all() and (out[100:] == -1).all()


def test_only_so_many_of_the_dead_are_remembered() -> None:
    here = store()
    for trainer in range(1, REMEMBERED + 3):
        push(here, trainer, 1, range(3))
        with here.lock(home(trainer)):
            here.intents.declare(trainer, 1, "text")
        here.forget(trainer)
        here.forget(trainer)
    assert len(here._seqs) == REMEMBERED
    assert 1 not in here.intents.of(home(1)) and 3 in here.intents.of(home(3))
    assert push(here, 2, 1, range(3)) == 3 and push(here, 3, 1, range(3)) == 0


def test_a_push_that_others_followed_is_completed_once_as_well() -> None:
    """The last one that a dead trainer declared need not be its last: pushes that carry no records declare nothing."""
    here = store()
    push(here, 5, 10, range(100))
    push(here, 5, 11, range(5))
    here.forget(5)
    assert push(here, 5, 10, range(100)) == 0


def test_where_more_were_lost_together_more_are_remembered() -> None:
    here, people = store(), Membership()
    many = [people.join(Caller(NodeId("n"), slot), str(slot), "")[0].number for slot in range(REMEMBERED + 44)]
    for trainer in many:
        push(here, trainer, 1, range(3))
        people.lose([trainer])  # one by one
        here.forget(trainer, max(REMEMBERED, len(people.revoked)))
    assert people.revoked == tuple(many)
    assert [push(here, trainer, 1, range(3)) for trainer in many] == [0] * len(many)
    again = Membership()
    again.decode(people.encode())
    last, _ = again.join(Caller(NodeId("n"), 0), "later", "")
    again.lose([last.number])
    assert again.revoked == (*many[1:], last.number)
