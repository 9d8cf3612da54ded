"""Which records are consumed: every one at most once, and a position fits only the data that it belongs to."""

from __future__ import annotations

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
        ((4, 7, True), "shard 4 of epoch 0 is consumed"),
        ((20, 1, True), "there is no shard 20; there are 20"),
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


takes = st.lists(st.tuples(st.integers(0, 19), st.integers(1, 9), st.booleans()), max_size=40)


@given(takes)
def test_it_survives_being_written(steps: list[tuple[int, int, bool]]) -> None:
    one = ledger(seed=-7, epoch=3)
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
        {"digest": 5},
        {"records": "many"},
    ],
)
def test_a_damaged_one_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(DataError, match="cannot read a position"):
        Ledger.load({**ledger().state_dict(), **change})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"done": "!"}', '{"done": 5}'])
def test_invalid_positions_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="cannot read a position"):
        Ledger.decode(text)
