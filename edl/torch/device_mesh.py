"""The device mesh of the current world."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from edl.errors import StateError
from edl.torch import framework
from edl.torch.known_meshes import known

_worlds = 0


def mesh(**inner: int) -> DeviceMesh:
    """All workers of this world as a mesh: ``dp``, and inside it the dimensions in ``inner``, such as ``tp=2``.

    ``dp`` takes what is left of the world, so it grows and shrinks; the others keep their sizes. Workers of one place
    in ``dp`` have consecutive ranks. With ``--replica-size`` every world is a multiple of it, and the loss of a worker
    costs only the replica that it belongs to. The same arguments give the same object until the world changes.

    Raises ``StateError`` where there is no world (before ``run`` calls the script's function), and for sizes that do
    not divide it.
    """
    if not dist.is_initialized():
        raise StateError(
            "there is no world yet: call mesh() in build, in the function that run calls, or after connect()"
        )
    group: Any = dist.group.WORLD
    if known.group is not group:
        known.group = group
        known.meshes.clear()
        _forget_tracker()
    key = tuple(inner.items())
    if key not in known.meshes:
        sizes = _sizes(inner, dist.get_world_size())
        known.meshes[key] = init_device_mesh(framework.current().device_type, sizes, mesh_dim_names=("dp", *inner))
    made: DeviceMesh = known.meshes[key]
    return made


def _sizes(inner: Mapping[str, int], world: int) -> tuple[int, ...]:
    """The sizes of all dimensions, ``dp`` first. Raises ``StateError``."""
    shown = ", ".join(f"{name}={size}" for name, size in inner.items())
    if "dp" in inner or any(not isinstance(size, int) or size < 1 for size in inner.values()):
        raise StateError(f"mesh({shown}): give the size of each dimension but dp as a number from 1")
    replica = math.prod(inner.values())
    if world % replica:
        raise StateError(
            f"mesh({shown}) needs a multiple of {replica} workers, and this world has {world}: start the job with "
            f"--replica-size={replica}, which keeps each world at such a size"
        )
    return (world // replica, *inner.values())


def begin_world() -> None:
    """Forget all earlier meshes, and let those made from now on differ from them.

    To torch two meshes of the same ranks and names are equal, and it caches the results of operators on DTensors by
    that. A process that trains in another world of the same size would get DTensors that lie on the dead mesh, with the
    rank that this process had there. The identity of the thread is a part of the comparison; its place takes the number
    of the world.
    """
    global _worlds
    _worlds += 1
    known.forget()
    original: Any = DeviceMesh.__init__
    if not hasattr(original, "_edl_numbered"):

        @functools.wraps(original)
        def numbered(self: Any, *arguments: Any, **named: Any) -> None:
            original(self, *arguments, **named)
            self._thread_id = _worlds
            self._hash = None

        numbered._edl_numbered = True  # type: ignore[attr-defined]
        DeviceMesh.__init__ = numbered  # type: ignore[method-assign]


def _forget_tracker() -> None:
    """Let all workers of the world begin their first random operator on a DTensor alike.

    There torch makes an object that lasts as long as the process, and sends the state of rank 0's generator to all
    ranks. A process that has it from an earlier world would not take part, and a new one would wait for it.
    """
    for name in ("torch.distributed.tensor._random", "torch.distributed._tensor.random"):  # the second in torch 2.4
        module = sys.modules.get(name)
        if module is not None:
            module._rng_tracker = None  # type: ignore[attr-defined]
