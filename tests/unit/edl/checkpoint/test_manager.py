"""The checkpoints of a node, as its agent uses them: what it reports about the directory."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from edl.checkpoint.manager import CheckpointManager
from edl.types import NodeId
from edl.wire.records import Holding, Version

NEWEST, OLDER = Version(1, 9), Version(1, 5)


class Memory:
    """In-memory checkpoints of a node whose directory lists ``NEWEST``, and from which ``OLDER`` can be read."""

    too_large = Version()

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.reads = asyncio.Event()

    async def look(self) -> tuple[Version, bool]:
        return NEWEST, False

    async def load(self) -> Version:
        await self.reads.wait()
        return OLDER

    def holdings(self) -> tuple[Holding, ...]:
        return (Holding(OLDER),) if self.whole else ()


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_read_is_reported_and_not_what_could_not_be(whole: bool) -> None:
    """Otherwise the Master could not tell that the node has tried. Workers read a sharded one."""

    async def scenario() -> None:
        memory = Memory(whole=whole)
        manager = CheckpointManager(NodeId("a"), cast(Any, memory), cast(Any, object()), print)
        await manager.look()
        assert manager.stored == (NEWEST, False)
        loading = asyncio.ensure_future(manager.load())
        await asyncio.sleep(0)
        assert manager.loading
        memory.reads.set()
        await loading
        assert (manager.stored, manager.loading) == ((OLDER, not whole), False)

    asyncio.run(scenario())
