"""Which workers hold the same pieces of sharded tensors, as the tensors' meshes and placements say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def ranks_alike(layouts: Iterable[tuple[Any, Any]]) -> frozenset[int]:
    """Ranks that hold the same pieces as this one of all tensors with these meshes and placements, itself included;
    empty without any tensor. Ranks outside a tensor's mesh are not among them: nothing is known about those."""
    found: frozenset[int] | None = None
    for mesh, placements in layouts:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return frozenset()
        index = tuple(
            slice(None) if placement.is_replicate() else at
            for placement, at in zip(placements, coordinate, strict=True)
        )
        alike = frozenset(int(rank) for rank in mesh.mesh[index].flatten().tolist())
        found = alike if found is None else found & alike
    return found or frozenset()
