"""Which records are consumed: every one at most once, and a position fits only the data that it belongs to."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.ledger import Ledger
from edl.errors import DataError


def ledger(shards: int = 20, **options: int) -> Ledger:
    return Ledger("d" * 32, shards, **options)  # type: ignore[arg-type]


def test_records_are_taken_in_order() -> None:
    one = ledger()
    assert one.take(3, 10, False) == 10
    assert one.take(3, 25, False, begin=10) == 15
    assert (one.count(3), one.is_done(3), one.records) == (25, False, 25)
    assert one.take(3, 30, True) == 5
    assert (one.count(3), one.is_done(3), one.done_shards, one.records, one.partial) == (0, True, 1, 30, {})
    assert [shard for shard in range(20) if one.is_done(shard)] == [3]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, 5, False), "10 records are consumed"),
        ((3, 20, False, 9), "records 9 to 20 would count twice or leave a gap"),
        ((3, 20, False, 11), "leave a gap"),
        ((3, 9, False), "10 records are consumed, so records 10 to 9"),
        ((4, 7, True), "shard 4 of epoch 0 is consumed"),
        ((20, 1, True), "there is no shard 20; there are 20"),
        ((-1, 1, True), "there is no shard -1; there are 20"),
    ],
)
def test_what_counts_twice_is_refused(arguments: tuple[int, int, bool], text: str) -> None:
    one = ledger()
    one.take(3, 10, False)
    one.take(4, 7, True)
    before = one.copy()
    with pytest.raises(DataError, match=text):
        one.take(*arguments)
    assert one == before


def test_what_is_said_again_counts_once_and_nothing_begins_a_shard_with_no_record() -> None:
    one = ledger()
    one.take(3, 10, False)
    assert one.take(3, 10, False) == 0 and one.take(4, 0, False) == 0
    assert (one.records, one.partial) == (10, {3: 10})


@pytest.mark.parametrize("shard", [-1, 20])
def test_no_shard_beyond_the_last_is_done_or_begun(shard: int) -> None:
    with pytest.raises(DataError, match="there is no shard"):
        ledger().is_done(shard)
    with pytest.raises(DataError, match="there is no shard"):
        ledger().count(shard)


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"shuffle": False}, {"shards": 19}])
def test_positions_are_equal_if_everything_is(other: dict[str, int]) -> None:
    assert ledger() == ledger() != ledger(**other)
    begun, done = ledger(), ledger()
    begun.take(3, 10, False), done.take(3, 10, True)
    assert len({repr(one) for one in (ledger(), begun, done)}) == 3
    assert ledger() != begun != done != ledger() != "a position"


def test_a_copy_is_equal_and_goes_its_own_way() -> None:
    one = ledger(seed=5, epoch=2, shuffle=False)
    one.take(3, 10, False), one.take(4, 7, True)
    other = one.copy()
    assert other == one
    other.take(3, 12, False), other.take(5, 1, True)
    assert (one.partial, one.is_done(5), one.records) == ({3: 10}, False, 17)


@pytest.mark.parametrize("shards", [1, 7, 8, 9, 16])
def test_an_epoch_begins_with_nothing_done(shards: int) -> None:
    one = ledger(shards)
    for shard in range(shards):
        one.take(shard, 2, True)
    assert one.done_shards == shards and Ledger.decode(one.encode()) == one
    one.next_epoch()
    assert not any(one.is_done(shard) for shard in range(shards))
    assert one == ledger(shards, epoch=1)


def test_a_longer_list_keeps_what_is_consumed() -> None:
    one = ledger(7)
    one.take(3, 10, True), one.take(6, 4, False)
    one.extend(20, "e" * 32)
    assert (one.shards, one.digest, one.count(6)) == (20, "e" * 32, 4)
    assert [shard for shard in range(20) if one.is_done(shard)] == [3]
    one.extend(20, "e" * 32)
    assert Ledger.decode(one.encode()) == one
    with pytest.raises(DataError, match="among 20 shards cannot become one among 19"):
        one.extend(19, "f" * 32)


takes = st.lists(st.tuples(st.integers(0, 19), st.integers(1, 9), st.booleans()), max_size=40)


@given(takes, st.booleans())
def test_it_survives_being_written(steps: list[tuple[int, int, bool]], shuffle: bool) -> None:
    one = ledger(seed=-7, epoch=3, shuffle=shuffle)
    for shard, more, complete in steps:
        if not one.is_done(shard):
            one.take(shard, one.count(shard) + more, complete)
    assert Ledger.load(one.state_dict()) == one
    assert Ledger.decode(one.encode()) == one
    assert set(map(type, one.state_dict().values())) <= {int, str, bytes, list}
    assert one.done_shards == sum(one.is_done(shard) for shard in range(20))
    copy = one.copy()
    one.next_epoch()
    assert (one.epoch, one.records, one.done_shards, one.partial) == (4, 0, 0, {})
    assert copy == Ledger.decode(copy.encode())


def test_it_belongs_to_one_set_in_one_order() -> None:
    one = ledger(seed=3)
    one.belongs("d" * 32, 20, 3, True)
    with pytest.raises(DataError, match="restore the same files"):
        one.belongs("e" * 32, 20, 3, True)
    with pytest.raises(DataError, match="seed=3; now it is shuffle=True, seed=4"):
        one.belongs("d" * 32, 20, 4, True)
    with pytest.raises(DataError, match="shuffle=False"):
        one.belongs("d" * 32, 20, 3, False)
    ledger(seed=3, shuffle=False).belongs("d" * 32, 20, 4, False)  # the seed of no order


@pytest.mark.parametrize(
    "change",
    [
        {"version": 9},
        {"shards": 21 + 8},
        {"shards": -1},
        {"partial": [1]},
        {"partial": [20, 1]},
        {"partial": [2, 0]},
        {"done": b"junk"},
        {"done": zlib.compress(bytes(2))},
        {"done": zlib.compress(b"\0\0\x10")},
        {"done": zlib.compress(b"\4\0\0"), "partial": [2, 1]},
        {"digest": 5},
        {"records": "many"},
        {"records": 1.5},
        {"epoch": -1},
    ],
)
def test_a_damaged_one_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(DataError, match="cannot read a position"):
        Ledger.load({**ledger().state_dict(), **change})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"done": "!"}', '{"done": 5}'])
def test_invalid_positions_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="cannot read a position"):
        Ledger.decode(text)
