"""The device mesh of the current world."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from edl.errors import StateError

_latest: list[tuple[Any, DeviceMesh]] = []
"""The mesh of the newest default group."""


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
