"""Reads pieces of a commit's parts for workers of another world, from this node's memory and from other nodes'.

A worker of another world size, or of another mesh, needs slices of several parts. It asks for all headers, chooses, and
asks for the ranges of bytes: no node receives more than its workers need.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edl.checkpoint.memory.background import in_pool
from edl.checkpoint.memory.memory_files import MemoryFile
from edl.checkpoint.memory.snapshot_pool import MemorySnapshotPool
from edl.errors import CheckpointError
from edl.ports import Copies
from edl.tasks import end
from edl.types import NodeId
from edl.wire.messages import Source, Version
from edl.wire.parts import PartHeader, PartRange, encode_headers
from edl.wire.snapshot import HEADER_BYTES, header_bytes

T = TypeVar("T")
log = logging.getLogger(__name__)

STREAMS = 4
"""Parts read at once."""
HERE, ELSEWHERE = 0, 1
"""Distances of a part; see ``PartHeader``."""


class PartReading:
    """Part reading of one node. Call all methods on the event loop."""

    def __init__(self, node: NodeId, snapshot_pool: MemorySnapshotPool, copies: Copies) -> None:
        self._snapshot_pool = snapshot_pool
        self._copies = copies
        self._node = node
        self._first = zlib.crc32(node.encode())
        self._threads = ThreadPoolExecutor(STREAMS, "edl-pieces")
        self._headers: tuple[Version, asyncio.Task[bytes]] | None = None

    async def close(self) -> None:
        """End all reads."""
        if self._headers is not None:
            await end(self._headers[1])
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def headers(self, version: Version, shards: int, sources: Sequence[Source]) -> bytes:
        """The headers of all parts (``edl.wire.parts``). The workers of a node share one reading. Raises
        ``CheckpointError``."""
        known = self._headers
        if known is None or known[0] != version or (known[1].done() and known[1].exception() is not None):
            known = self._headers = version, asyncio.create_task(self._read_headers(version, shards, sources))
        return await asyncio.shield(known[1])

    async def _read_headers(self, version: Version, shards: int, sources: Sequence[Source]) -> bytes:
        reads = [in_pool(self._threads, self._header, version, shard, sources) for shard in range(shards)]
        return encode_headers(await asyncio.gather(*reads))

    def _header(self, version: Version, shard: int, sources: Sequence[Source]) -> PartHeader:
        loan = self._snapshot_pool.borrow(version, shard)
        if loan is not None:
            try:
                header = bytes(loan.view[: header_bytes(loan.view[:HEADER_BYTES])])
                return PartHeader(shard, len(loan.view), HERE, header)
            finally:
                loan.release()

        def read(source: Source) -> PartHeader:
            header, size = self._copies.header(source.host, source.port, version, shard)
            return PartHeader(shard, size, ELSEWHERE, header)

        return self._from_any(version, shard, sources, read)

    async def ranges(self, version: Version, wanted: Sequence[PartRange], sources: Sequence[Source]) -> MemoryFile:
        """Memory that holds these ranges one after another, for the caller to close. Raises ``CheckpointError``, or
        ``MemoryError`` when there is no room."""
        memory = await in_pool(self._threads, lambda: MemoryFile(max(1, sum(one.size for one in wanted)), touch=False))
        by_shard: dict[int, list[tuple[PartRange, memoryview]]] = {}
        at = 0
        for one in wanted:
            by_shard.setdefault(one.shard, []).append((one, memory.view[at : at + one.size]))
            at += one.size
        try:
            reads = [
                in_pool(self._threads, self._read, version, shard, pairs, sources) for shard, pairs in by_shard.items()
            ]
            here = sum(await asyncio.gather(*reads))
        except BaseException:
            by_shard.clear()
            memory.close()
            raise
        log.info("State: %s re-cut for a worker: %d bytes from this node, %d from others", version, here, at - here)
        return memory

    def _read(
        self,
        version: Version,
        shard: int,
        pairs: Sequence[tuple[PartRange, memoryview]],
        sources: Sequence[Source],
    ) -> int:
        """Read ranges of one part; returns the number of bytes that came from this node."""
        ranges, views = [one for one, _ in pairs], [view for _, view in pairs]
        loan = self._snapshot_pool.borrow(version, shard)
        if loan is not None:
            try:
                for one, view in pairs:
                    if one.start + one.size > len(loan.view):
                        have = f"shard {shard} of {version} has {len(loan.view)} bytes"
                        raise CheckpointError(f"{have}, {one.size} from {one.start} on requested")
                    _copy(loan.descriptor, one.start, view)
            finally:
                loan.release()
            return sum(one.size for one in ranges)

        def read(source: Source) -> None:
            self._copies.read(source.host, source.port, version, shard, ranges, views)

        self._from_any(version, shard, sources, read)
        return 0

    def _from_any(self, version: Version, shard: int, sources: Sequence[Source], read: Callable[[Source], T]) -> T:
        mine = [source for source in sources if source.shard == shard and source.node != self._node]
        # Many nodes get the same list of sources, so each starts at another one.
        first = (self._first + shard) % len(mine) if mine else 0
        causes = []
        for source in (*mine[first:], *mine[:first]):
            try:
                return read(source)
            except CheckpointError as error:
                causes.append(f"node {source.node}: {error}")
                log.info("State: no piece of shard %d of %s from node %s: %s", shard, version, source.node, error)
        raise CheckpointError(f"no node delivered shard {shard} of {version}: {'; '.join(causes) or 'none is known'}")


def _copy(descriptor: int, start: int, view: memoryview) -> None:
    """Copy from a memory file without holding the interpreter's lock."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            raise CheckpointError(f"a memory file ends at byte {start + done}")
        done += count
