"""The node's state as its agent and its workers see it: the keeper, the checkpoint directory, and the world's choice.

The keeper moves bytes and knows no worlds; this room tells it which world it is in, whom it may ask, and what matters
before the launcher goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from edl.agent.keeper import Grant, Keeper
from edl.agent.shelf import Refusal
from edl.errors import CheckpointError, EdlError
from edl.ports import Vault
from edl.types import NodeId
from edl.wire import local
from edl.wire.messages import NO_STATE, Holding, KeepWith, Source, Version, World

HAND_OVER_S = 10.0
"""How long a node that leaves waits for its peer to have its newest commit, beside what it writes to the directory."""


class Steward:
    """Implements what the desk and the agent's shell ask for."""

    def __init__(self, node: NodeId, keeper: Keeper, vault: Vault | None, log: Callable[[str], None]) -> None:
        self._node = node
        self._keeper = keeper
        self._vault = vault
        self._log = log
        self._sources: tuple[Source, ...] = ()
        self._finishing = 0
        self._finished = asyncio.Event()
        self.stored: tuple[Version, bool] = (NO_STATE, False)
        self.refused = ""

    # --- workers -----------------------------------------------------------------------------------------------------

    def want(self, slot: int, stream: str, size: int) -> Coroutine[Any, Any, Grant | Refusal]:
        """See ``desk.Keeper``."""
        return self._keeper.want(slot, stream, size)

    def committed(self, slot: int, message: local.Committed) -> Coroutine[Any, Any, Grant | Refusal]:
        """See ``desk.Keeper``."""
        return self._keeper.committed(slot, message)

    async def piece(self, slot: int, asked: local.Fetch) -> tuple[int, int]:
        """See ``desk.Keeper``."""
        version = Version(asked.era, asked.commit)
        return await self._keeper.piece(slot, asked.stream, version, asked.shard, self._sources)

    async def finish(self, message: local.Stored) -> None:
        """See ``desk.Keeper``."""
        version = Version(message.era, message.commit)
        self._finishing += 1
        try:
            await self._keeper.stored(version, message.folder)
            await self.look()
        finally:
            self._finishing -= 1
            if not self._finishing:
                self._finished.set()
                self._finished = asyncio.Event()

    async def settled(self) -> None:
        """Until what workers have written counts, or is known not to."""
        while self._finishing:
            await self._finished.wait()

    @property
    def busy(self) -> bool:
        """Whether something that workers have written is still being looked at."""
        return self._finishing > 0

    def restored(self, slot: int) -> None:
        """See ``desk.Keeper``."""
        self._keeper.restored(slot)

    def forget_worker(self, slot: int) -> None:
        """See ``desk.Keeper``."""
        self._keeper.forget_worker(slot)

    # --- the agent ---------------------------------------------------------------------------------------------------

    def holdings(self) -> tuple[Holding, ...]:
        """What this node has in memory."""
        return self._keeper.holdings()

    def enter(self, world: World) -> None:
        """A world begins in which this node has a part; position 0 writes what is saved."""
        self._sources = world.sources
        self._keeper.writer(world.position(self._node) == 0)
        self._keeper.trim(world.restore)

    def keep_with(self, peer: KeepWith) -> None:
        """Where copies of commits go from now on."""
        self._keeper.keep_with(peer.node, peer.host, peer.port)

    async def look(self) -> None:
        """See what lies in the checkpoint directory."""
        if self._vault is not None:
            try:
                newest = await asyncio.to_thread(self._vault.newest)
                self.stored = newest or (NO_STATE, False)
            except CheckpointError as error:
                self._refuse(error)

    async def load(self) -> None:
        """Read the newest usable commit from there; the next ``Ready`` says what it was, or why there is none."""
        try:
            version = await self._keeper.load()
        except EdlError as error:
            self._refuse(error)
        else:
            if version != self.stored[0]:
                self.stored = (version, False)

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

    async def save_what_is_left(self, reason: str) -> None:
        """Before the launcher ends: the newest commit goes to the checkpoint directory, or to the peer at least."""
        if not self._keeper.holdings():
            return
        await self._keeper.flush(reason)
        await self._keeper.handed_over(HAND_OVER_S)
