"""The launcher's options for batch and learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edl.config import HyperPolicy, NodeRange
from edl.errors import SettingError
from edl.launch.options import record


def policy_from(options: Mapping[str, Any], nodes: NodeRange, slots: int) -> HyperPolicy:
    """The policy for batch and learning rate, for nodes with ``slots`` workers each. Raises ``SettingError``."""
    policy = record(HyperPolicy, options)
    most = nodes.highest * slots
    if policy.logical_ranks and most > policy.logical_ranks:
        raise SettingError(
            "--logical-ranks",
            policy.logical_ranks,
            f"{nodes.highest} nodes with {slots} workers each are {most} workers, and each needs a logical rank",
            "Raise --logical-ranks, or lower the maximum of --nnodes",
        )
    return policy
