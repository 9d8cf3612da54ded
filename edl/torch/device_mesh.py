"""The device mesh of the current world."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from edl.errors import StateError

_latest: list[tuple[Any, DeviceMesh]] = []
"""The mesh of the newest default group."""
_worlds = 0


def mesh() -> DeviceMesh:
    """All workers of this world in one dimension, named ``dp``. The same object until the world changes.

    Raises ``StateError`` where there is no world: before ``run`` calls the script's function.
    """
    if not dist.is_initialized():
        raise StateError(
            "there is no world yet: call mesh() in build, in the function that run calls, or after connect()"
        )
    group: Any = dist.group.WORLD
    if not _latest or _latest[0][0] is not group:
        device = "cuda" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu"
        _latest[:] = [(group, init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",)))]
    return _latest[0][1]


def begin_world() -> None:
    """Let meshes made from now on differ from all earlier ones.

    To torch two meshes of the same ranks and names are equal, and it caches the results of operators on DTensors by
    that. A process that trains in another world of the same size would get DTensors that lie on the dead mesh, with the
    rank that this process had there. The identity of the thread is a part of the comparison; its place takes the number
    of the world.
    """
    global _worlds
    _worlds += 1
    _latest.clear()
    original: Any = DeviceMesh.__init__
    if not hasattr(original, "_edl_numbered"):

        @functools.wraps(original)
        def numbered(self: Any, *arguments: Any, **named: Any) -> None:
            original(self, *arguments, **named)
            self._thread_id = _worlds
            self._hash = None

        numbered._edl_numbered = True  # type: ignore[attr-defined]
        DeviceMesh.__init__ = numbered  # type: ignore[method-assign]
    _clear_caches()


def _clear_caches() -> None:
    """Free the meshes of earlier worlds that torch's cache keeps alive, with their groups."""
    try:
        from torch.distributed.tensor import debug
    except ImportError:  # before torch 2.5
        return
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
