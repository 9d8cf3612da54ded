"""What edl and torch remember of the meshes of a world. It keeps them alive, with their groups and sockets."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from edl.checkpoint.reading.assembly import Box

_TENSORS = "torch.distributed.tensor"
_CLEARING = (
    "debug._clear_sharding_prop_cache",
    "_collective_utils.MeshTopoInfo.build_from_mesh.cache_clear",
    "_redistribute._gen_transform_infos.cache_clear",
    "_redistribute.clear_redistribute_planner_cache",
    "_sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear",
)
"""What clears torch's caches with meshes in them. Which of these exist depends on the version of torch."""


class KnownMeshes:
    """What edl remembers."""

    def __init__(self) -> None:
        self.group: Any = None
        """The default group of the newest world in which there was a mesh."""
        self.meshes: dict[tuple[tuple[str, int], ...], Any] = {}
        """The meshes of that world, by their inner dimensions."""
        self.boxes: dict[Any, Box] = {}
        """Places of parts; the keys contain meshes."""

    def forget(self) -> None:
        """The world has ended: drop all of it, and what torch remembers."""
        self.group = None
        self.meshes.clear()
        self.boxes.clear()
        for path in _CLEARING if _TENSORS in sys.modules else ():
            _call(path)


known = KnownMeshes()
"""The only one of this process."""


def _call(path: str) -> None:
    module, *names = path.split(".")
    try:
        found: Any = importlib.import_module(f"{_TENSORS}.{module}")
    except ImportError:
        return
    for name in names:
        found = getattr(found, name, None)
    if found is not None:
        found()
