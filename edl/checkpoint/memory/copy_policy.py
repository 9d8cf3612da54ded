"""Decides when a commit is copied to another node.

With a replicated state, every node of the world holds each commit, so further copies only cost memory and network. A
copy is needed where a part of the state is on one node only: in a world of one node, or with a sharded state.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from edl.types import NodeId


class Copying(enum.Enum):
    """The values of the option ``--copies``."""

    AUTO = "auto"
    """Copy if no other node of the world holds the same data."""
    ALWAYS = "always"
    NEVER = "never"


def needed(copying: Copying, shards: int, nodes: int) -> bool:
    """Whether a commit of ``shards`` parts, made in a world of ``nodes`` nodes, is copied."""
    if copying is Copying.AUTO:
        return shards > 1 or nodes < 2
    return copying is Copying.ALWAYS


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """The node that receives copies of this node's commits."""

    node: NodeId
    host: str
    port: int
