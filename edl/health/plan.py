"""Plans the two rounds of a health check and draws conclusions from their results. Pure.

In the first round, nodes exchange data in pairs; of an odd number, three form a group. A node is *proven* if an
exchange with another node has succeeded. In the second round, each suspect (a node that is not proven, or slow)
exchanges data with up to ``WITNESSES`` others, preferably proven ones.

A node is faulty if it gives no answer or finds a fault on its own, or if none of its exchanges has succeeded although
one was with a proven node that reported it. Several witnesses are asked because a connection between two sound nodes
may be broken too. If no proven node is left, nobody is named. A witness from the reserve is never named for its
exchanges: it has no second round in which they might succeed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

WITNESSES = 3
"""Most nodes with which a suspect exchanges data in the second round."""

Pairing = Mapping[str, tuple[str, ...]]
"""For each node that is probed, the nodes with which it exchanges data; symmetric."""


@dataclass(frozen=True, slots=True)
class NodeResult:
    """The answer of one node in one round."""

    error: str = ""
    """What it has found wrong with itself; empty: nothing."""
    kind: str = ""
    """Speeds are compared among nodes of the same kind."""
    product_s: float = 0.0
    """Seconds of its matrix product; 0: not measured."""
    links: Mapping[str, str] = field(default_factory=dict)
    """For each peer what went wrong in the exchange; empty: nothing."""


Results = Mapping[str, NodeResult]
"""Answers by node; a node without one was silent."""


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """Two nodes that cannot exchange data with each other."""

    nodes: tuple[str, str]
    error: str
    blamed: bool
    """Whether it is known that only the connection is broken: both nodes are proven. Otherwise one of them may be
    faulty, and it is not known which."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a check has found."""

    faulty: Mapping[str, str]
    """Faulty nodes, and why."""
    slow: Mapping[str, str]
    """Slow nodes that are not faulty, and how slow they are."""
    links: tuple[BrokenLink, ...]


def first_round(nodes: Sequence[str]) -> Pairing:
    """Neighbours in pairs, the last three of an odd number in a group; a single node alone."""
    pairs: dict[str, tuple[str, ...]] = {}
    for start in range(0, len(nodes) - 1, 2):
        end = start + 2 if len(nodes) - start != 3 else start + 3
        group = nodes[start:end]
        pairs |= {node: tuple(other for other in group if other != node) for node in group if node not in pairs}
    return pairs or {node: () for node in nodes}


def second_round(
    first: Pairing, results: Results, reserve: Sequence[str], factor: float, gone: Collection[str] = ()
) -> Pairing:
    """The exchanges of the suspects of the first round; empty: there are no suspects. ``reserve``: further nodes that
    may serve as witnesses. ``factor``: see ``slow_nodes``. ``gone``: nodes that no longer exist."""
    proven = _proven([first], [results])
    wrong = {node for node, result in results.items() if result.error}
    slow = slow_nodes(results, factor)
    sound = proven | {node for node in results if not first.get(node, ())}  # those with peers, and those without
    there = [node for node in first if node not in gone]
    suspects = [node for node in there if node not in wrong and (node in slow or node not in sound)]
    witnesses = [node for node in there if node in proven and node not in slow]
    others = [node for node in reserve if node not in first]
    pairs: dict[str, set[str]] = {node: set() for node in suspects}
    for index, node in enumerate(suspects):
        start = index * WITNESSES
        peers = [*_circle(witnesses, start, WITNESSES, node), *_circle(others, start, WITNESSES, node)][:WITNESSES]
        if not witnesses:  # suspects among each other: first those that have not met, then the old pairs
            new = _circle(suspects, index + 1, WITNESSES + len(first[node]), node)
            old = [one for one in first[node] if one not in wrong and one not in gone]
            peers = [*peers, *(one for one in new if one not in first[node]), *old][:WITNESSES]
        for other in peers:
            pairs[node].add(other)
            pairs.setdefault(other, set()).add(node)
    return {node: tuple(sorted(peers)) for node, peers in pairs.items()}


def _circle(nodes: Sequence[str], start: int, most: int, without: str) -> list[str]:
    """The next ``most`` nodes in a circle from an index on, without this one."""
    steps = range(start, start + min(most + 1, len(nodes)))
    return [node for step in steps if (node := nodes[step % len(nodes)]) != without][:most]


def conclude(rounds: Sequence[tuple[Pairing, Results]], factor: float) -> Conclusion:
    """The result of a check of one or two rounds."""
    pairings, answers = [one for one, _ in rounds], [one for _, one in rounds]
    proven = _proven(pairings, answers)
    faulty: dict[str, str] = {}
    for node in dict.fromkeys(node for pairing in pairings for node in pairing):
        why = _own_fault(node, rounds)
        if not why and node not in proven:
            sound = sorted(_evidence(node, rounds) & proven)
            if sound:
                error = next((text for peer in sound if (text := _error(node, peer, answers))), "no exchange succeeded")
                why = f"exchange with {', '.join(sound)} failed, which exchanged data with others: {error}"
        if why:
            faulty[node] = why
    best = _best(answers)
    slow = {node: how for node, how in slow_nodes(best, factor).items() if node not in faulty}
    return Conclusion(faulty, slow, tuple(_broken(pairings, answers, proven, faulty)))


def _evidence(node: str, rounds: Sequence[tuple[Pairing, Results]]) -> set[str]:
    """Peers that reported an exchange with this node; none for a node that was not in the first round."""
    if node not in rounds[0][0]:
        return set()
    asked = ((peer, results) for pairing, results in rounds for peer in pairing.get(node, ()))
    return {peer for peer, results in asked if peer in results and node in results[peer].links}


def _own_fault(node: str, rounds: Sequence[tuple[Pairing, Results]]) -> str:
    """What a node has found wrong with itself, or that it was silent whenever it was asked; empty: neither."""
    asked = [results for pairing, results in rounds if node in pairing]
    given = [results[node] for results in asked if node in results]
    if error := next((one.error for one in given if one.error), ""):
        return error
    return f"no answer to {len(asked)} probes" if not given and len(asked) > 1 else ""


def _proven(pairings: Sequence[Pairing], answers: Sequence[Results]) -> set[str]:
    """Nodes that have exchanged data with another one, and have found nothing wrong with themselves."""
    wrong = {node for results in answers for node, result in results.items() if result.error}
    found: set[str] = set()
    for pairing, results in zip(pairings, answers, strict=True):
        for node, peers in pairing.items():
            if node not in wrong and any(_works(node, peer, results) for peer in peers):
                found.add(node)
    return found


def _works(one: str, other: str, results: Results) -> bool:
    """Whether both nodes report that their exchange succeeded."""
    return all(
        a in results and b in results[a].links and not results[a].links[b] for a, b in ((one, other), (other, one))
    )


def _error(one: str, other: str, answers: Sequence[Results]) -> str:
    """What a node, or else the other one, has last reported about their exchange; empty: nothing."""
    for results in reversed(answers):
        for a, b in ((one, other), (other, one)):
            if a in results and results[a].links.get(b, ""):
                return results[a].links[b]
    return ""


def _broken(
    pairings: Sequence[Pairing], answers: Sequence[Results], proven: set[str], faulty: Mapping[str, str]
) -> list[BrokenLink]:
    """Exchanges that never succeeded between nodes that are not faulty."""
    pairs = sorted({(min(a, b), max(a, b)) for pairing in pairings for a, peers in pairing.items() for b in peers})
    found = []
    for a, b in pairs:
        if a in faulty or b in faulty or any(_works(a, b, results) for results in answers):
            continue
        error = _error(a, b, answers) or "one of them gave no result"
        found.append(BrokenLink((a, b), error, a in proven and b in proven))
    return found


def _best(answers: Sequence[Results]) -> Results:
    """For each node the answer with its fastest product: a delay that does not repeat is no defect."""
    best: dict[str, NodeResult] = {}
    for results in answers:
        for node, result in results.items():
            before = best.get(node)
            if result.product_s and (before is None or result.product_s < before.product_s):
                best[node] = result
    return best


def slow_nodes(results: Results, factor: float) -> dict[str, str]:
    """Nodes whose product took more than ``factor`` times the usual time of their kind, and how much they took. Usual
    is the lower quartile, which neither many slow nodes nor one that is too fast can move; of fewer than five nodes
    that is the fastest one."""
    found: dict[str, str] = {}
    kinds: dict[str, list[str]] = {}
    for node, result in results.items():
        if result.product_s and not result.error:
            kinds.setdefault(result.kind, []).append(node)
    for kind, nodes in kinds.items():
        times = sorted(results[node].product_s for node in nodes)
        usual_s = times[(len(times) - 1) // 4]
        for node in nodes:
            took_s = results[node].product_s
            if took_s > factor * usual_s:
                found[node] = f"{took_s / usual_s:.1f} times as long for a matrix product as other nodes with {kind}"
    return found
