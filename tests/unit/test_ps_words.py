"""Words between Master, pservers and trainers: what is written is read again, and nothing else is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.errors import ProtocolError
from ps import words
from ps.spec import BUCKETS, Mode, TableSpec, Training

CHART = words.Chart(3, 2, (words.Server(1, "servers/a-0", "host", 7, "path", "machine"),), words.pack([1] * BUCKETS))
WORDS = [
    words.Orders(0, 1, CHART, 4, (words.Member(2, "a/0", 9),), Training(Mode.SYNC), (TableSpec("t", 8),)),
    words.Hello("servers/a-0", 1, 0, words.pack(bytes(BUCKETS)), 1 << 30),
    words.OrdersChanged(0, 1, 3, 4, 5, (words.Member(2, "a/0", 9),), (7, 8), CHART, revoked=(7,)),
    words.OrdersChanged(0, 1, 3, 4, 5, tables=(TableSpec("t", 8),), cut=words.Cut(1, "mark"), go=True),
    words.OrdersPlease(3),
    words.Followed(3),
    words.Synced(3, 2, ((0, 5), (9, 10))),
    words.Unsynced(3, 2, ((0, 5),)),
    words.Took(3, ((0, 4096),)),
    words.CutDone(4, "write", "", "{}"),
    words.Found(4, (words.FoundCut("cut-4", 4, 100, (TableSpec("t", 8),)),), ("cut-5: no marker",)),
    words.Load(1, 2, 3, 4, 5, 6, 7, 0.5, ((1, 2),)),
    words.Join("nonce", (TableSpec("t", 8),)),
    words.SetLr(1, words.LrHold(0, 0.5, "t")),
    words.AtCut(4, 100, '{"a": 1}'),
    words.DataNamed(4, (("train", "ledger"),)),
    words.Joined(1, 0, CHART, 4, (), Training(), (), 5, "", "secret"),
    words.Charted(0, CHART, 4, ()),
    words.Placed(0, CHART),
    words.Counted(0, 3, 5, (words.Member(2, "a/0", 9),), (7,)),
    words.Refused("table", "dim 16 here, 8 there", 3),
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: type(word).__name__)
def test_round_trip(word: object) -> None:
    assert words.decode(words.encode(word)) == word


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"word":"Nothing"}', '{"word":"Synced","version":"three"}', "\x00"])
def test_anything_else_is_named(text: str) -> None:
    with pytest.raises(ProtocolError, match="not a word of the parameter servers"):
        words.decode(text)


@given(st.lists(st.integers(-1, 32767), max_size=50))
def test_numbers_by_bucket(numbers: list[int]) -> None:
    assert list(words.unpack(words.pack(numbers), len(numbers))) == numbers


def test_versions_by_bucket_may_be_large() -> None:
    assert list(words.unpack(words.pack([1 << 30] * 4, "i"), 4, "i")) == [1 << 30] * 4


@pytest.mark.parametrize("text", ["", "!!!", words.pack([1, 2, 3]), "AAAA"])
def test_a_list_of_another_length_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="list of numbers by bucket"):
        words.unpack(text)


@given(st.sets(st.integers(0, BUCKETS - 1)))
def test_ranges(buckets: set[int]) -> None:
    ranges = words.to_ranges(buckets)
    assert words.of_ranges(ranges) == sorted(buckets)
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def test_ranges_from_outside_are_cut() -> None:
    assert words.of_ranges(((-5, 2), (6, 99)), 8) == [0, 1, 6, 7]
