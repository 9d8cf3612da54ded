"""Words between Master, pservers and trainers: what is written is read again, and nothing else is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.errors import ProtocolError
from edl.job_records import Mode, Training
from ps.protocol import messages
from ps.spec import BUCKETS, TableSpec

PLACEMENT = messages.PlacementMap(
    3, 2, (messages.PserverAddress(1, "servers/a-0", "host", 7, "path", "machine"),), messages.pack([1] * BUCKETS)
)
WORDS = [
    messages.Orders(
        0, 1, PLACEMENT, 4, (messages.TrainerMember(2, "a/0", 9),), Training(Mode.SYNC), (TableSpec("t", 8),)
    ),
    messages.PserverHello("servers/a-0", 1, 0, messages.pack(bytes(BUCKETS)), 1 << 30),
    messages.OrdersChanged(0, 1, 3, 4, 5, (messages.TrainerMember(2, "a/0", 9),), (7, 8), PLACEMENT, revoked=(7,)),
    messages.OrdersChanged(
        0, 1, 3, 4, 5, tables=(TableSpec("t", 8),), checkpoint=messages.CheckpointOrder(1, "mark"), go=True
    ),
    messages.GetOrders(3),
    messages.Followed(3),
    messages.Synced(3, 2, ((0, 5), (9, 10))),
    messages.Unsynced(3, 2, ((0, 5),)),
    messages.Took(3, ((0, 4096),)),
    messages.CheckpointPhaseDone(4, "write", "", "{}"),
    messages.FoundCheckpoints(
        4, (messages.FoundCheckpoint("checkpoint-4", 4, 100, (TableSpec("t", 8),)),), ("checkpoint-5: no manifest",)
    ),
    messages.PserverLoad(1, 2, 3, 4, 5, 6, 7, 0.5, ((1, 2),)),
    messages.Join("nonce", (TableSpec("t", 8),)),
    messages.SetLr(1, messages.LrHold(0, 0.5, "t"), 6),
    messages.LrSet(6),
    messages.AtCheckpoint(4, 100, '{"a": 1}'),
    messages.DataNamed(4, (("train", "ledger"),)),
    messages.Joined(1, 0, PLACEMENT, 4, (), Training(), (), 5, "", "secret"),
    messages.PlacementUpdate(0, PLACEMENT, 4, ()),
    messages.PlacementChanged(0, PLACEMENT),
    messages.MembersChanged(0, 3, 5, (messages.TrainerMember(2, "a/0", 9),), (7,)),
    messages.RequestRefused("table", "dim 16 here, 8 there", 3),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_round_trip(word: object) -> None:
    assert messages.decode(messages.encode(word)) == word


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"word":"Nothing"}', '{"word":"Synced","version":"three"}', "\x00"])
def test_anything_else_is_named(text: str) -> None:
    with pytest.raises(ProtocolError, match="not a message of the parameter servers"):
        messages.decode(text)


@given(st.lists(st.integers(-1, 32767), max_size=50))
def test_numbers_by_bucket(numbers: list[int]) -> None:
    assert list(messages.unpack(messages.pack(numbers), len(numbers))) == numbers


def test_versions_by_bucket_may_be_large() -> None:
    assert list(messages.unpack(messages.pack([1 << 30] * 4, "i"), 4, "i")) == [1 << 30] * 4


@pytest.mark.parametrize("text", ["", "!!!", messages.pack([1, 2, 3]), "AAAA"])
def test_a_list_of_another_length_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="list of numbers by bucket"):
        messages.unpack(text)


@given(st.sets(st.integers(0, BUCKETS - 1)))
def test_ranges(buckets: set[int]) -> None:
    ranges = messages.to_ranges(buckets)
    assert messages.of_ranges(ranges) == sorted(buckets)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def test_ranges_from_outside_are_cut() -> None:
    assert messages.of_ranges(((-5, 2), (6, 99)), 8) == [0, 1, 6, 7]
