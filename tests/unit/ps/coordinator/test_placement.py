"""Placement of buckets: even, with few moves, copies on other hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from ps.coordinator.placement import REPAIR, Grid, Planner, Site
from ps.protocol.messages import RESTORE

BUCKETS = 96
Roles = tuple[int, int, int, int]
"""Owner, backup, joining, giver."""


def sites(*machines: str, leaving: tuple[int, ...] = ()) -> list[Site]:
    return [Site(number, machine, number not in leaving) for number, machine in enumerate(machines, 1)]


def settle(
    grid: Grid, where: list[Site], motion: int = BUCKETS, copies: bool = True, lagging: bool = False
) -> tuple[int, int]:
    """Plan until nothing moves, with pservers that follow at once; returns (copies made, rounds)."""
    made = rounds = 0
    while True:
        grid.touched.clear()
        Planner(grid, where, copies, motion, lagging=lagging).run()
        if not grid.in_motion():
            return made, rounds
        rounds += 1
        grid.touched.clear()
        for bucket in range(grid.buckets):
            owner, _, joining, giver = grid.roles(bucket)
            if joining:
                made += 1
                grid.synced(owner, joining, 10**6, [bucket], may_own=True)
                grid.touched.clear()
            elif giver:
                grid.took(owner, 10**6, [bucket], copies)


def placed(where: list[Site], copies: bool = True) -> Grid:
    grid = Grid(BUCKETS)
    Planner(grid, where, copies, 0).place_all()
    settle(grid, where, copies=copies)
    return grid


def counts(numbers: object) -> list[int]:
    return sorted(Counter(numbers).values())  # type: ignore[call-overload]


def test_the_first_placement_is_even_and_in_ranges() -> None:
    grid = placed(sites("a", "b", "c"))
    assert counts(grid.owner) == [32, 32, 32]
    assert counts(grid.backup) == [32, 32, 32]
    assert sum(one != other for one, other in zip(grid.owner, grid.owner[1:], strict=False)) == 2


def test_a_backup_that_lags_catches_up_before_it_is_the_owner() -> None:
    where = sites("a", "b", "c")
    grid = placed(where)
    leaving = sites("a", "b", "c", leaving=(1,))
    mine = [bucket for bucket in range(BUCKETS) if grid.owner[bucket] == 1]
    grid.touched.clear()
    Planner(grid, leaving, True, BUCKETS, lagging=True).run()
    for bucket in mine:
        assert grid.owner[bucket] == 1 and grid.joining[bucket] == grid.backup[bucket] and grid.heir[bucket]
    settle(grid, leaving, lagging=True)
    assert 1 not in grid.owner and 1 not in grid.backup


def test_an_owner_that_dies_while_its_backup_catches_up_leaves_it_the_bucket() -> None:
    grid = Grid(1)
    grid.put(0, 1, 2, 2, heir=True)
    assert grid.bury(1) == []
    assert grid.roles(0) == (2, 0, 0, 0)


def test_a_copy_never_lies_with_its_owner() -> None:
    grid = placed(sites("a", "a", "b"))
    assert all(owner != backup for owner, backup in zip(grid.owner, grid.backup, strict=True))


def test_copies_lie_on_other_hosts_if_there_are_any() -> None:
    machine = {1: "a", 2: "a", 3: "b", 4: "b"}
    grid = placed(sites("a", "a", "b", "b"))
    assert all(machine[owner] != machine[backup] for owner, backup in zip(grid.owner, grid.backup, strict=True))


def test_copies_move_when_another_host_comes() -> None:
    grid = placed(sites("a", "a"))
    settle(grid, sites("a", "a", "b"))
    machine = {1: "a", 2: "a", 3: "b"}
    assert all(machine[owner] != machine[backup] for owner, backup in zip(grid.owner, grid.backup, strict=True))


def test_one_pserver_has_no_copies() -> None:
    grid = placed(sites("a"))
    assert set(grid.backup) == {0}
    assert grid.in_motion() == 0


def test_a_newcomer_gets_its_share_and_nothing_else_moves() -> None:
    grid = placed(sites("a", "b", "c"))
    before = list(grid.owner)
    made, _ = settle(grid, sites("a", "b", "c", "d"))
    assert counts(grid.owner) == [24, 24, 24, 24]
    moved = [bucket for bucket in range(BUCKETS) if grid.owner[bucket] != before[bucket]]
    assert all(grid.owner[bucket] == 4 for bucket in moved), "nobody but the newcomer gets anything"
    assert len(moved) == 24
    assert made <= 24 + 24 + 12, "one copy for each bucket and each copy that it takes over, and a few to even out"


def test_leaving_costs_one_copy_a_bucket() -> None:
    where = sites("a", "b", "c")
    grid = placed(where)
    made, _ = settle(grid, sites("a", "b", "c", leaving=(2,)))
    assert 2 not in grid.holders()
    assert counts(grid.owner) == [48, 48]
    assert made <= 64 + 4, "what it owned goes to the copies that are there"


def test_the_last_but_one_leaves_without_a_copy() -> None:
    grid = placed(sites("a", "b"))
    made, _ = settle(grid, sites("a", "b", leaving=(1,)))
    assert (made, grid.holders()) == (0, {2})


def test_nobody_leaves_when_nobody_stays() -> None:
    grid = placed(sites("a"))
    settle(grid, sites("a", leaving=(1,)))
    assert grid.holders() == {1}


def test_without_replication_buckets_still_move() -> None:
    grid = placed(sites("a", "b"), copies=False)
    made, _ = settle(grid, sites("a", "b", "c"), copies=False)
    assert (made, counts(grid.owner), set(grid.backup)) == (32, [32, 32, 32], {0})


@pytest.mark.parametrize("motion", [4, 16])
def test_a_bounded_number_moves_at_once(motion: int) -> None:
    grid = placed(sites("a", "b"))
    Planner(grid, sites("a", "b", "c"), True, motion).run()
    busy: Counter[int] = Counter()
    for bucket in range(BUCKETS):
        owner, _, joining, giver = grid.roles(bucket)
        if joining or giver:
            busy.update({owner, joining or giver})
    assert 0 < max(busy.values()) <= motion


@pytest.mark.parametrize(("motion", "begun"), [(8, 64), (1, 16)])
def test_missing_copies_are_not_held_back_for_the_sake_of_what_evens_out(motion: int, begun: int) -> None:
    """Until they are there a second death loses rows."""
    grid = placed(sites("a", "b", "c"))
    lost = grid.bury(2)
    missing = [bucket for bucket in range(BUCKETS) if not grid.backup[bucket]]
    assert not lost and len(missing) == 64
    there = [Site(1, "a", True), Site(3, "c", True), Site(4, "d", True)]
    Planner(grid, there, True, motion).run()
    copying = {bucket for bucket in range(BUCKETS) if grid.joining[bucket] and not grid.heir[bucket]}
    assert copying <= set(missing)
    assert begun <= len(copying) <= 2 * REPAIR * motion, "bounded: a checkpoint waits for them"


def test_the_next_ones_begin_when_half_of_the_last_have_ended() -> None:
    grid = placed(sites("a", "b"))
    Planner(grid, sites("a", "b", "c"), True, 16).run()
    moving = grid.in_motion()
    bucket = next(bucket for bucket in range(BUCKETS) if grid.joining[bucket])
    grid.put(bucket, grid.owner[bucket], grid.joining[bucket])
    Planner(grid, sites("a", "b", "c"), True, 16).run()
    assert grid.in_motion() == moving - 1


def test_a_death_promotes_the_copies_and_new_ones_are_made() -> None:
    grid = placed(sites("a", "b", "c"))
    owned = [bucket for bucket in range(BUCKETS) if grid.owner[bucket] == 1]
    copies = {bucket: grid.backup[bucket] for bucket in owned}
    assert grid.bury(1) == []
    assert {bucket: grid.owner[bucket] for bucket in owned} == copies
    settle(grid, [Site(2, "b", True), Site(3, "c", True)])
    assert counts(grid.owner) == [48, 48]
    assert 0 not in grid.backup


def test_what_has_no_copy_in_step_is_lost() -> None:
    grid = Grid(4)
    grid.put(0, 1, 2)
    grid.put(1, 1, 0, 2)
    grid.put(2, 2, 1)
    grid.put(3, 1, giver=RESTORE)
    assert grid.bury(1) == [1, 3]
    assert (grid.owner[0], grid.owner[2], grid.backup[2]) == (2, 2, 0)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        pytest.param((1, 2, 0, 0), (2, 0, 0, 0), False, id="the backup becomes the owner"),
        pytest.param((1, 2, 3, 0), (2, 0, 3, 0), False, id="and goes on making the other replica"),
        pytest.param((1, 0, 2, 0), (0, 0, 0, 0), True, id="a replica that was being made is incomplete"),
        pytest.param((1, 2, 0, RESTORE), (0, 0, 0, 0), True, id="nothing was loaded yet"),
        pytest.param((2, 1, 3, 0), (2, 0, 3, 0), False, id="a backup"),
        pytest.param((2, 3, 1, 0), (2, 3, 0, 0), False, id="a replica that was being made"),
        pytest.param((2, 1, 0, 1), (2, 0, 0, 0), False, id="a giver"),
        pytest.param((2, 3, 0, 0), None, False, id="nobody of this bucket"),
    ],
)
def test_who_dies_leaves_its_roles_to_those_that_have_the_rows(before: Roles, after: Roles | None, lost: bool) -> None:
    grid = Grid(1)
    grid.put(0, *before)
    grid.touched.clear()
    assert grid.bury(1) == [0] * lost
    assert grid.roles(0) == (after or before)
    assert (grid.touched == {0}) is (after is not None)


def test_an_heir_that_dies_is_no_heir() -> None:
    grid = Grid(2)
    grid.put(0, 2, 3, 1, heir=True)
    grid.put(1, 2, 1, 3, heir=True)
    grid.bury(1)
    assert list(grid.heir) == [0, 1]


def test_the_giver_takes_back_when_the_new_owner_dies() -> None:
    grid = Grid(1)
    grid.put(0, 1, 2)
    grid.hand_over(0, 2)
    assert grid.roles(0) == (2, 1, 0, 1)
    assert grid.bury(2) == []
    assert grid.roles(0) == (1, 0, 0, 0)


@pytest.mark.parametrize("copies", [True, False])
def test_a_giver_whose_release_may_be_lost_gets_the_bucket_back(copies: bool) -> None:
    """The new owner may be dead: then the giver's rows are the last ones."""
    grid = Grid(1)
    grid.put(0, 1, 2)
    grid.hand_over(0, 2)
    grid.stamp(5)
    grid.unsynced(1, 2, 5, [0], copies)
    assert grid.roles(0) == (1, 0, 2 * copies, 0)
    grid.stamp(6)
    grid.took(2, 5, [0], copies)
    assert grid.roles(0) == (1, 0, 2 * copies, 0), "what the other one says about older roles does not count"
    assert grid.bury(2) == []


def test_a_bucket_that_goes_back_keeps_the_replica_being_made() -> None:
    grid = Grid(1)
    grid.put(0, 2, 1, 3, giver=1)
    grid.stamp(5)
    grid.unsynced(1, 2, 5, [0], True)
    assert grid.roles(0) == (1, 0, 3, 0)


def test_outdated_messages_do_not_count() -> None:
    grid = Grid(2)
    for bucket in range(2):
        grid.put(bucket, 1, 0, 2)
    grid.stamp(5)
    grid.synced(1, 2, 4, [0], True)
    assert grid.roles(0) == (1, 0, 2, 0)
    grid.synced(1, 2, 5, [0], True)
    assert grid.roles(0) == (1, 2, 0, 0)
    grid.unsynced(1, 2, 5, [0], True)
    assert grid.roles(0) == (1, 2, 0, 0), "it was touched in this very step"
    grid.stamp(6)
    grid.unsynced(1, 2, 6, [0], True)
    assert grid.roles(0) == (1, 0, 2, 0)


def test_a_replica_that_is_begun_outdates_what_was_said_before() -> None:
    """Else an earlier report about the same pserver would count for the new replica."""
    grid = Grid(1)
    grid.put(0, 1)
    grid.stamp(5)
    grid.join(0, 2)
    grid.stamp(6)
    grid.synced(1, 2, 5, [0], True)
    assert grid.roles(0) == (1, 0, 2, 0)


@pytest.mark.parametrize(
    ("roles", "owner", "follower"),
    [((1, 0, 2, 0), 3, 2), ((1, 0, 2, 0), 1, 3), ((1, 0, 2, RESTORE), 1, 2)],
    ids=["not by its owner", "not of its replica", "while the owner does not serve yet"],
)
def test_a_replica_is_in_sync_only_if_its_serving_owner_says_so(roles: Roles, owner: int, follower: int) -> None:
    grid = Grid(1)
    grid.put(0, *roles)
    grid.stamp(5)
    grid.synced(owner, follower, 5, [0], True)
    assert grid.roles(0) == roles


@pytest.mark.parametrize(
    ("before", "teller", "follower", "after"),
    [
        pytest.param((1, 2, 0, 0), 1, 2, (1, 0, 2, 0), id="the backup is made again"),
        pytest.param((1, 2, 3, 0), 1, 2, (1, 0, 3, 0), id="unless another one is being made"),
        pytest.param((1, 2, 0, 0), 1, 3, None, id="not about a stranger"),
        pytest.param((1, 2, 0, 0), 3, 2, None, id="not by a stranger"),
        pytest.param((1, 0, 2, 0), 1, 2, (1, 0, 2, 0), id="a replica that was being made is begun again"),
        pytest.param((1, 0, 2, 0), 1, 3, None, id="not one about which nothing was said"),
        pytest.param((1, 0, 2, 0), 3, 2, None, id="not by a stranger, while it is made"),
        pytest.param((2, 1, 0, 1), 2, 1, None, id="an owner that waits for its giver notices itself"),
        pytest.param((2, 3, 0, 1), 1, 2, (1, 3, 2, 0), id="a giver takes back, and the backup stays"),
        pytest.param((2, 1, 0, 1), 1, 3, None, id="not for anybody but the new owner"),
        pytest.param((2, 1, 0, 1), 3, 2, None, id="not for anybody but the giver"),
    ],
)
def test_who_is_out_of_sync_is_said_by_the_owner_or_its_giver(
    before: Roles, teller: int, follower: int, after: Roles | None
) -> None:
    grid = Grid(1)
    grid.put(0, *before)
    grid.stamp(5)
    grid.unsynced(teller, follower, 5, [0], True)
    assert grid.roles(0) == (after or before)
    assert (grid.touched == {0}) is (after is not None)


def test_without_replication_a_lost_backup_is_not_made_again() -> None:
    grid = Grid(1)
    grid.put(0, 1, 2)
    grid.stamp(5)
    grid.unsynced(1, 2, 5, [0], False)
    assert grid.roles(0) == (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("before", "teller", "copies", "after"),
    [
        pytest.param((2, 1, 0, 1), 2, True, (2, 1, 0, 0), id="the old owner is the backup"),
        pytest.param((2, 1, 0, 1), 2, False, (2, 0, 0, 0), id="there are none"),
        pytest.param((2, 1, 0, 1), 1, True, None, id="only the owner says so"),
        pytest.param((2, 1, 0, 0), 2, True, None, id="once"),
    ],
)
def test_a_bucket_is_served_when_its_owner_says_so(
    before: Roles, teller: int, copies: bool, after: Roles | None
) -> None:
    grid = Grid(1)
    grid.put(0, *before)
    grid.stamp(5)
    grid.took(teller, 5, [0], copies)
    assert grid.roles(0) == (after or before)
    assert (grid.touched == {0}) is (after is not None)


@pytest.mark.parametrize("may_own", [True, False])
def test_an_heir_in_sync_becomes_the_owner_if_it_may(may_own: bool) -> None:
    grid = Grid(1)
    grid.put(0, 1, 0, 2, heir=True)
    grid.stamp(5)
    grid.synced(1, 2, 5, [0], may_own)
    assert grid.roles(0) == ((2, 1, 0, 1) if may_own else (1, 2, 0, 0))


def test_a_bucket_is_settled_when_it_is_neither_copied_nor_moved() -> None:
    grid = Grid(3)
    grid.put(0, 1, 2)
    grid.put(1, 1, 0, 2)
    grid.put(2, 2, 1, giver=1)
    assert [grid.is_settled(bucket) for bucket in range(3)] == [True, False, False]
    assert grid.in_motion() == 2


def test_a_bucket_that_is_handed_over_keeps_a_replica_that_is_being_made_elsewhere() -> None:
    grid = Grid(1)
    grid.put(0, 1, 2, 3)
    grid.hand_over(0, 2)
    assert grid.roles(0) == (2, 1, 3, 1)


def heated(heat: Mapping[int, float]) -> Grid:
    grid = placed(sites("a", "b", "c"))
    grid.touched.clear()
    Planner(grid, sites("a", "b", "c"), True, BUCKETS).run(heat)
    return grid


def test_a_hot_bucket_goes_to_the_coolest_and_a_cold_one_comes_back() -> None:
    grid = heated({0: 100.0, 1: 100.0, 40: 20.0, 70: 10.0})
    goes = grid.owner[0] if grid.giver[0] else grid.joining[0]
    assert goes == 3
    assert grid.in_motion() == 2


def test_a_bucket_that_would_only_make_another_one_hot_stays() -> None:
    assert heated({0: 100.0}).in_motion() == 0


def test_even_heat_moves_nothing() -> None:
    assert heated({0: 100.0, 40: 90.0, 70: 95.0}).in_motion() == 0
