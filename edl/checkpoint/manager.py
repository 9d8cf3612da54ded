"""The node's state as its agent and its workers see it: the keeper, the checkpoint directory, and the world's choice.

The keeper moves bytes and knows no worlds; this room tells it which world it is in, whom it may ask, and what matters
before the launcher goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from edl.checkpoint.memory.buffer_table import Refusal
from edl.checkpoint.memory.keeper import Grant, Keeper
from edl.errors import CheckpointError, EdlError
from edl.ports import CheckpointStorage
from edl.types import NodeId
from edl.wire import local
from edl.wire.messages import NO_STATE, Holding, KeepWith, Source, Version, World

HAND_OVER_S = 10.0
"""How long a node that leaves waits for its peer to have its newest commit, beside what it writes to the directory."""


class CheckpointManager:
    """Implements what the worker server and the agent's shell ask for."""

    def __init__(
        self, node: NodeId, keeper: Keeper, checkpoint_storage: CheckpointStorage | None, log: Callable[[str], None]
    ) -> None:
        self._node = node
        self._keeper = keeper
        self._checkpoint_storage = checkpoint_storage
        self._log = log
        self._sources: tuple[Source, ...] = ()
        self._reading = asyncio.Lock()
        self.stored: tuple[Version, bool] = (NO_STATE, False)
        self.refused = ""

    # --- workers -----------------------------------------------------------------------------------------------------

    def want(self, slot: int, stream: str, size: int) -> Coroutine[Any, Any, Grant | Refusal]:
        """See ``worker_server.Keeper``."""
        return self._keeper.want(slot, stream, size)

    def committed(self, slot: int, message: local.Committed) -> Coroutine[Any, Any, Grant | Refusal]:
        """See ``worker_server.Keeper``."""
        return self._keeper.committed(slot, message)

    async def piece(self, slot: int, asked: local.Fetch) -> tuple[int, int]:
        """See ``worker_server.Keeper``."""
        version = Version(asked.era, asked.commit)
        return await self._keeper.piece(slot, asked.stream, version, asked.shard, self._sources)

    async def wrote_through(self, message: local.WroteThrough) -> None:
        """See ``worker_server.Keeper``."""
        version = Version(message.era, message.commit)
        async with self._reading:
            await self._keeper.wrote_through(version, message.size, message.crc32, message.error)
            await self.look()

    async def settled(self) -> None:
        """Until what workers have saved counts, or is known not to, and nothing is being read any more."""
        await self._keeper.settled()
        async with self._reading:
            pass
        self._keeper.looked()
        await self.look()

    @property
    def busy(self) -> bool:
        """Whether it is about to be known better what lies in the checkpoint directory: something that workers have
        saved is still on its way, or what is there is being read."""
        return self._keeper.busy or self._reading.locked()

    def restored(self, slot: int) -> None:
        """See ``worker_server.Keeper``."""
        self._keeper.restored(slot)

    def forget_worker(self, slot: int) -> None:
        """See ``worker_server.Keeper``."""
        self._keeper.forget_worker(slot)

    # --- the agent ---------------------------------------------------------------------------------------------------

    def holdings(self) -> tuple[Holding, ...]:
        """What this node has in memory."""
        return self._keeper.holdings()

    def enter(self, world: World) -> None:
        """A world begins in which this node has a part; position 0 writes what is saved."""
        self._sources = world.sources
        self._keeper.enter(world.restore, len(world.members), writes=world.position(self._node) == 0)

    def keep_with(self, peer: KeepWith) -> None:
        """Where copies of commits go from now on."""
        self._keeper.keep_with(peer.node, peer.host, peer.port)

    async def look(self) -> None:
        """See what lies in the checkpoint directory."""
        if self._checkpoint_storage is not None:
            try:
                self.stored = await self._keeper.look()
            except CheckpointError as error:
                self._refuse(error)

    async def load(self) -> None:
        """Read the newest usable commit from there; the next ``Ready`` says what it was, or why there is none."""
        async with self._reading:
            try:
                version = await self._keeper.load()
            except EdlError as error:
                self._refuse(error)
            else:
                if self._keeper.too_large == version != NO_STATE:
                    self.stored = (version, True)  # its bytes are right, and each worker reads it by itself
                elif version != self.stored[0]:
                    await self.look()  # what was refused is passed over from now on

    def _refuse(self, error: EdlError) -> None:
        self.refused = str(error)
        self.stored = (NO_STATE, False)
        self._log(self.refused)

    async def write(self, version: Version, reason: str) -> None:
        """See what lies in the checkpoint directory, if there is one, and write what is here of a commit if that is
        newer. Who wrote last may be gone, and nobody else have heard of it."""
        await self.look()
        if version > self.stored[0]:
            await self._keeper.flush(reason, version)

    @property
    def saving(self) -> bool:
        """Whether something that workers have saved has yet to be written by this node."""
        return self.busy or self._keeper.saving

    @property
    def unsaved(self) -> str:
        """Why the newest commit that workers have saved is not in the checkpoint directory; empty if it is, if none
        was, or if another node writes it."""
        return self._keeper.unsaved

    async def flush_saves(self) -> str:
        """Wait until what workers have saved is written; returns ``unsaved``."""
        await self.settled()
        return await self._keeper.flush_saves()

    async def save_what_is_left(self, reason: str) -> None:
        """Before the launcher ends: the newest commit goes to the checkpoint directory, or to the peer at least."""
        await self.settled()
        held = max((holding.version for holding in self._keeper.holdings()), default=NO_STATE)
        if held == NO_STATE:
            return
        await self.look()
        if held > self.stored[0]:
            await self._keeper.flush(reason)
        await self._keeper.handed_over(HAND_OVER_S)
