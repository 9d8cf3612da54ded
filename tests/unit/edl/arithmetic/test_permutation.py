"""Orders that are computed: each is a permutation, the same on every way to compute it, and for ever."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from edl.arithmetic.permutation import Permutation, key

pytest.importorskip("numpy")

SIZES = [*range(40), 61, 64, 97, 127, 128, 129, 255, 256, 257, 1000, 1021, 1024, 4096, 16384, 16385, 65537]
KEYS = [7754967453105325484, 1790141438887707639, 1841058181764691696, 13764509651895481189]
TEN = [7, 6, 8, 0, 9, 2, 1, 3, 5, 4]
MILLION = [864605, 935098, 194074, 709758, 875063, 711718]
LARGE = [344666751867, 244052590141, 121168304885, 917714910042, 792399416286, 462430775710]


@pytest.mark.parametrize("n", SIZES)
def test_each_item_comes_once(n: int) -> None:
    for number in range(3):
        assert sorted(Permutation(n, key("test", number)).block(0, n)) == list(range(n))


@pytest.mark.parametrize("n", [*SIZES, 10**9 + 7, 2**40, 2**61 + 12345, 2**62])
def test_all_ways_to_compute_it_agree(n: int) -> None:
    order = Permutation(n, key(n))
    begin = max(0, n - 20_000)
    block = order.block(begin, min(n, begin + 3000))
    assert order.array(begin, n).tolist()[: len(block)] == block
    assert [order.at(begin + i) for i in range(len(block))] == block
    assert order.pick(range(begin, begin + len(block))).tolist() == block
    assert all(0 <= item < n for item in block)
    assert len(order) == n


def test_the_values_never_change() -> None:
    """Positions in checkpoints mean what they meant when they were written."""
    assert [key(0), key(0, 1), key("a"), key("a", 1, "b")] == KEYS
    assert Permutation(10, 1).block(0, 10) == TEN
    assert Permutation(1_000_003, key(7, "e")).block(0, 6) == MILLION
    assert Permutation(2**40, 42).block(0, 6) == LARGE


def test_keys_tell_their_parts_apart() -> None:
    parts: list[tuple[int | str, ...]] = [(1, 2), (12,), ("12",), ("1", "2"), ("1", 2), (1, "2"), (-1, 2), ()]
    assert len({key(*one) for one in parts}) == len(parts)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_are_about_equally_likely(n: int) -> None:
    each = 300
    seen = Counter(tuple(Permutation(n, key(number)).block(0, n)) for number in range(math.factorial(n) * each))
    assert set(seen) == set(itertools.permutations(range(n)))
    assert all(abs(count - each) < 6 * math.sqrt(each) for count in seen.values())


@pytest.mark.parametrize("n", [1000, 65536, 1_000_003])
def test_items_are_spread(n: int) -> None:
    """Of a run of places, each tenth of the items gets about a tenth; and neighbours are as often rising as falling."""
    run = 1000
    for number in range(5):
        order = Permutation(n, key(n, number))
        items = order.array(0, run)
        tenths = Counter((items * 10 // n).tolist())
        assert all(abs(tenths[tenth] - run / 10) < 6 * math.sqrt(run / 10) for tenth in range(10))
        rising = int((items[1:] > items[:-1]).sum())
        assert abs(rising - run / 2) < 6 * math.sqrt(run / 12)
    pairs = [Permutation(n, key(n, number)).block(0, run) for number in range(2)]
    same = sum(one == other for one, other in zip(*pairs, strict=True))
    assert same < 20, "another key is another order"


def test_what_is_outside_is_refused() -> None:
    order = Permutation(10, 0)
    for place in (-1, 10):
        with pytest.raises(IndexError, match=f"place {place} of a permutation of 10 items"):
            order.at(place)
    for begin, end in ((-1, 3), (4, 3), (3, 11)):
        with pytest.raises(IndexError):
            order.block(begin, end)
        with pytest.raises(IndexError):
            order.array(begin, end)
    with pytest.raises(IndexError):
        order.pick([3, 10])
    for size in (-1, 2**62 + 1):
        with pytest.raises(ValueError, match="between 0 and"):
            Permutation(size, 0)
