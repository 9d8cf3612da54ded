"""Work per node of a world must not grow with the number of nodes."""

from __future__ import annotations

import pytest

from edl.config import Replicas
from edl.master.policies import slots
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire import codec
from edl.wire.messages import MasterMessage, StartRound
from edl.wire.records import Member, NodeInfo, World

COUNT = 300


class Counted(str):
    """A name of a node that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def a_world(port: int = 0) -> World:
    members = tuple(
        Member(NodeId(Counted(f"n{index}")), Incarnation(index), "10.0.0.1", 1, Rank(index), (100 + port,))
        for index in range(COUNT)
    )
    return World(Round(1), members, 0)


def test_a_member_is_found_without_looking_through_all() -> None:
    world = a_world()
    Counted.compared = 0
    for index in range(COUNT):
        node = NodeId(Counted(f"n{index}"))
        assert world.member(node) is world.members[index]
        assert world.position(node) == index
    assert world.member(NodeId("stranger")) is None
    with pytest.raises(KeyError):
        world.position(NodeId("stranger"))
    assert Counted.compared < 10 * COUNT


def test_worlds_are_not_mixed_up() -> None:
    worlds = [a_world(number) for number in range(20)]
    for world in [*worlds, *reversed(worlds)]:
        assert world.member(NodeId("n7")) is world.members[7]


def test_dropped_slots_of_other_nodes_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a whole rack on the denylist, a Master of a thousand nodes would spend a second on each event."""
    compared: list[int] = []
    is_same = slots.is_same

    def counted(one: slots.Strike | slots.Dropped, info: NodeInfo, slot: int) -> bool:
        compared.append(slot)
        return is_same(one, info, slot)

    monkeypatch.setattr(slots, "is_same", counted)
    infos = [
        NodeInfo(
            NodeId(f"n{index}"), Incarnation(index), "h", 1, 4, devices=tuple(f"G{index}-{one}" for one in range(4))
        )
        for index in range(COUNT)
    ]
    drops = [slots.drop_of(info, 1, "too hot", Round(0), slots.DroppedBy.HAND) for info in infos]
    known = slots.KnownDrops(tuple(drops))
    for info in infos:
        assert known.places(info, Replicas()) == slots.places(drops, info, Replicas()) == (0, 2, 3)
    compared.clear()
    known = slots.KnownDrops(tuple(drops))
    for info in infos:
        known.places(info, Replicas())
    assert 0 < len(compared) <= 10 * COUNT
    compared.clear()
    for info in infos:
        known.places(info, Replicas())
    assert not compared, "one decision asks several times"


def test_a_start_is_encoded_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[MasterMessage] = []
    encode = codec._encode_master

    def counted(message: MasterMessage) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(codec, "_encode_master", counted)
    world, other = a_world(), a_world(1)
    for _ in range(COUNT):
        assert codec.decode_master(codec.encode_master(StartRound(world, "as wanted"))) == StartRound(
            world, "as wanted"
        )
    assert len(encoded) == 1
    for message in (StartRound(world, "another"), StartRound(other, "another"), StartRound(world, "as wanted")):
        assert codec.decode_master(codec.encode_master(message)) == message
