"""Decides when a commit is copied to another node.

A part that workers of several nodes hold needs no further copies, which would only cost memory and network: each
commit of a replicated state, and the parts of a sharded one that several workers share (HSDP). A copy is needed where
a part is on one node only: in a world of one node, or with a sharded state.
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


def needed(copying: Copying, nodes: int) -> bool:
    """Whether a part of a commit that ``nodes`` nodes of the world hold is copied."""
    if copying is Copying.AUTO:
        return nodes < 2
    return copying is Copying.ALWAYS


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """The node that receives copies of this node's commits."""

    node: NodeId
    host: str
    port: int
