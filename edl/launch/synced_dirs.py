"""The synchronised directories of one launcher: connects ``DirectorySync`` to the store, the agent and the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from edl.adapters.clock import SystemClock, wall_clock_ns
from edl.adapters.file_copies import TcpFileCopies
from edl.checkpoint.memory.background import in_thread
from edl.errors import ProtocolError, StoreError
from edl.launch.settings import SyncSettings
from edl.ports import KeyValue, Store
from edl.rendezvous.phrases import amount, count
from edl.sync_dir.service import DirectorySync, PeerAddress
from edl.sync_dir.tree import SyncedTree
from edl.tasks import BackgroundTasks
from edl.types import NodeId
from edl.wire import plain
from edl.wire.keys import JobKeys
from edl.wire.records import NodeInfo, World

T = TypeVar("T")

AGAIN_S = 1.0
"""Pause in seconds before the store is read again after an error."""
LEAVE_S = 15.0
"""Seconds without progress after which a leaving launcher waits no longer for the others to fetch its files."""
JOIN_S = 15.0
"""The same for a joining one, which waits again before its workers start."""


class SyncedDirs:
    """Implements ``SyncedFiles`` of the agent and ``Sidecar`` of the launcher. Call all methods on the event loop."""

    def __init__(
        self, settings: SyncSettings, node: NodeId, life: str, token: Callable[[], str], log: Callable[[str], None]
    ) -> None:
        """``life``: identifies this launcher. ``token``: returns the job's token."""
        loop, clock = asyncio.get_running_loop(), SystemClock()

        def say(text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this launcher ends
                loop.call_soon_threadsafe(log, text)

        self._settings = settings
        self._node = node
        self._log = log
        self._clock = clock
        tree = SyncedTree(settings.roots, node, life, wall_clock_ns, say)
        self.sync = DirectorySync(node, life, tree, TcpFileCopies(token, clock), clock, say)
        self._tasks = BackgroundTasks()
        self._met = asyncio.Event()
        """The other nodes are known."""
        self._leaving = threading.Event()
        """Set when ``hurry`` ends the wait for other nodes."""

    async def open(self) -> None:
        """Look at what is there. Raises ``CheckpointError`` if a directory cannot be used."""
        await in_thread("edl-sync-open", self.sync.open)
        total = self.sync.total
        where = ", ".join(self._settings.roots)
        self._log(f"--sync-dir: {where} ({_files(*total)}) is kept alike on all nodes")

    def begin(self, store: Store, keys: JobKeys) -> None:
        """Begin to copy: this node is registered, and finds the others in the store."""
        self._tasks.begin(self._watch(store, keys))

    async def _watch(self, store: Store, keys: JobKeys) -> None:
        while True:
            try:
                snapshot = await store.read(keys.nodes)
                self.sync.meet(_addresses(snapshot.entries))
                self._met.set()
                async for _ in store.watch(keys.nodes, snapshot.revision):
                    break  # nodes come and go rarely: read them all again
            except (StoreError, RuntimeError):
                await asyncio.sleep(AGAIN_S)

    async def caught_up(self) -> None:
        """Fetch what the other nodes have, before this node takes part: they train meanwhile."""
        await self._met.wait()
        await self._blocking(lambda cancelled: self.sync.caught_up(JOIN_S, cancelled))

    async def alike(self, world: World, started: int) -> None:
        """See ``edl.agent.deps.SyncedFiles``."""
        members, limit_s = [member.node for member in world.members], self._settings.timeout_s
        here = world.member(self._node)
        writing = here is not None and here.slots > started
        begun_s = self._clock.now_s()
        await self._blocking(
            lambda cancelled: self.sync.alike(world.round, members, limit_s, cancelled, writing=writing)
        )
        took_s, total = self._clock.now_s() - begun_s, self.sync.total
        if len(members) > 1:
            self._log(f"--sync-dir: {_files(*total)} alike on {len(members)} nodes, after {took_s:.1f} s")

    async def _blocking(self, work: Callable[[threading.Event], T]) -> T:
        cancelled = threading.Event()
        try:
            return await in_thread("edl-sync-wait", lambda: work(cancelled))
        finally:
            cancelled.set()

    def drain(self) -> None:
        """Go on: other nodes fetch files from here until ``leave`` ends."""

    def hurry(self) -> None:
        """End the wait for other nodes."""
        self._leaving.set()

    async def leave(self) -> None:
        """Stop, once the other nodes have the newest files from here."""
        without = await in_thread("edl-sync-leave", lambda: self.sync.passed_on(LEAVE_S, self._leaving))
        if without:
            self._log(f"--sync-dir: not all files have been exchanged with {without}")
        self._tasks.drop()
        await in_thread("edl-sync-close", self.sync.close)


def _addresses(entries: Iterable[KeyValue]) -> list[PeerAddress]:
    """The addresses of the nodes with these keys, without those that cannot be read: the Master names them."""
    found = []
    for entry in entries:
        with contextlib.suppress(ProtocolError):
            info = plain.loads(NodeInfo, entry.value)
            found.append(PeerAddress(info.node, info.host, info.state_port))
    return found


def _files(number: int, size: int) -> str:
    return f"{count(number, 'file')}, {amount(size)}"
