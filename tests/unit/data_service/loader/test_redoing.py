"""A trainer's record of its last push, as other trainers read it."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.loader import replay
from data_service.loader.replay import Batch, LostTrainer, RecordRange, Replay
from data_service.loader.unacknowledged import UnacknowledgedBatches
from data_service.manifest import ShardRef
from data_service.protocol.messages import Given
from edl.errors import DataError
from ps.intents import MOST_TEXT

REF = ShardRef(4, "clicks/part-0", 23, 32, 9, 1234)


def test_what_is_said_is_what_is_read() -> None:
    other = replace(REF, index=5, begin=32, end=40, records=8)
    batches = ((RecordRange(REF, 2, 9, True), RecordRange(other, 0, 3)), (RecordRange(other, 3, 7),))
    text = replay.encode("clicks", 1, ((4, 2, False),), batches)
    assert replay.decode(text, "clicks", 1, 17, 3) == LostTrainer(17, 3, {4: (2, False)}, batches)


@pytest.mark.parametrize("name", [one.name for one in fields(ShardRef)])
def test_each_field_of_a_shard_comes_back(name: str) -> None:
    value = "elsewhere" if name == "file" else 77
    ref = replace(REF, **{name: value})  # type: ignore[arg-type]
    found = replay.decode(replay.encode("clicks", 0, (), ((RecordRange(ref, 1, 6),),)), "clicks", 0, 1, 1)
    assert found is not None
    assert found.batches == ((RecordRange(ref, 1, 6),),)


refs = st.builds(
    ShardRef,
    st.integers(0, 9),
    st.sampled_from(["a", "b/ü\udc80", ""]),
    *(st.integers(0, 1 << 61) for _ in range(2)),
    *(st.integers(-1, 9) for _ in range(2)),
)
pieces = st.builds(RecordRange, refs, st.integers(0, 99), st.integers(0, 99), st.booleans())
acks = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans()), unique_by=lambda one: one[0])


@given(st.lists(st.lists(pieces, max_size=4).map(tuple), max_size=4).map(tuple), acks)
def test_any_push_comes_back(batches: tuple[Batch, ...], done: list[tuple[int, int, bool]]) -> None:
    text = replay.encode("clicks", 1, tuple(done), batches)
    found = replay.decode(text, "clicks", 1, 17, 3)
    assert found == LostTrainer(17, 3, {shard: (upto, complete) for shard, upto, complete in done}, batches)
    assert replay.decode(text, "clicks", 2, 17, 3) is replay.decode(text, "other", 1, 17, 3) is None


def test_many_batches_name_each_file_and_each_shard_once() -> None:
    """Of many batches between two pushes, each of records of many shards: pservers take ``MOST_TEXT`` bytes."""
    folder = "s3://some-bucket/with/a/rather/long/path/to/what/was/clicked/2026-11-23"
    open_ = [ShardRef(n, f"{folder}/part-{n // 4:08}.arrow", 100 * n, 100 * n + 100, 100, 1 << 30) for n in range(16)]
    batches = [tuple(RecordRange(ref, n % 100, n % 100 + 1) for ref in open_) for n in range(1000)]
    text = replay.encode("clicks", 0, (), batches)
    assert text.count(folder) == 4
    assert len(text) < MOST_TEXT
    found = replay.decode(text, "clicks", 0, 17, 3)
    assert found is not None and found.batches == tuple(batches)


SAID: dict[str, object] = {
    "set": "clicks",
    "epoch": 0,
    "done": [],
    "files": ["f"],
    "shards": [[4, 0, 0, 9, 9, 100]],
    "batches": [[[0, 2, 9, 1]]],
}


def test_what_is_refused_below_is_wrong_in_one_place() -> None:
    found = replay.decode(json.dumps(SAID), "clicks", 0, 17, 3)
    assert found == LostTrainer(17, 3, {}, ((RecordRange(ShardRef(4, "f", 0, 9, 9, 100), 2, 9, True),),))


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": [[[4, "f", 0, 9, 9, 100, 2, 9, True]]]},
        {"batches": [[[[4, "f", 0, 9, 9, 100], 2, 9, True]]]},
        {"batches": [[[0, 2, 9]]]},
        {"batches": [[[1, 2, 9, True]]]},
        {"batches": [[[-1, 2, 9, True]]]},
        {"batches": [[[False, 2, 9, True]]]},
        {"batches": [[0]]},
        {"batches": 0},
        {"shards": [[4, 1, 0, 9, 9, 100]]},
        {"shards": [[4, -1, 0, 9, 9, 100]]},
        {"shards": [[4, "f", 0, 9, 9, 100]]},
        {"shards": [[4, 0, 0, 9, 9]]},
        {"shards": [[4, 0, None, 9, 9, 100]]},
        {"shards": []},
        {"files": []},
        {"files": 7},
        {"done": [[1, 2]]},
    ],
)
def test_what_is_of_another_shape_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(DataError, match="cannot read the last intent of trainer 17"):
        replay.decode(json.dumps({**SAID, **wrong}), "clicks", 0, 17, 3)


@pytest.mark.parametrize("lacking", ["done", "files", "shards", "batches"])
def test_what_lacks_a_part_is_refused(lacking: str) -> None:
    said = {name: value for name, value in SAID.items() if name != lacking}
    with pytest.raises(DataError, match="cannot read the last intent of trainer 17"):
        replay.decode(json.dumps(said), "clicks", 0, 17, 3)


# --- where the next holder goes on -----------------------------------------------------------------------------------

NEXT = replace(REF, index=5, begin=32, end=132, records=100)
LAST_PUSH = LostTrainer(
    17,
    3,
    {},
    ((RecordRange(REF, 0, 4),), (RecordRange(REF, 4, 9, True), RecordRange(NEXT, 0, 2)), (RecordRange(NEXT, 2, 8),)),
)
"""Three batches, of two shards."""


@pytest.mark.parametrize(
    ("first", "second", "redone"),
    [(0, 0, True), (4, 0, False), (9, 2, False), (9, 8, False)],
    ids=["none", "one", "two", "all"],
)
def test_a_push_of_several_batches_is_used_as_a_whole_though_some_acknowledgements_are_lost(
    first: int, second: int, redone: bool
) -> None:
    """The Master hears of batches one after the other, and of the first only when the whole push is in the rows."""
    leases = [Given(REF, first)] if first < 9 else []
    found = replay.plan([*leases, Given(NEXT, second)], [LAST_PUSH])
    assert found.redos == ([LAST_PUSH] if redone else [])
    assert found.leases == [Given(NEXT, 8)], "no record of the push is read for another one"
    assert ((4, 9, True) in found.acks) is (first == 4)
    assert ((5, 8, False) in found.acks) is (second < 8)


# --- batches that a script has got -----------------------------------------------------------------------------------


def test_batches_of_a_push_count_together() -> None:
    """Whoever dies after the first word about a push has said all of it."""
    batches = UnacknowledgedBatches()
    batches.add(0, ((4, 6, False),))
    batches.add(0, ((4, 9, True), (5, 2, False)))
    batches.add(1, ((5, 3, False),))
    assert batches.take(None) == [(0, ((4, 9, True), (5, 2, False))), (1, ((5, 3, False),))]


def test_a_push_that_is_made_again_waits_for_its_last_batch() -> None:
    batches = UnacknowledgedBatches()
    assert not batches.redoing
    batches.add(0, ((4, 6, False),))
    assert not batches.redoing, "a push of its own goes out when the script says so"
    batches.take(None)
    batches.add(0, (), redo=Replay(17, 3, last=False))
    assert batches.redoing and not batches.redone
    batches.add(0, ((4, 9, True),), redo=Replay(17, 3))
    assert batches.redone and not batches.redoing
