"""The plan of a health check names exactly the faulty nodes: every single and double fault among six nodes, and random
faults among up to forty."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from edl.health.plan import Conclusion, NodeResult, Pairing, Results, conclude, first_round, second_round, slow_nodes

FACTOR = 2.0
SIX = tuple(f"n{number}" for number in range(6))


@dataclass(frozen=True)
class Fault:
    """One fault. ``kind``: dead, wrong, slow, deaf (no link works), or link (the one between two nodes is broken)."""

    kind: str
    nodes: tuple[str, ...]


def every_fault(nodes: Sequence[str]) -> list[Fault]:
    single = [Fault(kind, (node,)) for kind in ("dead", "wrong", "slow", "deaf") for node in nodes]
    return [*single, *(Fault("link", pair) for pair in itertools.combinations(nodes, 2))]


def probed(pairing: Pairing, faults: Iterable[Fault]) -> Results:
    """What the nodes of a pairing answer."""
    having = {kind: {f.nodes[0] for f in faults if f.kind == kind} for kind in ("dead", "wrong", "slow", "deaf")}
    broken = {frozenset(fault.nodes) for fault in faults if fault.kind == "link"}

    def link(a: str, b: str) -> str:
        bad = {a, b} & (having["deaf"] | having["dead"]) or frozenset((a, b)) in broken
        return "timed out" if bad else ""

    return {
        node: NodeResult(
            "wrong numbers" if node in having["wrong"] else "",
            "device",
            10.0 if node in having["slow"] else 1.0 + 0.01 * len(node),
            {peer: link(node, peer) for peer in peers},
        )
        for node, peers in pairing.items()
        if node not in having["dead"]
    }


def checked(nodes: Sequence[str], faults: Sequence[Fault], reserve: Sequence[str] = ()) -> Conclusion:
    """A whole check of these nodes."""
    first = first_round(nodes)
    results = probed(first, faults)
    rounds = [(first, results)]
    second = second_round(first, results, reserve, FACTOR)
    if second:
        rounds.append((second, probed(second, faults)))
    return conclude(rounds, FACTOR)


def assert_exact(found: Conclusion, faults: Sequence[Fault]) -> None:
    faulty = {fault.nodes[0] for fault in faults if fault.kind in ("dead", "wrong", "deaf")}
    slow = {fault.nodes[0] for fault in faults if fault.kind == "slow"} - faulty
    assert set(found.faulty) == faulty, (found, faults)
    assert set(found.slow) == slow, (found, faults)
    links = {frozenset(fault.nodes) for fault in faults if fault.kind == "link"}
    assert {frozenset(link.nodes) for link in found.links} <= links, (found, faults)
    assert all(link.blamed for link in found.links), (found, faults)


@pytest.mark.parametrize("count", [1, 2])
def test_faults_among_six_nodes_are_named_exactly(count: int) -> None:
    cases = list(itertools.combinations(every_fault(SIX), count))
    assert len(cases) == (39 if count == 1 else 741)
    for faults in cases:
        assert_exact(checked(SIX, faults), faults)


def test_a_broken_link_that_was_used_is_reported() -> None:
    found = checked(SIX, [Fault("link", ("n0", "n1"))])
    assert [(link.nodes, link.blamed) for link in found.links] == [(("n0", "n1"), True)]


@pytest.mark.parametrize("seed", range(400))
def test_random_faults_among_many_nodes_are_named_exactly(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [f"n{number}" for number in range(rng.randint(3, 40))]
    kinds = ["dead", "wrong", "slow", "deaf", "link"]
    bad = rng.sample(nodes, rng.randint(0, len(nodes) // 3))
    faults = []
    for node in bad:
        kind = rng.choice(kinds)
        other = rng.choice([one for one in nodes if one != node])
        faults.append(Fault(kind, (node, other) if kind == "link" else (node,)))
    assert_exact(checked(nodes, faults), faults)


def test_two_nodes_that_cannot_talk_are_both_reported_and_neither_is_blamed() -> None:
    found = checked(["a", "b"], [Fault("deaf", ("a",))])
    assert not found.faulty
    assert [(link.nodes, link.blamed) for link in found.links] == [(("a", "b"), False)]


@pytest.mark.parametrize("kind", ["dead", "wrong"])
def test_of_two_nodes_the_one_with_a_fault_of_its_own_is_named(kind: str) -> None:
    assert set(checked(["a", "b"], [Fault(kind, ("b",))]).faulty) == {"b"}


def test_the_slower_of_two_nodes_is_named() -> None:
    assert set(checked(["a", "b"], [Fault("slow", ("b",))]).slow) == {"b"}


def test_a_node_on_its_own_is_judged_by_its_own_part() -> None:
    assert checked(["a"], []) == Conclusion({}, {}, ())
    assert set(checked(["a"], [Fault("wrong", ("a",))]).faulty) == {"a"}
    assert set(checked(["a"], [Fault("dead", ("a",))]).faulty) == {"a"}


def test_a_reserve_helps_to_tell_two_nodes_apart() -> None:
    found = checked(["a", "b"], [Fault("deaf", ("a",))], reserve=["s"])
    assert set(found.faulty) == {"a"}


def test_a_reserve_that_is_deaf_itself_makes_nobody_faulty() -> None:
    found = checked(["a", "b"], [Fault("deaf", ("a",)), Fault("deaf", ("s",))], reserve=["s"])
    assert not found.faulty


@pytest.mark.parametrize("fault", [Fault("dead", ("r",)), Fault("link", ("s", "r"))], ids=lambda fault: fault.kind)
def test_a_witness_from_the_reserve_gets_no_blame_for_one_failed_exchange(fault: Fault) -> None:
    """It has passed its own check, and has no second chance in this one."""
    first = first_round(["s", "w1", "w2"])
    results = probed(first, [Fault("dead", ("s",))])
    second = second_round(first, results, ["r"], FACTOR)
    assert second["r"] == ("s",)
    found = conclude([(first, results), (second, probed(second, [fault]))], FACTOR)
    assert not found.faulty
    assert [(link.nodes, link.blamed) for link in found.links] == [(("r", "s"), False)]


def test_nor_does_one_whose_other_exchange_was_with_a_deaf_node() -> None:
    found = checked(["a", "b"], [Fault("deaf", ("b",)), Fault("link", ("a", "r3"))], reserve=["r1", "r2", "r3"])
    assert set(found.faulty) == {"b"}
    assert [(link.nodes, link.blamed) for link in found.links] == [(("a", "r3"), False)]


@pytest.mark.parametrize("killed", [False, True])
def test_a_witness_that_does_not_report_the_exchange_is_no_evidence(killed: bool) -> None:
    """Because it was silent, or killed when it had only tested itself."""
    first = first_round(["a", "b", "c", "d"])
    results = probed(first, [Fault("link", ("a", "b"))])
    second = second_round(first, results, (), FACTOR)
    assert second["a"] == second["b"] == ("c", "d")
    silent = dict(probed(second, [Fault("dead", ("c",)), Fault("dead", ("d",))]))
    if killed:
        silent |= {"c": NodeResult(kind="device", product_s=1.0), "d": NodeResult(kind="device", product_s=1.0)}
    found = conclude([(first, results), (second, silent)], FACTOR)
    assert not found.faulty
    assert ("a", "b") in [link.nodes for link in found.links]


def test_a_fault_that_does_not_repeat_is_forgiven() -> None:
    first = first_round(SIX)
    results = dict(probed(first, [Fault("deaf", ("n0",)), Fault("slow", ("n2",))]))
    second = second_round(first, results, (), FACTOR)
    assert set(second) >= {"n0", "n1", "n2"}
    found = conclude([(first, results), (second, probed(second, []))], FACTOR)
    assert not found.faulty
    assert not found.slow


def test_speed_is_compared_within_a_kind() -> None:
    results = {
        **{f"a{number}": NodeResult(kind="old", product_s=9.0 + number / 10) for number in range(3)},
        **{f"b{number}": NodeResult(kind="new", product_s=1.0) for number in range(3)},
        "alone": NodeResult(kind="other", product_s=50.0),
    }
    assert not slow_nodes(results, FACTOR)
    assert set(slow_nodes({**results, "b3": NodeResult(kind="new", product_s=2.1)}, FACTOR)) == {"b3"}


@pytest.mark.parametrize(("slow", "others"), [(2, 1), (5, 3), (20, 10)])
def test_many_slow_nodes_are_all_named(slow: int, others: int) -> None:
    results = {f"s{number}": NodeResult(product_s=3.0) for number in range(slow)}
    results |= {f"n{number}": NodeResult(product_s=1.0) for number in range(others)}
    assert set(slow_nodes(results, FACTOR)) == {f"s{number}" for number in range(slow)}


def test_one_that_is_too_fast_makes_no_others_slow() -> None:
    results = {f"n{number}": NodeResult(product_s=1.0) for number in range(5)}
    assert not slow_nodes({**results, "fast": NodeResult(product_s=0.1)}, FACTOR)


@pytest.mark.parametrize("number", range(1, 12))
def test_each_node_has_a_peer_in_the_first_round(number: int) -> None:
    nodes = [f"n{index}" for index in range(number)]
    pairing = first_round(nodes)
    assert set(pairing) == set(nodes)
    assert all(len(peers) in ((0,) if number == 1 else (1, 2)) for peers in pairing.values())
    assert all(node in pairing[peer] for node, peers in pairing.items() for peer in peers)
