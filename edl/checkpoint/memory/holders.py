"""Asks the nodes that hold a part of a commit, one after another."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from edl.errors import CheckpointError
from edl.types import NodeId
from edl.wire.records import Source, Version

T = TypeVar("T")
log = logging.getLogger(__name__)


def from_any(node: NodeId, version: Version, shard: int, sources: Sequence[Source], read: Callable[[Source], T]) -> T:
    """The result of ``read`` for the first source that delivers. ``node``: the node that asks. Raises
    ``CheckpointError`` that names everything that was tried."""
    holders = [source for source in sources if source.shard == shard and source.node != node]
    # Many nodes get the same list of sources, so each starts at another one.
    first = (zlib.crc32(node.encode()) + shard) % len(holders) if holders else 0
    causes = []
    for source in (*holders[first:], *holders[:first]):
        try:
            return read(source)
        except CheckpointError as error:
            causes.append(f"node {source.node}: {error}")
            log.info("State: could not fetch shard %d of %s from node %s: %s", shard, version, source.node, error)
    raise CheckpointError(f"no node delivered shard {shard} of {version}: {'; '.join(causes) or 'none is known'}")
