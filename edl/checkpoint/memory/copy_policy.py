"""When a commit goes to another node as well.

With a replicated state every node of the world keeps each commit by itself, so a copy on another node only costs
memory and network. One is needed where a part of the state is on one node alone: a world of one node, a sharded state.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from edl.types import NodeId


class Copying(enum.Enum):
    """``--copies``."""

    AUTO = "auto"
    """Where no other node of the world has the same."""
    ALWAYS = "always"
    NEVER = "never"


def needed(copying: Copying, shards: int, nodes: int) -> bool:
    """Whether a commit of so many parts, made in a world of so many nodes, is to be copied."""
    if copying is Copying.AUTO:
        return shards > 1 or nodes < 2
    return copying is Copying.ALWAYS


@dataclass(frozen=True, slots=True)
class Peer:
    """The node that holds a copy of this one's commits."""

    node: NodeId
    host: str
    port: int
