"""Which pserver gets which keys: placement maps, splits, splits again; numba and numpy alike. Rows of 16 bits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import PsError, SettingError
from ps import hashing
from ps.client import dedup, routing
from ps.client.dedup import DistinctKeys
from ps.client.routing import RoutingTable, SubRequest
from ps.protocol import half_precision
from ps.protocol.messages import PlacementMap, PserverAddress, pack
from ps.spec import BUCKETS

SERVERS = tuple(PserverAddress(number, f"ps-{number}", "h", 4000 + number) for number in (1, 2, 3))


def a_route(owner: Any, servers: tuple[PserverAddress, ...] = SERVERS, version: int = 1) -> RoutingTable:
    return RoutingTable(PlacementMap(version, 1, servers, pack(np.asarray(owner).tolist())))


def taken(united: DistinctKeys, sub_requests: list[SubRequest]) -> dict[int, set[int]]:
    return {one.server: {int(key) for _, where in one.items for key in united.keys[where]} for one in sub_requests}


@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=60),
    owner=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=50),
    fast=st.booleans(),
)
@settings(max_examples=60)
def test_every_key_goes_to_its_owner_once(keys: list[int], owner: list[int], fast: bool) -> None:
    route = a_route(np.resize(owner, BUCKETS))
    given_keys = np.array(keys, np.int64)
    unite = dedup.unite if fast else dedup.unite_plain
    united = unite(given_keys, route._place, len(route.owners))
    assert sorted(united.keys.tolist()) == sorted(set(keys))
    assert united.inverse is not None and np.array_equal(united.keys[united.inverse], given_keys)
    assert {int(key): int(one) for key, one in zip(united.keys, united.counts, strict=True)} == {
        key: keys.count(key) for key in keys
    }
    wanted: dict[int, set[int]] = {}
    for key in keys:
        wanted.setdefault(int(route.owner[hashing.bucket_of(key)]), set()).add(key)
    assert taken(united, routing.first_split(route, [united])) == wanted
    again = routing.split_again(route, [united.keys], [(0, slice(0, len(united.keys)))])
    assert taken(united, again) == wanted
    some = dedup.only(united, united.keys % 2 == 0)
    even = {number: {key for key in its if key % 2 == 0} for number, its in wanted.items()}
    assert taken(some, routing.first_split(route, [some])) == {number: its for number, its in even.items() if its}


@given(keys=st.lists(st.integers(-5, 5), min_size=1, max_size=40), dim=st.integers(1, 5), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_rows_of_equal_keys_are_summed(keys: list[int], dim: int, seed: int) -> None:
    given_keys = np.array(keys, np.int64)
    grads = np.random.default_rng(seed).standard_normal((len(keys), dim)).astype(np.float32)
    owner = np.zeros(BUCKETS, np.int16)
    for united in (dedup.unite(given_keys, owner, 1), dedup.unite_plain(given_keys, owner, 1)):
        assert united.inverse is not None
        sums = dedup.sum_rows(grads, united)
        plain = dedup.sum_plain(grads, united.inverse, len(united.keys))
        for place, key in enumerate(united.keys):
            assert np.allclose(sums[place], grads[given_keys == key].sum(axis=0), atol=1e-5)
            assert np.allclose(plain[place], sums[place], atol=1e-5)
        out = np.empty_like(grads)
        dedup.spread(sums, united, out)
        assert np.array_equal(out, sums[united.inverse])


def test_only_some_of_the_keys() -> None:
    united = a_route(np.arange(BUCKETS) % 3 + 1).unite(np.arange(100))
    some = dedup.only(united, united.keys % 2 == 0)
    assert sorted(some.keys.tolist()) == list(range(0, 100, 2))
    for place in range(3):
        mine = some.keys[some.bounds[place] : some.bounds[place + 1]]
        assert set(mine.tolist()) <= set(united.keys[united.bounds[place] : united.bounds[place + 1]].tolist())


def test_several_parts_in_one_sub_request_and_none_too_large() -> None:
    route = a_route(np.arange(BUCKETS) % 2 + 1)
    united = [route.unite(np.arange(1000)), route.unite(np.arange(0)), route.unite(np.arange(500, 700))]
    sub_requests = routing.first_split(route, united)
    assert [one.server for one in sub_requests] == [1, 2] and [part for part, _ in sub_requests[0].items] == [0, 2]
    small = routing.first_split(route, united, [100, 100, 50], 5000)
    for one in small:
        size = sum((100, 100, 50)[part] * len(united[part].keys[where]) for part, where in one.items)
        assert 0 < size <= 5000
    for part in (0, 2):
        keys = [united[part].keys[where] for one in small for which, where in one.items if which == part]
        assert sorted(np.concatenate(keys).tolist()) == sorted(united[part].keys.tolist())
    huge = routing.first_split(route, united, [10_000, 1, 1], 5000)
    assert sum(len(one.items) for one in huge) >= 1000  # a key at least


@pytest.mark.parametrize("most", [1, 99, 100, 149, 150, 5000, 10**9])
@pytest.mark.parametrize("each", [(100, 0, 50), (50, 0, 100)])
def test_sub_requests_are_as_large_as_they_may_be(most: int, each: tuple[int, ...]) -> None:
    """Each costs a round trip: a further one begins only when the next key would not fit."""
    route = a_route(np.ones(BUCKETS, np.int16))
    numbers = (131, 20, 71)
    united = [route.unite(np.arange(number)) for number in numbers]
    keys = [
        [(part, int(key)) for part, where in one.items for key in united[part].keys[where]]
        for one in routing.first_split(route, united, each, most)
    ]
    assert sorted(one for some in keys for one in some) == [
        (part, key) for part, number in enumerate(numbers) for key in range(number)
    ]
    sizes = [[each[part] for part, _ in some if each[part]] for some in keys]
    assert all(sum(some) <= most or len(some) == 1 for some in sizes), "one key at least"
    for some, following in itertools.pairwise(sizes):
        assert sum(some) + following[0] > most


def test_without_sizes_each_pserver_gets_one_sub_request() -> None:
    route = a_route(np.arange(BUCKETS) % 2 + 1)
    sub_requests = routing.first_split(route, [route.unite(np.arange(5000)), route.unite(np.arange(9))])
    assert [(one.server, len(one.items)) for one in sub_requests] == [(1, 2), (2, 2)]


def test_refused_requests_are_split_by_the_newer_placement_map() -> None:
    keys = [np.arange(100), np.arange(100, 150)]
    newer = a_route(np.arange(BUCKETS) % 3 + 1, version=2)
    places = np.array([3, 5, 99])
    sub_requests = routing.split_again(newer, keys, [(0, places), (1, slice(10, 20))])
    found = {(part, int(key)) for one in sub_requests for part, where in one.items for key in keys[part][where]}
    assert found == {(0, 3), (0, 5), (0, 99)} | {(1, key) for key in range(110, 120)}
    for one in sub_requests:
        for part, where in one.items:
            assert (newer.owner[hashing.buckets_of(keys[part][where])] == one.server).all()


def test_unlisted_pservers_count_as_dead() -> None:
    route = a_route(np.arange(BUCKETS) % 3 + 1, SERVERS[:2])
    assert route.owners == (0, 1, 2) and route.clocked == (1, 2)
    assert not (route.owner == 3).any()
    assert route.name(1) == "ps-1 (h:4001)" and "gone" in route.name(3) and "not assigned" in route.name(0)
    assert RoutingTable(PlacementMap()).owners == (0,) and RoutingTable(PlacementMap()).clocked == ()


def test_a_fixed_placement() -> None:
    route = RoutingTable(routing.fixed_placement([("a", 1), ("b", 2), ("c", 3)]))
    assert [int((route.owner == number).sum()) for number in (1, 2, 3)] == [1366, 1365, 1365]
    for wrong in ([], [SERVERS[0], SERVERS[0]], [PserverAddress(0, "x", "h", 1)]):
        with pytest.raises((PsError, SettingError)):
            routing.fixed_placement(wrong)


def test_buckets_in_messages() -> None:
    keys = [np.arange(1000)]
    assert routing.some_buckets(keys, []) == "no bucket"
    assert routing.some_buckets(keys, [(0, slice(5, 6))]) == f"bucket {hashing.bucket_of(5)}"
    assert routing.some_buckets(keys, [(0, slice(0, 1000))]).endswith("more")


def test_rows_of_16_bits() -> None:
    rows = np.array([[1.0, -2.5, 3.14159, 1e-30], [0.0, np.inf, -np.inf, 65536.0]], np.float32)
    half = half_precision.encode_half(rows, "bf16")
    assert half.dtype == np.uint16
    back = half_precision.decode_half(half, "bf16", np.empty_like(rows))
    assert np.allclose(back[0], rows[0], rtol=2**-8) and np.array_equal(back[1], rows[1])
    nans = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(
        half_precision.decode_half(half_precision.encode_half(nans, "bf16"), "bf16", np.empty(4, np.float32))
    ).all()
    # To the nearest; of two equally near ones to the even one.
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32).view(np.float32)
    assert half_precision.encode_half(ties, "bf16").tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]
    assert np.array_equal(
        half_precision.decode_half(half_precision.encode_half(rows, "f2"), "f2", np.empty_like(rows))[0, :3],
        [1, -2.5, 3.140625],
    )
    assert half_precision.encode_half(rows, "f4") is rows
    with pytest.raises(SettingError, match="f4, f2, bf16"):
        half_precision.accept("f8")
