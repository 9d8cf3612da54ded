"""Reads pieces of a commit's parts for workers of another world, from this node's memory and from other nodes'.

A worker of another world size, or of another mesh, needs slices of several parts. It asks for all headers, chooses, and
asks for the ranges of bytes: no node receives more than its workers need.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from edl.checkpoint.memory.background import WaitingPool, in_pool
from edl.checkpoint.memory.holders import from_any
from edl.checkpoint.memory.memory_files import MemoryFile
from edl.checkpoint.memory.snapshot_pool import MemorySnapshotPool
from edl.errors import CheckpointError
from edl.ports import Copies, Piece
from edl.tasks import end
from edl.types import NodeId
from edl.wire.parts import PartHeader, PartRange, check_ranges, encode_headers
from edl.wire.records import Source, Version
from edl.wire.snapshot import raw_header, same_layout

log = logging.getLogger(__name__)

STREAMS = 4
"""Parts read at once."""
HERE, ELSEWHERE = 0, 1
"""Distances of a part; see ``PartHeader``."""


@dataclass(frozen=True, slots=True)
class _ReadHeader:
    """A header, and the node that delivered it; None: this one."""

    header: PartHeader
    source: Source | None


@dataclass(frozen=True, slots=True)
class _Headers:
    """A reading of all headers, and where they come from."""

    version: Version
    task: asyncio.Task[bytes]
    sources: frozenset[Source]
    found: dict[int, _ReadHeader]
    """By shard, once it has ended."""

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class PartReading:
    """Part reading of one node. Call all methods on the event loop."""

    def __init__(self, node: NodeId, snapshot_pool: MemorySnapshotPool, copies: Copies) -> None:
        self._snapshot_pool = snapshot_pool
        self._copies = copies
        self._node = node
        self._threads = WaitingPool(STREAMS, "edl-pieces")
        self._headers: _Headers | None = None

    async def close(self) -> None:
        """End all reads that are in progress."""
        if self._headers is not None:
            await end(self._headers.task)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def headers(self, version: Version, shards: int, sources: Sequence[Source]) -> bytes:
        """The headers of all parts (``edl.wire.parts``). The workers of a node share one reading. Raises
        ``CheckpointError``."""
        while (known := self._headers) is not None and known.version == version and not known.failed:
            try:
                return await asyncio.shield(known.task)
            except CheckpointError:
                if known.sources.issuperset(sources):
                    raise
                # That reading was begun in an earlier round, whose nodes may be gone.
        found: dict[int, _ReadHeader] = {}
        task = asyncio.create_task(self._read_headers(version, shards, sources, found))
        self._headers = _Headers(version, task, frozenset(sources), found)
        return await asyncio.shield(task)

    def forget(self) -> None:
        """The workers of this node train: they need no headers any more, which may be large."""
        if self._headers is not None and self._headers.task.done():
            self._headers = None

    async def _read_headers(
        self, version: Version, shards: int, sources: Sequence[Source], found: dict[int, _ReadHeader]
    ) -> bytes:
        reads = [in_pool(self._threads, self._header, version, shard, sources) for shard in range(shards)]
        found.update(enumerate(await asyncio.gather(*reads)))
        return encode_headers([found[shard].header for shard in range(shards)])

    def _header(self, version: Version, shard: int, sources: Sequence[Source]) -> _ReadHeader:
        loan = self._snapshot_pool.borrow(version, shard)
        if loan is not None:
            try:
                return _ReadHeader(PartHeader(shard, len(loan.view), HERE, raw_header(loan.view)), None)
            finally:
                loan.release()

        def read(source: Source) -> _ReadHeader:
            header, size = self._copies.header(source.host, source.port, version, shard)
            return _ReadHeader(PartHeader(shard, size, ELSEWHERE, header), source)

        return from_any(self._node, version, shard, sources, read)

    async def ranges(self, version: Version, wanted: Sequence[PartRange], sources: Sequence[Source]) -> MemoryFile:
        """Memory that holds these ranges one after another, for the caller to close. Raises ``CheckpointError``, or
        ``MemoryError`` when there is no room."""
        memory = await in_pool(self._threads, lambda: MemoryFile(max(1, sum(one.size for one in wanted)), touch=False))
        known = self._headers
        found = known.found if known is not None and known.version == version else {}
        by_shard: dict[int, list[Piece]] = {}
        at = 0
        for one in wanted:
            by_shard.setdefault(one.shard, []).append((one, memory.view[at : at + one.size]))
            at += one.size
        try:
            reads = [
                in_pool(self._threads, self._read, version, shard, pieces, sources, found.get(shard))
                for shard, pieces in by_shard.items()
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
        pieces: Sequence[Piece],
        sources: Sequence[Source],
        found: _ReadHeader | None,
    ) -> int:
        """Read ranges of one part; returns the number of bytes that came from this node. ``found``: what the worker has
        chosen them by. Workers that share a part may keep other values beside it, and then it lies elsewhere in the
        copy of another node."""
        loan = self._snapshot_pool.borrow(version, shard)
        try:
            if loan is not None and _lies_alike(raw_header(loan.view), found):
                check_ranges([one for one, _ in pieces], len(loan.view), f"shard {shard} of {version}")
                for one, view in pieces:
                    _copy(loan.descriptor, one.start, view)
                return sum(one.size for one, _ in pieces)
        finally:
            if loan is not None:
                loan.release()

        def read(source: Source) -> None:
            if found is not None and source != found.source:
                header, _ = self._copies.header(source.host, source.port, version, shard)
                if not _lies_alike(header, found):
                    raise CheckpointError("its copy is laid out in another way than the one whose header was read")
            self._copies.read(source.host, source.port, version, shard, pieces)

        from_any(self._node, version, shard, sources, read)
        return 0


def _lies_alike(header: bytes, found: _ReadHeader | None) -> bool:
    return found is None or same_layout(header, found.header.header)


def _copy(descriptor: int, start: int, view: memoryview) -> None:
    """Copy from a memory file without holding the interpreter's lock."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            raise CheckpointError(f"a memory file ends at byte {start + done}")
        done += count
