"""Synchronised directories of a launcher: how it finds the other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from edl.launch.settings import SyncSettings
from edl.launch.synced_dirs import SyncedDirs
from edl.ports import Put
from edl.sync_dir.service import PeerAddress
from edl.testing.clock import FakeClock
from edl.testing.memory_store import MemoryStore
from edl.types import NodeId
from edl.wire import plain
from tests.support.master_fixture import until
from tests.unit.edl.launch.test_registration import KEYS, info


def test_an_unreadable_key_blinds_nobody(tmp_path: Path) -> None:
    """The node would wait for the others before it starts its workers, for ever."""

    async def scenario() -> None:
        store = MemoryStore(FakeClock())
        store.write_now([Put(KEYS.node(NodeId("b")), plain.dumps(info("b"))), Put(f"{KEYS.nodes}c", b"not ours")])
        synced = SyncedDirs(SyncSettings((str(tmp_path),)), NodeId("a"), "life", lambda: "token", print)
        met: list[str] = []

        def meet(addresses: Collection[PeerAddress]) -> None:
            met.extend(one.node for one in addresses)

        synced.sync.meet = meet  # type: ignore[method-assign]
        synced.begin(store, KEYS)
        await until(lambda: bool(met))
        assert met == ["b"]
        synced._tasks.drop()
        synced.sync.close()

    asyncio.run(scenario())
