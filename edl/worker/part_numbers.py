"""Numbers the parts of a sharded commit: workers that hold the same parts of the model share a number.

With HSDP, or with parameters that are replicated over one dimension of a mesh, several workers hold the same pieces.
They then keep one part together, as all workers of a replicated state do: a lost worker's part is in the memory of its
peers, and no copy of it has to be sent to another node. The workers agree on the numbers once in each world, at its
first commit, where they all are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

MOST_OTHERS = 8
"""Nodes named to a launcher that has a part, of those that have it too: they only tell whether it needs a copy."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank says about its part."""

    ranks: tuple[int, ...]
    """Ranks whose pieces of all sharded tensors are the same as this one's, itself included, in ascending order."""
    digests: Mapping[str, str]
    """By name in the state, a digest of everything that is not sharded."""
    node: str


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of one rank in the commits of one world."""

    number: int
    parts: int
    """Number of parts of a commit."""
    workers: int
    """Size of the world."""
    ranks: frozenset[int]
    """Ranks that hold this part."""
    others: tuple[str, ...]
    """Other nodes on which some of them run, at most ``MOST_OTHERS``."""
    copies: bool
    """Whether this rank copies the part to its launcher's memory. One rank of each node does."""
    saves: bool
    """Whether its launcher writes the part to the checkpoint directory."""

    @classmethod
    def of_rank(cls, rank: int, workers: int) -> RankPart:
        """The part of a rank that shares it with no other."""
        return cls(rank, workers, workers, frozenset({rank}), (), copies=True, saves=True)

    @classmethod
    def whole(cls, workers: int, *, copies: bool) -> RankPart:
        """A state that is the same on all workers."""
        return cls(0, 1, workers, frozenset(range(workers)), (), copies=copies, saves=True)


def agree(mine: Claim, rank: int, exchange: Callable[[bytes], list[bytes]], note: Callable[[str], object]) -> RankPart:
    """Agree with all other ranks who holds which part; a collective. ``note`` gets, on rank 0, why ranks that hold the
    same pieces do not share a part."""
    claims = [decode(one) for one in exchange(encode(mine))]
    found = differing(claims) if rank == 0 else None
    if found is not None:
        name, one, other = found
        note(
            f"ranks {one} and {other} hold the same pieces of the sharded tensors, but state.{name} differs between "
            "them: each keeps a part of its own, which is copied to another node. Values that belong to one worker can "
            "be kept in an object with edl_per_rank"
        )
    return number(claims)[rank]


def encode(claim: Claim) -> bytes:
    """The claim as bytes, for the other ranks."""
    return json.dumps(asdict(claim)).encode()


def decode(data: bytes) -> Claim:
    """The inverse of ``encode``."""
    fields = json.loads(data)
    return Claim(tuple(fields["ranks"]), fields["digests"], fields["node"])


def number(claims: Sequence[Claim]) -> list[RankPart]:
    """The part of each rank. Parts are numbered in the order of their lowest ranks. Ranks share a part if they all say
    so, and hold the same values beside the sharded tensors."""
    parts: dict[int, RankPart] = {}
    groups = sorted(_agreed(claims))
    for count, ranks in enumerate(groups):
        nodes = sorted({claims[rank].node for rank in ranks})
        first: set[str] = set()
        for rank in ranks:
            node = claims[rank].node
            parts[rank] = RankPart(
                number=count,
                parts=len(groups),
                workers=len(claims),
                ranks=frozenset(ranks),
                others=tuple(other for other in nodes[: MOST_OTHERS + 1] if other != node)[:MOST_OTHERS],
                copies=node not in first,
                saves=rank == ranks[0],
            )
            first.add(node)
    return [parts[rank] for rank in range(len(claims))]


def differing(claims: Sequence[Claim]) -> tuple[str, int, int] | None:
    """A name in the state whose values differ between two ranks that hold the same pieces, and these ranks; None if
    there is none."""
    for rank, claim in enumerate(claims):
        lowest = min(claim.ranks, default=rank)
        if not 0 <= lowest < rank or claims[lowest].ranks != claim.ranks:
            continue
        theirs = claims[lowest].digests
        for name in sorted(theirs.keys() | claim.digests.keys()):
            if theirs.get(name) != claim.digests.get(name):
                return name, lowest, rank
    return None


def _agreed(claims: Sequence[Claim]) -> list[tuple[int, ...]]:
    """Groups of ranks that share a part; each rank is in one."""
    same: dict[tuple[tuple[int, ...], tuple[tuple[str, str], ...]], list[int]] = {}
    for rank, claim in enumerate(claims):
        same.setdefault((claim.ranks, tuple(sorted(claim.digests.items()))), []).append(rank)
    found: list[tuple[int, ...]] = []
    for (ranks, _), who in same.items():
        found += [ranks] if ranks == tuple(who) else [(rank,) for rank in who]
    return found
