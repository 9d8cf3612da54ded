"""Order of the nodes in a world."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from edl.rendezvous.ranks import ReadyNode, order
from edl.types import NodeId


def nodes(text: str) -> list[NodeId]:
    return [NodeId(name) for name in text.split()]


def candidates(text: str) -> list[ReadyNode]:
    """``"a b:0 c"``: in order of arrival, with the node rank asked for."""
    made = []
    for index, word in enumerate(text.split()):
        name, _, rank = word.partition(":")
        made.append(ReadyNode(NodeId(name), index, int(rank) if rank else -1))
    return made


@pytest.mark.parametrize(
    ("previous", "ready", "size", "expected"),
    [
        pytest.param("", "c a b", 3, "c a b", id="the first world is in order of arrival"),
        pytest.param("", "c a b", 2, "c a", id="the last to arrive is a spare"),
        pytest.param("a b c", "c a b", 3, "a b c", id="survivors keep their order"),
        pytest.param("a b c", "c x a", 3, "a x c", id="a replacement takes the vacated place"),
        pytest.param("a b c", "c a", 2, "a c", id="the others move up"),
        pytest.param("a b", "b a x y", 4, "a b x y", id="newcomers come last"),
        pytest.param("a b c d", "y d x a", 4, "a y x d", id="two places, in order of arrival"),
        pytest.param("a b c", "x c b a", 2, "a b", id="survivors before newcomers, the last survivors go first"),
        pytest.param("", "a:1 b:0", 2, "b a", id="a node rank asked for is given"),
        pytest.param("", "a b:0 c:2", 3, "b a c", id="others take what is left"),
        pytest.param("", "a b c:0", 2, "c a", id="who asked for a place comes before other newcomers"),
        pytest.param("", "a:5 b", 2, "a b", id="a rank beyond the world counts as none"),
        pytest.param("", "a:2 b", 2, "a b", id="ranks begin at 0"),
        pytest.param("a b", "a b x:0", 3, "x a b", id="a node rank outweighs the order of survivors"),
    ],
)
def test_order(previous: str, ready: str, size: int, expected: str) -> None:
    assert order(nodes(previous), candidates(ready), size) == tuple(nodes(expected))


@pytest.mark.parametrize("size", [0, 3])
def test_size_must_fit_the_candidates(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^size={size} with 2 candidates$"):
        order([], candidates("a b"), size)


def test_properties_hold_for_random_worlds() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        names = [NodeId(f"n{index}") for index in range(8)]
        previous = rng.sample(names, rng.randint(0, 6))
        ready = [ReadyNode(name, index) for index, name in enumerate(rng.sample(names, rng.randint(1, 8)))]
        size = rng.randint(1, len(ready))
        placed = order(previous, ready, size)
        present = {candidate.node for candidate in ready}
        survivors = [node for node in previous if node in present][:size]
        assert len(set(placed)) == size
        assert set(placed) <= present
        assert [node for node in placed if node in survivors] == survivors, "survivors stay, in their order"
        if size >= len(previous):
            unmoved = [place for place, node in enumerate(previous) if node in present]
            if size - len(survivors) >= len(previous) - len(survivors):
                assert all(placed[place] == previous[place] for place in unmoved), "every gap is filled, nobody moves"


@pytest.mark.parametrize(
    ("previous", "ready", "size", "expected"),
    [
        pytest.param("", "c a b d", 4, "c a b d", id="the first world is in order of arrival"),
        pytest.param("a b c d", "a c d", 2, "c d", id="the survivor of a broken replica is a spare"),
        pytest.param("a b c d", "a c d x", 4, "a x c d", id="a newcomer takes the vacated place"),
        pytest.param("a b c d e f", "a c d f", 4, "a f c d", id="survivors of broken replicas form one"),
        pytest.param("a b c d e f", "b d f", 2, "b d", id="also where nothing is whole"),
        pytest.param("a b c d", "b c x y", 4, "b x c y", id="newcomers repair both"),
        pytest.param("a b c d", "a b c d x y", 6, "a b c d x y", id="newcomers form a replica"),
        pytest.param("c d", "c d a e", 4, "c d a e", id="a spare is a newcomer"),
        pytest.param("a b c", "a b c d", 4, "a b c d", id="a last world of another size"),
    ],
)
def test_replicas_of_two_nodes(previous: str, ready: str, size: int, expected: str) -> None:
    assert order(nodes(previous), candidates(ready), size, group=2) == tuple(nodes(expected))


def test_whole_replicas_stay_together_in_random_worlds() -> None:
    rng = random.Random(2)
    kept = dissolved = 0
    for _ in range(5000):
        group = rng.choice((2, 3, 4))
        names = [NodeId(f"n{index}") for index in range(16)]
        previous = rng.sample(names, group * rng.randint(0, 4))
        ready = [ReadyNode(name, index, rack=rng.choice(("", "x", "y")))
                 for index, name in enumerate(rng.sample(names, rng.randint(group, 16)))]  # fmt: skip
        size = group * rng.randint(1, len(ready) // group)
        placed = order(previous, ready, size, group=group)
        there = {one.node for one in ready}
        assert len(placed) == len(set(placed)) == size and set(placed) <= there
        now = [placed[at : at + group] for at in range(0, size, group)]
        before = [tuple(previous[at : at + group]) for at in range(0, len(previous), group)]
        whole = [nodes for nodes in before if there.issuperset(nodes)]
        assert [nodes for nodes in now if nodes in whole] == whole[: size // group], "in their order"
        kept += len(whole)
        dissolved += sum(not there.issuperset(nodes) for nodes in before)
        survivors = [node for node in previous if node in there]
        assert {node for node in placed if node in previous} >= set(survivors) or len(survivors) > size
    assert kept > 1000 and dissolved > 1000


@pytest.mark.parametrize(
    ("previous", "ready", "size", "expected"),
    [
        pytest.param("", "a/x b/y c/x d/y", 4, "a c b d", id="the first world"),
        pytest.param("", "a/x b/y c d/y e f/x", 6, "b d a f c e", id="some do not say their rack"),
        pytest.param("a b c d", "a/x c/y d/y e/y f/x", 4, "a e c d", id="only as many as are needed come in"),
        pytest.param("a b c d", "a/x c/y e/y f/x", 4, "a f c e", id="replacements go to the replica in their rack"),
        pytest.param("a b c d", "a/x c/y d/y e/y", 4, "a e c d", id="another rack is better than no replica"),
        pytest.param("a b c d", "a c/y d/y x/y e", 4, "a x c d", id="unknown racks are not the same rack"),
        pytest.param("a b c d e f g h", "a/x d/y f/x h/y", 4, "a f d h", id="survivors complete others in their rack"),
        pytest.param("a b c d", "a/x b/y c/x d/y", 4, "a b c d", id="survivors are not moved for it"),
    ],
)
def test_replicas_of_two_nodes_and_racks(previous: str, ready: str, size: int, expected: str) -> None:
    made = [ReadyNode(NodeId(word.partition("/")[0]), number, rack=word.partition("/")[2])
            for number, word in enumerate(ready.split())]  # fmt: skip
    assert order(nodes(previous), made, size, group=2) == tuple(nodes(expected))


def test_as_many_replicas_as_possible_begin_within_a_rack() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        group, racks = rng.choice((2, 3, 4)), rng.randint(1, 4)
        ready = [ReadyNode(NodeId(f"n{at}"), at, rack=f"r{rng.randrange(racks)}")
                 for at in range(group * rng.randint(1, 5))]  # fmt: skip
        placed = order([], ready, len(ready), group=group)
        rack = {one.node: one.rack for one in ready}
        within = sum(len({rack[node] for node in placed[at : at + group]}) == 1 for at in range(0, len(placed), group))
        assert within == sum(count // group for count in Counter(rack.values()).values())


def test_a_size_must_be_of_whole_replicas() -> None:
    with pytest.raises(ValueError, match=r"^size=3 with replicas of 2 nodes$"):
        order([], candidates("a b c"), 3, group=2)


def test_a_scheduler_takes_the_highest_indexes_away() -> None:
    ready = [
        ReadyNode(NodeId(name), joined, index=index)
        for joined, (name, index) in enumerate(zip("abcd", (3, 0, 1, 2), strict=True))
    ]
    assert order(nodes("a b c"), ready, 2, wanted=2) == tuple(nodes("b c"))
    assert order(nodes("a b c"), ready, 3, wanted=3) == tuple(nodes("d b c")), "who stays is preferred to who is there"
    assert order(nodes("a b c"), ready, 2) == tuple(nodes("b c")), "then the highest index of those that are there"


def test_without_indexes_it_is_as_ever_whatever_is_wanted() -> None:
    assert order(nodes("a b c"), candidates("a b c d"), 2, wanted=2) == tuple(nodes("a b"))
