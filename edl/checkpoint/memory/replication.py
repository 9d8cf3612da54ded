"""Copies commits to another node, and fetches parts from other nodes.

One low-priority thread sends, unless the processors are too busy for it or a worker or the end of the node waits. A
worker waits for what is fetched, so several parts are fetched at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from edl.checkpoint.memory.background import WaitingPool, in_pool, lower_priority
from edl.checkpoint.memory.buffer_table import SnapshotStream
from edl.checkpoint.memory.copy_policy import Copying, CopyTarget, needed
from edl.checkpoint.memory.holders import from_any
from edl.checkpoint.memory.snapshot_pool import MemorySnapshotPool
from edl.errors import CheckpointError
from edl.ports import Copies, Label
from edl.tasks import AGAIN_S, end
from edl.types import NodeId
from edl.wire.records import Holding, Source, Version

log = logging.getLogger(__name__)

FETCHES = 4
"""Parts fetched at once."""
LEAVING_TRIES = 10
"""Attempts of a leaving node to send its commit to a peer that does not accept it; the peer may have left as well."""
COPIES_LAG = 2
"""Commits by which a copy may be older than the newest commit and still count: copies are sent while training."""
SLOW_COPY_S = 2.0
SLOW_COPY_BYTES_PER_S = 50e6
"""A copy that takes longer than ``SLOW_COPY_S`` plus its size at this rate had too little processor time: on a machine
with more busy processes than processors, a low-priority thread may run for a few milliseconds a second."""
COPY_TIMEOUT_S = 10.0
"""Seconds that a worker with a sharded state waits until its previous commit is on another node as well."""


@dataclass(frozen=True, slots=True)
class _Fetching:
    """A transfer in progress, and where it comes from."""

    task: asyncio.Task[None]
    sources: tuple[Source, ...]


class CommitReplication:
    """Replication of one node. Call all methods on the event loop."""

    def __init__(
        self,
        node: NodeId,
        snapshot_pool: MemorySnapshotPool,
        copies: Copies,
        copying: Copying,
        one_more: Callable[[SnapshotStream, int], Awaitable[None]],
    ) -> None:
        """``one_more(stream, size)``: makes the buffer in which commits go on while one is read."""
        self._node = node
        self._one_more = one_more
        self._snapshot_pool = snapshot_pool
        self._copies = copies
        self._copying = copying
        self._members: frozenset[NodeId] = frozenset()
        self._sharing: dict[SnapshotStream, frozenset[NodeId]] = {}
        """Other nodes whose workers keep the same part of a sharded state."""
        self._leaving = False
        self._peer: CopyTarget | None = None
        self._peer_named = asyncio.Event()
        """The Master has named a node, or said that there is none."""
        self._patient = True
        """False after a peer was too slow or unreachable: workers no longer wait for it."""
        self._waiting = 0
        """Workers that wait for a copy."""
        self._copied: dict[SnapshotStream, Holding] = {}
        self._warned = self._failed = False
        self._is_starved = False
        """A copy at low priority took too long: to this peer, the others are sent at normal priority."""
        self._to_send = asyncio.Event()
        self._sent = asyncio.Event()
        self._fetches: dict[tuple[Version, int], _Fetching] = {}
        self._fetchers = WaitingPool(FETCHES, "edl-fetch")
        self._sender = WaitingPool(1, "edl-replica", lower_priority)
        self._task = asyncio.create_task(self._replicate())

    def start(self, host: str, port: int) -> int:
        """Start serving other nodes; returns the port. Raises ``PortInUse``."""
        return self._copies.start(self._snapshot_pool, host, port)

    async def close(self) -> None:
        """End all transfers and stop serving other nodes."""
        for task in (self._task, *(fetching.task for fetching in self._fetches.values())):
            await end(task)
        await asyncio.to_thread(self._copies.stop)
        for pool in (self._fetchers, self._sender):
            pool.shutdown(wait=False, cancel_futures=True)

    # --- to another node ---------------------------------------------------------------------------------------------

    def enter(self, members: Collection[NodeId]) -> None:
        """Enter a world of these nodes, which decides whether copies are needed: those of a part that another member
        keeps are not."""
        self._members = frozenset(members)
        self.look()

    def committed(self, stream: SnapshotStream, others: Collection[NodeId]) -> None:
        """Note that a worker has committed. ``others``: other nodes whose workers keep the same part."""
        self._sharing[stream] = frozenset(others) - {self._node}
        self.look()

    def keep_with(self, node: NodeId, host: str, port: int) -> None:
        """Set the node that receives copies; see ``MemoryCheckpoints.keep_with``."""
        never = self._copying is Copying.NEVER
        self._peer = CopyTarget(node, host, port) if node and node != self._node and not never else None
        self._copied.clear()  # if the same peer is named again, it reports what it already has
        self._warned = self._is_starved = False
        self._patient = True
        self._peer_named.set()
        self.look()

    def look(self) -> None:
        """Check whether there is something to send."""
        self._to_send.set()

    def holders(self) -> int:
        """The smallest number of nodes that hold one of this node's newest commits in memory, this node included; 0 if
        it has none."""
        return min((self._count_holders(*one) for one in self._snapshot_pool.own()), default=0)

    def _count_holders(self, stream: SnapshotStream, holding: Holding) -> int:
        found = self._holders(stream, holding.shards)
        copied = self._copied.get(stream)
        if self._peer is None or copied is None or holding.version.commit - copied.version.commit > COPIES_LAG:
            return len(found)
        return len(found | {self._peer.node})

    def copies(self, stream: SnapshotStream, shards: int) -> bool:
        """Whether this stream's commits, of ``shards`` parts each, are copied now."""
        return self._peer is not None and self._is_needed(stream, shards)

    def _is_needed(self, stream: SnapshotStream, shards: int) -> bool:
        return needed(self._copying, len(self._holders(stream, shards)))

    def _holders(self, stream: SnapshotStream, shards: int) -> frozenset[NodeId]:
        """The nodes of the world whose workers keep the same part, this node included."""
        others = self._members if shards == 1 else self._sharing.get(stream, frozenset()) & self._members
        return others | {self._node}

    async def wait_for_copy(self, stream: SnapshotStream) -> None:
        """Wait until the newest commit of this stream is on the other node, or that node turns out to be too slow.

        All parts of a sharded state must exist somewhere for the same commit. While some workers have made commit N,
        a worker that is lost had its buffer for N-1, and so a copy of N-2. The others still have that: they keep N,
        N-1, and N-2 until they ask for the buffer for N+1.
        """

        async def copied() -> None:
            while self._patient and (self._peer is not None or self._awaits_peer) and stream in self._behind():
                if self._peer is None:
                    await self._peer_named.wait()
                else:
                    await self._sent_once_more()

        self._waiting += 1
        try:
            await asyncio.wait_for(copied(), COPY_TIMEOUT_S)
        except asyncio.TimeoutError:
            log.warning(
                "State: the peer has had no copy of the newest commit for %g s; training continues without waiting",
                COPY_TIMEOUT_S,
            )
            self._patient = False
        finally:
            self._waiting -= 1

    @property
    def _awaits_peer(self) -> bool:
        """Whether the Master is about to name the node that receives copies."""
        alone = not self._members - {self._node}
        return not (alone or self._copying is Copying.NEVER or self._peer_named.is_set())

    async def copied_before_leaving(self, timeout_s: float) -> bool:
        """Wait for the last copies before leaving; see ``MemoryCheckpoints.copied_before_leaving``."""
        self._leaving = True

        async def wait() -> None:
            failures = 0
            while self._behind() and self._peer is not None and failures < LEAVING_TRIES:
                await self._sent_once_more()
                failures += self._failed

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), timeout_s)
        return not self._behind()

    async def _sent_once_more(self) -> None:
        self._sent.clear()
        self.look()
        await self._sent.wait()
        if self._failed:
            await asyncio.sleep(AGAIN_S)

    async def _replicate(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            self._failed = False
            while (behind := self._behind()) and (peer := self._peer) is not None and not self._failed:
                for stream in behind:
                    self._failed = not await self._copy(stream, peer) or self._failed
            self._sent.set()  # after a failure, retried with the next commit or on request

    def _behind(self) -> tuple[SnapshotStream, ...]:
        """Streams whose newest commit is not on the other node."""
        return tuple(
            stream
            for stream, holding in self._snapshot_pool.own()
            if self._copied.get(stream) != holding and (self._leaving or self._is_needed(stream, holding.shards))
        )

    @property
    def _is_urgent(self) -> bool:
        """A node that leaves, or a worker that waits, does not wait behind whatever else keeps the processors busy."""
        return self._leaving or self._waiting > 0

    async def _copy(self, stream: SnapshotStream, peer: CopyTarget) -> bool:
        size = self._snapshot_pool.newest_size(stream)
        if not self._is_urgent and size:
            await self._one_more(stream, size)
        loan = self._snapshot_pool.borrow_newest(stream)
        if loan is None:
            return True

        normal_priority = self._is_urgent or self._is_starved

        def put() -> None:
            try:
                self._copies.put(peer.host, peer.port, loan, urgent=normal_priority)
            finally:
                loan.release()

        clock = asyncio.get_running_loop().time
        began_at = clock()
        try:
            await in_pool(self._fetchers if normal_priority else self._sender, put)
        except Exception as error:  # noqa: BLE001 - any failure costs a copy, but must not end the task
            if not self._warned:
                log.warning("State: cannot copy commits to node %s: %s. Trying again at each commit", peer.node, error)
            self._warned = True
            return False
        finally:
            if peer is self._peer and clock() - began_at > SLOW_COPY_S + size / SLOW_COPY_BYTES_PER_S:
                self._is_starved = True
        if self._warned:
            log.info("State: copying commits to node %s works again", peer.node)
        self._warned = False
        if peer == self._peer:
            self._copied[stream] = loan.held.holding
        return True

    # --- from another node -------------------------------------------------------------------------------------------

    async def fetch(self, version: Version, shard: int, sources: Sequence[Source]) -> None:
        """Fetch a part of a commit; concurrent requests for the same part share one transfer. Raises
        ``CheckpointError`` that names everything that was tried."""
        key = (version, shard)
        while (others := self._fetches.get(key)) is not None:
            try:
                await asyncio.shield(others.task)
                return
            except CheckpointError:
                if set(sources) <= set(others.sources):
                    raise
                # That transfer was begun in an earlier round, whose nodes may be gone.
        task = asyncio.create_task(self._fetch(version, shard, sources))
        self._fetches[key] = _Fetching(task, tuple(sources))
        task.add_done_callback(lambda _: self._fetches.pop(key, None))
        await asyncio.shield(task)

    async def _fetch(self, version: Version, shard: int, sources: Sequence[Source]) -> None:
        stream = SnapshotStream.loaded(f"{version.era}.{version.commit}.{shard}")

        def arriving(label: Label) -> Any:
            return self._snapshot_pool.fetched(stream, label)

        def get(source: Source) -> None:
            self._copies.get(source.host, source.port, version, shard, arriving)

        await in_pool(self._fetchers, from_any, self._node, version, shard, sources, get)
