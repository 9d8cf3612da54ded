"""The checkpoints of a node, as its agent and workers use them: combines the in-memory checkpoints, the checkpoint
directory and the world.

``MemoryCheckpoints`` moves bytes and does not know about worlds. The manager tells it which world the node is in, which
nodes have copies, and what to save before the launcher exits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from edl.checkpoint.memory.buffer_table import BufferRefusal, Usage
from edl.checkpoint.memory.memory_checkpoints import BufferGrant, MemoryCheckpoints
from edl.errors import CheckpointError, EdlError
from edl.ports import CheckpointStorage
from edl.types import NodeId
from edl.wire import local
from edl.wire.messages import KeepWith
from edl.wire.parts import PartRange
from edl.wire.records import NO_STATE, Holding, Source, Version, World

LEAVING_S = 10.0
"""Seconds that a leaving node waits for its peer to receive the newest commit, besides what it writes to the
directory."""


class CheckpointManager:
    """The checkpoint interface of the worker server and of the agent's shell."""

    def __init__(
        self,
        node: NodeId,
        memory: MemoryCheckpoints,
        checkpoint_storage: CheckpointStorage | None,
        log: Callable[[str], None],
    ) -> None:
        self._node = node
        self._memory = memory
        self._checkpoint_storage = checkpoint_storage
        self._log = log
        self._sources: tuple[Source, ...] = ()
        self._reading = asyncio.Lock()
        self._loads = 0
        """Calls of ``load`` in progress."""
        self.stored: tuple[Version, bool] = (NO_STATE, False)
        self.refused = ""

    # --- workers -----------------------------------------------------------------------------------------------------

    def want(
        self, slot: int, stream: str, size: int, saves: bool = False, waits: bool = False
    ) -> Coroutine[Any, Any, BufferGrant | BufferRefusal]:
        """Request a buffer for a worker's next commit; see ``worker_server.WorkerCheckpoints``."""
        return self._memory.want(slot, stream, size, saves, waits)

    def committed(self, slot: int, message: local.Committed) -> None:
        """Accept a worker's commit; see ``worker_server.WorkerCheckpoints``."""
        self._memory.committed(slot, message)

    async def piece(self, slot: int, asked: local.Fetch) -> tuple[int, int]:
        """A part of a commit for a worker to restore; see ``worker_server.WorkerCheckpoints``."""
        version = Version(asked.era, asked.commit)
        return await self._memory.piece(slot, asked.stream, version, asked.shard, self._sources)

    async def headers(self, asked: local.FetchHeaders) -> bytes:
        """The headers of all parts of a commit; see ``worker_server.WorkerCheckpoints``."""
        return await self._memory.reading.headers(Version(asked.era, asked.commit), asked.shards, self._sources)

    async def ranges(self, asked: local.FetchRanges, wanted: Sequence[PartRange]) -> tuple[int, int]:
        """Ranges of the parts of a commit; see ``worker_server.WorkerCheckpoints``."""
        memory = await self._memory.reading.ranges(Version(asked.era, asked.commit), wanted, self._sources)
        try:
            return memory.read_only(), memory.size
        finally:
            memory.close()  # the worker's mapping keeps the pages

    async def wrote_through(self, message: local.WroteThrough) -> None:
        """Register a checkpoint that a worker wrote itself; see ``worker_server.WorkerCheckpoints``."""
        version = Version(message.era, message.commit)
        async with self._reading:
            await self._memory.wrote_through(version, message.size, message.crc32, message.error)
            await self.look()

    async def settled(self) -> None:
        """Wait until the workers' saves have succeeded or failed, and no read is in progress; then look at the
        directory."""
        await self._memory.settled()
        async with self._reading:
            pass
        self._memory.looked()
        await self.look()

    @property
    def busy(self) -> bool:
        """Whether knowledge of the checkpoint directory is about to change: a save or a read is in progress."""
        return self._memory.busy or self._reading.locked()

    @property
    def loading(self) -> bool:
        """Whether ``load`` is in progress."""
        return self._loads > 0

    def restored(self, slot: int) -> None:
        """Release what the worker has restored; see ``worker_server.WorkerCheckpoints``."""
        self._memory.restored(slot)

    def forget_worker(self, slot: int) -> None:
        """Release the buffers of a dead worker; see ``worker_server.WorkerCheckpoints``."""
        self._memory.forget_worker(slot)

    # --- the agent ---------------------------------------------------------------------------------------------------

    def holdings(self) -> tuple[Holding, ...]:
        """The commits that this node has in memory."""
        return self._memory.holdings()

    def holders(self) -> int:
        """The smallest number of nodes with a recent commit of this node's in memory, this node included; 0: no
        commits."""
        return self._memory.holders()

    def usage(self) -> Usage:
        """Bytes of memory by use, and the limit."""
        return self._memory.usage()

    def enter(self, world: World) -> None:
        """Start a world that this node is in. The node at position 0 writes saved commits."""
        self._sources = world.sources
        members = [member.node for member in world.members]
        self._memory.enter(world.restore, members, writes=world.position(self._node) == 0)

    def keep_with(self, peer: KeepWith) -> None:
        """Send copies of commits to this node from now on."""
        self._memory.keep_with(peer.node, peer.host, peer.port)

    async def look(self) -> None:
        """Look for the newest checkpoint in the directory."""
        if self._checkpoint_storage is not None:
            try:
                self.stored = await self._memory.look()
            except CheckpointError as error:
                self._refuse(error)

    async def load(self) -> None:
        """Load the newest usable checkpoint; the next ``Ready`` reports it, or why there is none."""
        self._loads += 1
        try:
            await self._load()
        finally:
            self._loads -= 1

    async def _load(self) -> None:
        async with self._reading:
            try:
                version = await self._memory.load()
            except EdlError as error:
                self._refuse(error)
            else:
                if self._memory.too_large == version != NO_STATE:
                    self.stored = (version, True)  # its content is valid, and each worker reads it itself
                elif version != self.stored[0]:
                    await self.look()  # refused checkpoints are skipped from now on
                    if self.stored[0] > version != NO_STATE:  # a newer one could not be read at this moment
                        self.stored = (version, all(held.version != version for held in self._memory.holdings()))

    def _refuse(self, error: EdlError) -> None:
        self.refused = str(error)
        self.stored = (NO_STATE, False)
        self._log(self.refused)

    async def write(self, version: Version, reason: str) -> None:
        """Write what this node has of a commit, if the checkpoint directory has nothing as new. The directory is looked
        at first, because its last writer may have died without reporting."""
        await self.look()
        if version > self.stored[0]:
            await self._memory.flush(reason, version)

    @property
    def saving(self) -> bool:
        """Whether this node still has to write a commit that workers have saved."""
        return self.busy or self._memory.saving

    @property
    def unsaved(self) -> str:
        """The reason why the newest saved commit is not in the checkpoint directory; empty if it is, if there was none,
        or if another node writes it."""
        return self._memory.unsaved

    async def flush_saves(self) -> str:
        """Wait until saved commits are written; returns ``unsaved``."""
        await self.settled()
        return await self._memory.flush_saves()

    async def save_what_is_left(self, reason: str) -> None:
        """Before the launcher exits: write the newest commit to the checkpoint directory, or at least copy it to the
        peer."""
        await self.settled()
        held = max((holding.version for holding in self._memory.holdings()), default=NO_STATE)
        if held == NO_STATE:
            return
        await self.look()
        if held > self.stored[0]:
            await self._memory.flush(reason)
        await self._memory.copied_before_leaving(LEAVING_S)
