"""Ranks that hold the same pieces, compared with the pieces themselves."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from edl.torch import boxes  # noqa: E402
from edl.torch.same_pieces import ranks_alike  # noqa: E402
from edl.torch.sharded import DTensor  # noqa: E402

try:
    from torch.distributed.tensor import Replicate, Shard
except ImportError:  # torch 2.4
    from torch.distributed._tensor import Replicate, Shard  # type: ignore[attr-defined]

assert DTensor is not None


class Mesh:
    """A mesh as seen by one rank; some ranks of the world may be outside."""

    def __init__(self, ranks: Any, me: int) -> None:
        self.mesh = ranks
        self._me = me

    def get_coordinate(self) -> list[int] | None:
        found = (self.mesh == self._me).nonzero()
        return [int(at) for at in found[0]] if len(found) else None


def test_they_are_those_with_the_same_boxes() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        sizes = [rng.choice((1, 2, 3)) for _ in range(rng.randrange(1, 4))]
        world = math.prod(sizes)
        order = rng.sample(range(world), world)
        ranks = torch.tensor(order).view(sizes)
        shape = [2 * 3 * 2 * 3 * 2 * 3] * 2  # every rank has a piece of its own
        layouts = [[rng.choice((Replicate(), Shard(0), Shard(1))) for _ in sizes] for _ in range(rng.randrange(1, 4))]
        at = {int(ranks[where]): where for where in itertools.product(*map(range, sizes))}
        held = {rank: [boxes.cut(shape, sizes, where, layout) for layout in layouts] for rank, where in at.items()}
        for rank in range(world):
            found = ranks_alike([(Mesh(ranks, rank), tuple(layout)) for layout in layouts])
            assert found == {other for other in range(world) if held[other] == held[rank]}, (seed, rank)


def test_ranks_outside_a_mesh_are_not_alike() -> None:
    whole, half = torch.arange(4).view(2, 2), torch.tensor([1, 3])
    replicated = (Replicate(), Shard(0))
    assert ranks_alike([(Mesh(whole, 1), replicated)]) == {1, 3}
    assert ranks_alike([(Mesh(whole, 1), replicated), (Mesh(torch.tensor([0, 1]), 1), (Replicate(),))]) == {1}
    assert ranks_alike([(Mesh(half, 1), (Replicate(),))]) == {1, 3}
    assert ranks_alike([(Mesh(half, 0), (Replicate(),))]) == frozenset()
    assert ranks_alike([]) == frozenset()
