"""Which commit a world begins from, and where copies go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.config import JobSpec, NodeRange
from edl.master.resting import is_last_holder
from edl.master.restoring import Load, Restore, Unusable, choose, copy_holders
from edl.master.state import MasterState, NodeEntry, NodeStatus, Record, StreamOrders
from edl.master.turn import MasterTurn
from edl.types import Incarnation, JobId, NodeId
from edl.wire.records import NO_STATE, Holding, NodeInfo, Source, Version


def node(
    name: str,
    *held: Holding,
    stored: Version = NO_STATE,
    sharded: bool = False,
    refused: str = "",
    tried: bool = False,
    rack: str = "",
) -> NodeEntry:
    info = NodeInfo(NodeId(name), Incarnation(ord(name)), f"host-{name}", 1, 2, state_port=7, rack=rack)
    return NodeEntry(
        info,
        0,
        NodeStatus.READY,
        holdings=held,
        stored=stored,
        stored_sharded=sharded,
        refused=refused,
        orders=StreamOrders(load=tried),
    )


def whole(era: int, commit: int) -> Holding:
    return Holding(Version(era, commit))


def source(name: str, shard: int = 0) -> Source:
    return Source(NodeId(name), f"host-{name}", 7, shard)


def part(number: int, of: int, commit: int = 5) -> Holding:
    return Holding(Version(1, commit), number, of)


@pytest.mark.parametrize(
    ("others", "last"),
    [
        ([], True),
        ([node("b", part(0, 2))], True),
        ([node("b", part(0, 2)), node("c", part(1, 2))], False),
        ([node("b", part(0, 2), part(1, 2))], False),
        ([node("b", part(0, 2), part(1, 2, commit=4))], True),
        ([node("b", part(0, 2), part(1, 3))], True),
        ([node("b", stored=Version(1, 5))], False),
        ([node("b", part(0, 2), part(1, 2))._replace(draining=True)], True),
    ],
)
def test_a_node_that_leaves_may_be_the_last_with_the_newest_state(others: list[NodeEntry], last: bool) -> None:
    entry = node("a", part(0, 2), part(1, 2))
    for attached in (True, False):
        nodes = {one.info.node: one._replace(attached=attached) for one in (entry, *others)}
        stored = any(one.stored.commit for one in others)
        assert is_last_holder(turn(nodes), entry) is (last or not (attached or stored))
    newer = {one.info.node: one for one in (entry, node("b", whole(1, 6)))}
    assert not is_last_holder(turn(newer), entry)


def turn(nodes: dict[NodeId, NodeEntry]) -> MasterTurn:
    return MasterTurn(MasterState(JobSpec(JobId("job"), NodeRange(1, 4)), Record(), nodes), 0.0)


def test_nobody_has_anything() -> None:
    assert choose([node("a"), node("b")], [node("a"), node("b")]) == Restore()


def test_the_newest_wins_and_all_who_have_it_give_it() -> None:
    nodes = [node("a", whole(1, 9)), node("b", whole(1, 10)), node("c", whole(1, 10), whole(1, 9))]
    assert choose(nodes, nodes) == Restore(Version(1, 10), sources=(source("b"), source("c")))


def test_a_later_era_wins_over_a_higher_commit_of_a_line_that_was_given_up() -> None:
    nodes = [node("a", whole(1, 12)), node("b", whole(2, 10))]
    assert choose(nodes, nodes) == Restore(Version(2, 10), sources=(source("b"),))


def test_a_node_outside_the_world_may_have_the_newest() -> None:
    members, spare = [node("a", whole(1, 9))], node("b", whole(1, 10))
    assert choose(members, [*members, spare]) == Restore(Version(1, 10), sources=(source("b"),))


def test_shards_count_only_when_all_are_there_and_fit_any_number_of_workers() -> None:
    def shard(commit: int, number: int, shards: int = 2) -> Holding:
        return Holding(Version(1, commit), number, shards)

    nodes = [node("a", shard(10, 0), shard(9, 0)), node("b", shard(9, 1)), node("c", shard(8, 0, 1))]
    assert choose(nodes, nodes) == Restore(Version(1, 9), 2, sources=(source("a"), source("b", 1)))
    assert choose(nodes, nodes[:1]) == Restore()
    assert choose(nodes, nodes[1:]) == Restore(Version(1, 8), sources=(source("c"),))


def test_a_newer_checkpoint_is_loaded_by_one_node_then_by_another_and_then_done_without() -> None:
    stored = Version(3, 20)
    nodes = [node("a", whole(3, 15), stored=stored), node("b", stored=stored)]
    assert choose(nodes, nodes) == Load(NodeId("a"))
    nodes[0] = node("a", whole(3, 15), stored=stored, tried=True)
    assert choose(nodes, nodes) == Load(NodeId("b"))
    nodes[1] = node("b", stored=stored, tried=True)
    assert choose(nodes, nodes) == Restore(Version(3, 15), sources=(source("a"),))


def test_a_checkpoint_is_not_read_when_memory_is_as_new() -> None:
    nodes = [node("a", whole(3, 20), stored=Version(3, 20)), node("b", stored=Version(3, 20))]
    assert choose(nodes, nodes) == Restore(Version(3, 20), sources=(source("a"),))


def test_a_sharded_checkpoint_is_read_by_the_workers() -> None:
    nodes = [node("a", whole(3, 15), stored=Version(3, 20), sharded=True)]
    assert choose(nodes, nodes) == Load(NodeId("a")), "first somebody looks at every byte"
    nodes = [node("a", whole(3, 15), stored=Version(3, 20), sharded=True, tried=True)]
    assert choose(nodes, nodes) == Restore(Version(3, 20), stored=True)


def test_one_node_that_verified_a_sharded_checkpoint_is_enough() -> None:
    stored = Version(3, 20)
    nodes = [node("a", stored=stored, sharded=True), node("b", stored=stored, sharded=True, tried=True)]
    assert choose(nodes, nodes) == Restore(stored, stored=True)


def test_an_older_sharded_checkpoint_takes_the_place_of_one_that_somebody_found_damaged() -> None:
    nodes = [node("a", stored=Version(3, 10), sharded=True, tried=True), node("b", stored=Version(3, 20), sharded=True)]
    assert choose(nodes, nodes) == Load(NodeId("b"))
    nodes[1] = node("b", stored=Version(3, 10), sharded=True, tried=True)
    assert choose(nodes, nodes) == Restore(Version(3, 10), stored=True)


@pytest.mark.parametrize(("held", "unusable"), [((), True), ((whole(1, 3),), False)])
def test_checkpoints_that_nobody_can_read_end_the_job_unless_there_is_something_else(
    held: tuple[Holding, ...], unusable: bool
) -> None:
    nodes = [node("a", *held), node("b", refused="all are corrupt")]
    found = choose(nodes, nodes)
    assert found == Unusable("all are corrupt") if unusable else isinstance(found, Restore)


def names(members: list[NodeEntry], spares: list[NodeEntry], group: int = 1) -> dict[str, str]:
    return {n: k.info.node if k is not None else "" for n, k in copy_holders(members, spares, group).items()}


def test_copies_go_to_another_replica_which_is_not_lost_with_this_one() -> None:
    assert names([node(name) for name in "abcd"], [], 2) == {"a": "c", "b": "d", "c": "a", "d": "b"}
    assert names([node("a"), node("b")], [], 2) == {"a": "b", "b": "a"}, "there is no other"


def test_copies_go_to_the_next_member_and_to_another_rack_if_there_is_one() -> None:
    assert names([node("a"), node("b"), node("c")], []) == {"a": "b", "b": "c", "c": "a"}
    racks = [node("a", rack="1"), node("b", rack="1"), node("c", rack="2")]
    assert names(racks, []) == {"a": "c", "b": "c", "c": "a"}


def test_copies_on_other_racks_are_spread_evenly_and_stay_where_they_are() -> None:
    members = [node(name, rack="1" if name < "e" else "2") for name in "abcdefgh"]
    first = names(members, [])
    assert sorted(first.values()) == sorted(first), "each has one, on the other rack"
    assert all((one < "e") != (other < "e") for one, other in first.items())
    left = [one._replace(copy_holder=NodeId(first[one.info.node])) for one in members if one.info.node != "e"]
    then = names(left, [])
    moved = [one for one, other in then.items() if other != first[one]]
    assert [first[NodeId(one)] for one in moved] == ["e"], "only who had copies there sends them to another"
    assert Counter(then.values()).most_common(1)[0][1] == 2


def test_of_equal_nodes_on_other_racks_the_next_member_has_the_copies() -> None:
    racks = [node(name, rack="1" if name in "ac" else "2") for name in "abcd"]
    assert names(racks, []) == {"a": "b", "b": "c", "c": "d", "d": "a"}


def test_a_node_of_unknown_rack_is_on_no_other_rack() -> None:
    members = [node("a", rack="1"), node("b"), node("c", rack="2"), node("d")]
    assert names(members, []) == {"a": "c", "b": "c", "c": "a", "d": "a"}


def test_copies_move_off_a_node_that_has_too_many_once_others_can_share_them() -> None:
    alone = [node(name, rack="1") for name in "abcd"] + [node("e", rack="2")]
    first = names(alone, [])
    assert [first[name] for name in "abcd"] == ["e"] * 4, "there is no other rack"
    joined = [one._replace(copy_holder=NodeId(first[one.info.node])) for one in alone]
    then = names([*joined, *(node(name, rack="2") for name in "fgh")], [])
    assert sorted(then[name] for name in "abcd") == ["e", "f", "g", "h"]


@given(st.lists(st.sampled_from(["", "1", "2", "3"]), min_size=2, max_size=8))
def test_copies_stay_where_they_are_while_the_nodes_do(racks: list[str]) -> None:
    members = [node(name, rack=rack) for name, rack in zip("abcdefgh", racks, strict=False)]
    first = names(members, [])
    again = [one._replace(copy_holder=NodeId(first[one.info.node])) for one in members]
    assert names(again, []) == first


def test_a_single_node_has_its_copies_on_a_spare() -> None:
    assert names([node("a")], []) == {"a": ""}
    assert names([node("a")], [node("s"), node("t")]) == {"a": "s"}
