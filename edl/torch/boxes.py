"""Where a worker's part of a DTensor lies in the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edl.checkpoint.reading.assembly import Box
from edl.errors import StateError
from edl.torch.known_meshes import known

_MOST_BOXES = 100_000


def box_of(tensor: Any) -> Box:
    """This worker's part of a DTensor. Raises ``StateError`` for a tensor whose parts are not boxes."""
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    here = mesh.get_coordinate()
    if here is None:
        raise StateError(
            f"a DTensor of shape {shape} cannot be kept: this worker is not in its mesh {mesh}. Create it only on the "
            "workers of its mesh"
        )
    coordinate = tuple(here)
    order = _explicit_order(tensor)
    key = (mesh, coordinate, placements, shape, order)
    found = known.boxes.get(key)
    if found is None:
        if len(known.boxes) >= _MOST_BOXES:
            known.boxes.clear()
        found = known.boxes[key] = cut(shape, tuple(mesh.shape), coordinate, placements, dict(order))
    if found.shape != tuple(tensor.to_local().shape):
        raise StateError(
            f"a DTensor of shape {shape} and placements {placements} cannot be kept: this worker has a part of shape "
            f"{tuple(tensor.to_local().shape)}, {found.shape} was expected"
        )
    return found


def cut(
    shape: Sequence[int],
    sizes: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    explicit: Mapping[int, Sequence[int]] | None = None,
) -> Box:
    """The part of a tensor at one coordinate of a mesh of these ``sizes``.

    Each mesh dimension that shards a tensor dimension of length ``n`` cuts it as ``torch.chunk`` does: into parts of
    ``ceil(n / size)``, the last of which may be shorter or empty. ``explicit``: for tensor dimensions, the order in
    which mesh dimensions cut them; otherwise from left to right, or as FSDP2 does with a tensor-parallel parameter,
    after the dimensions to the right (``_StridedShard``). torch's own function for this is wrong where such a part is
    not even (seen in 2.13). Raises ``StateError`` for parts that are not boxes.
    """
    offset, length = [0] * len(shape), list(shape)
    for dim, order in _orders(sizes, placements, explicit or {}).items():
        for at in order:
            part = -(-length[dim] // sizes[at])
            begin = min(part * coordinate[at], length[dim])
            offset[dim] += begin
            length[dim] = min(part, length[dim] - begin)
    return Box(tuple(offset), tuple(length))


def _orders(
    sizes: Sequence[int], placements: Sequence[Any], explicit: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """For each sharded tensor dimension, the mesh dimensions that cut it, in order."""
    orders: dict[int, list[int]] = {}
    for at in reversed(range(len(placements))):
        placement = placements[at]
        if placement.is_partial():
            raise StateError(f"a DTensor of placements {placements} cannot be kept: its values are not summed up yet")
        dim, before = getattr(placement, "dim", None), getattr(placement, "split_factor", 0)
        if dim is None:
            continue
        order = orders.setdefault(dim, [])
        if not before:
            order.insert(0, at)
            continue
        pieces = 1
        for other in order:
            pieces *= sizes[other]
        if pieces != before:
            raise StateError(
                f"a DTensor of placements {placements} on a mesh of {tuple(sizes)} cannot be kept: its parts are not "
                "contiguous"
            )
        order.append(at)
    for dim, order in orders.items():
        if dim in explicit and sorted(explicit[dim]) == sorted(order):
            orders[dim] = list(explicit[dim])
    return orders


def _explicit_order(tensor: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The order that a newer torch states beside the placements, by tensor dimension."""
    spec = getattr(tensor, "_spec", None)
    if getattr(spec, "use_strided_shard_as_shard_order", True):
        return ()
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in getattr(spec, "shard_order", None) or ())
