"""In-memory checkpoints with real memory, a network in memory, and a checkpoint directory that is a dictionary."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from edl.checkpoint.memory.buffer_table import BufferRefusal
from edl.checkpoint.memory.memory_checkpoints import BufferGrant, MemoryCheckpoints
from edl.errors import CheckpointError
from edl.testing.memory_copies import MemoryCopies, MemoryNetwork
from edl.testing.snapshots import JOB, fill_of, make_snapshot
from edl.types import NodeId
from edl.wire.local import STATE, Committed
from edl.wire.messages import Kept
from edl.wire.records import Holding, Source, Version

LIMIT_S = 60.0
SIZE = 100_000
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


class FakeCheckpointStorage:
    """A checkpoint directory. While ``gate`` is closed, writes stand still in it."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Version, int], bytes] = {}
        self.shards: dict[Version, int] = {}
        self.accepted: list[tuple[Version, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.writes = threading.Semaphore(0)
        self.refuses = ""
        self.sharded = False

    def write(self, version: Version, snapshot: memoryview, shard: int, shards: int) -> str:
        self.writes.release()
        self.gate.wait(LIMIT_S)
        if self.refuses:
            raise CheckpointError(self.refuses)
        self.kept[version, shard] = bytes(snapshot)
        self.shards[version] = shards
        whole = all((version, other) in self.kept for other in range(shards))
        return f"/there/{version.commit}" if whole else ""

    def newest(self) -> tuple[Version, bool] | None:
        return (max(self.kept)[0], self.sharded) if self.kept else None

    def complete(self, version: Version, shards: int) -> str | None:
        return "" if all((version, shard) in self.kept for shard in range(shards)) else None

    def accept(self, version: Version, size: int, crc32: int) -> str:
        if self.refuses:
            raise CheckpointError(self.refuses)
        self.accepted.append((version, size, crc32))
        return f"/there/{version.commit}"

    def verify(self, version: Version) -> None:
        if self.refuses or all(kept != version for kept, _ in self.kept):
            raise CheckpointError(self.refuses or f"there is no complete checkpoint of commit {version.commit}")

    def load(self, allocate: Callable[[int], memoryview]) -> tuple[Version, bool]:
        if self.refuses:
            allocate(10 * SIZE)  # room for one that turns out to be bad
            raise CheckpointError(self.refuses)
        newest = max(self.kept)
        if self.sharded:
            return newest[0], True
        data = self.kept[newest]
        allocate(2 * SIZE)
        allocate(len(data))[:] = data
        return newest[0], False


class Worker:
    """A worker that writes commits into the buffers that it receives."""

    def __init__(self, memory: MemoryCheckpoints, slot: int = 0, stream: str = STATE) -> None:
        self.memory = memory
        self.slot = slot
        self.stream = stream
        self.maps: dict[int, mmap.mmap] = {}
        self.grant: BufferGrant | None = None

    def take(self, grant: BufferGrant | BufferRefusal) -> BufferGrant:
        assert isinstance(grant, BufferGrant), grant
        if grant.descriptor is not None:
            self.maps[grant.buffer] = mmap.mmap(grant.descriptor, grant.size)
            os.close(grant.descriptor)
        assert grant.buffer in self.maps
        self.grant = grant
        return grant

    def fill(self, holding: Holding, fill: int, size: int = SIZE) -> int:
        assert self.grant is not None
        data = make_snapshot(holding, fill, size)
        self.maps[self.grant.buffer][: len(data)] = data
        return len(data)

    def say(
        self, holding: Holding, size: int, *, save: bool = False, others: tuple[str, ...] = ()
    ) -> Coroutine[Any, Any, BufferGrant | BufferRefusal]:
        """Announce a commit. The result waits for the next buffer."""
        assert self.grant is not None
        version, number = holding.version, self.grant.buffer
        what = version.era, version.commit, holding.shard, holding.shards
        message = Committed(self.stream, number, size, *what, save, others)
        self.memory.committed(self.slot, message)
        self.grant = None
        return self.memory.want(self.slot, self.stream, size)

    async def commit(
        self,
        commit: int,
        *,
        save: bool = False,
        shard: int = 0,
        shards: int = 1,
        era: int = 1,
        others: tuple[str, ...] = (),
    ) -> None:
        """A whole commit, filled with its number. As in a worker, the buffer for the next part of a sharded state is
        wanted no earlier than then."""
        holding = Holding(Version(era, commit), shard, shards)
        if self.grant is None:
            self.take(await self.memory.want(self.slot, self.stream, SIZE + 1000))
        buffer = self.say(holding, self.fill(holding, commit), save=save, others=others)
        if shards == 1 or self.stream != STATE:
            self.take(await buffer)
        else:
            buffer.close()


class Bench:
    """In-memory checkpoints of several nodes in one network."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.checkpoint_storage = FakeCheckpointStorage()
        self.reports: asyncio.Queue[tuple[Version, str, str]] = asyncio.Queue()
        self.copied: asyncio.Queue[NodeId] = asyncio.Queue()
        """Nodes that have said that a copy came to them."""
        self.memories: list[MemoryCheckpoints] = []

    def node(
        self,
        node: NodeId = A,
        *,
        limit_bytes: int = 64 << 20,
        token: str = "",
        on_room: Callable[[str], None] = lambda why: None,
    ) -> MemoryCheckpoints:
        memory = MemoryCheckpoints(
            node,
            JOB,
            limit_bytes=limit_bytes,
            copies=MemoryCopies(self.network, token),
            checkpoint_storage=self.checkpoint_storage,
            on_kept=self._on_kept,
            on_room=on_room,
            on_copy=lambda: self.copied.put_nowait(node),
        )
        self.memories.append(memory)
        memory.start(node, 1)
        return memory

    def _on_kept(self, kept: Kept) -> None:
        assert kept.took_s >= 0 and (not kept.error or kept.took_s == 0), "what was not written took no time"
        assert kept.error or kept.sharded == (self.checkpoint_storage.shards.get(kept.version, 1) > 1), kept
        self.reports.put_nowait((kept.version, kept.where, kept.error))

    async def close(self) -> None:
        self.checkpoint_storage.gate.set()
        for memory in self.memories:
            await memory.close()


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        bench = Bench()
        try:
            await asyncio.wait_for(test(bench), LIMIT_S)
        finally:
            await bench.close()

    asyncio.run(whole())


async def until(reached: Callable[[], bool]) -> None:
    """Other tasks go on meanwhile; ends with the test's time at the latest."""
    while not reached():  # noqa: ASYNC110
        await asyncio.sleep(0)


def h(commit: int, shard: int = 0, shards: int = 1, era: int = 1) -> Holding:
    return Holding(Version(era, commit), shard, shards)


def source(node: NodeId, shard: int = 0) -> Source:
    return Source(node, node, 1, shard)


def content(got: tuple[int, int]) -> int:
    """The value that a piece is filled with; closes its descriptor."""
    descriptor, size = got
    try:
        return fill_of(os.pread(descriptor, size, 0))
    finally:
        os.close(descriptor)


async def piece(memory: MemoryCheckpoints, commit: int, *sources: Source, slot: int = 5, shard: int = 0) -> int:
    try:
        return content(await memory.piece(slot, STATE, Version(1, commit), shard, sources))
    finally:
        memory.restored(slot)
