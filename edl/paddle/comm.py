"""Collectives on tensors, over the group of the current round. With a single rank each of them is the identity.

A tensor on an accelerator is copied through the host's memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edl.paddle import group
from edl.paddle.arrays import fill, from_memory, kind, memory


def all_reduce(tensor: Any, op: str = "sum") -> Any:
    """Reduce a tensor over all ranks in place: ``sum``, ``mean``, ``max``, ``min`` or ``prod``. Returns the tensor."""
    ring = group.current()
    if ring is not None:
        _in_place(tensor, lambda array: ring.all_reduce(array, op, bfloat16=kind(tensor) == "bfloat16"))
    return tensor


def broadcast(tensor: Any, root: int = 0) -> Any:
    """Set the tensor of every rank to that of ``root``, in place. Returns the tensor."""
    ring = group.current()
    if ring is not None:
        _in_place(tensor, lambda array: ring.broadcast(array, root))
    return tensor


def all_gather(tensor: Any) -> list[Any]:
    """The tensors of all ranks, which must have equal shapes, in the order of the ranks."""
    ring = group.current()
    if ring is None:
        return [tensor.detach().clone()]
    gathered = ring.all_gather(_array(tensor))
    parts = [from_memory(part, kind(tensor)) for part in gathered]
    return parts if tensor.place.is_cpu_place() else [part.to(tensor.place) for part in parts]


def barrier() -> None:
    """Returns after all ranks have called it."""
    ring = group.current()
    if ring is not None:
        ring.barrier()


def _array(tensor: Any) -> Any:
    found = memory(tensor)
    # numpy() is read-only for some tensors.
    return np.array(tensor.detach().contiguous().numpy()) if found is None else found


def _in_place(tensor: Any, operation: Any) -> None:
    found = memory(tensor)
    if found is not None:
        operation(found)
    else:
        array = _array(tensor)
        operation(array)
        fill(tensor, array)
