"""``--replica-size``: how replicas of several workers lie on the nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from edl.config import NodeRange, Replicas
from edl.errors import SettingError
from edl.launch.options import record
from edl.launch.settings import Sizes


def replicas_from(options: Mapping[str, Any], sizes: Sizes, workers: int) -> tuple[Replicas, Sizes]:
    """The replicas, on nodes with ``workers`` workers each, and the sizes with a node count of whole replicas. Raises
    ``SettingError``."""
    replicas = record(Replicas, options)
    if replicas.size == 1:
        return replicas, sizes
    if sizes.training is not None or sizes.script_servers:
        what = "applies to collective jobs only: trainers of parameter servers make steps without one another"
        raise SettingError("--replica-size", replicas.size, what, "Drop it")
    replicas = Replicas(replicas.size, workers)
    nodes = sizes.nodes
    unit = math.lcm(nodes.unit, replicas.nodes)
    least = -(-nodes.minimum // unit) * unit
    if least > nodes.maximum:
        raise SettingError(
            "--replica-size",
            replicas.size,
            f"a replica needs {replicas.nodes} nodes with {workers} workers each, and no node count within "
            f"--nnodes={nodes.minimum}:{nodes.maximum} is a multiple of {unit}",
            f"Raise the maximum of --nnodes to {least}, or lower --replica-size",
        )
    return replicas, dataclasses.replace(sizes, nodes=NodeRange(nodes.minimum, nodes.maximum, unit))
