"""Keeps the state of this node's workers in the launcher's memory, where it outlives them.

Workers copy their commits into memory files that the keeper makes. From there they go to another node, to the
checkpoint directory, and back to workers that begin anew. What takes long is done in threads: those that work while
training goes on step back for it, those that somebody waits for do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import platform
import threading
import zlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from edl.agent.shelf import Refusal, Room, Stream, Usage
from edl.agent.stock import Loan, Stock
from edl.errors import CheckpointError, ProtocolError
from edl.ports import Copies, Label, Vault
from edl.tasks import AGAIN_S, end
from edl.types import NodeId
from edl.wire.local import OWN, STATE, Committed
from edl.wire.messages import Holding, Source, Version

T = TypeVar("T")
log = logging.getLogger(__name__)

FETCHES = 4
"""At a time."""
COPY_PATIENCE_S = 10.0
"""How long a worker with a sharded state waits until the commit before its last one lies on another node as well."""
BACKGROUND_NICENESS = 18
"""Little enough for training not to feel it; more would let a busy machine stop the thread for a second, perhaps while
it keeps the interpreter from the launcher's other work."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13


@dataclass(frozen=True, slots=True)
class Grant:
    """A buffer for a worker's next commit."""

    buffer: int
    size: int
    descriptor: int | None
    """The caller's to close, when this worker has not had the buffer before."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The node that holds a copy of this one's commits."""

    node: NodeId
    host: str
    port: int


@dataclass(slots=True)
class _Slot:
    """What one worker has been given."""

    buffers: set[int]
    loans: list[Loan]
    gone: bool = False


class Keeper:
    """The state of one node's workers. Everything is called on the event loop."""

    def __init__(
        self,
        node: NodeId,
        job: str,
        *,
        limit_bytes: int,
        copies: Copies,
        vault: Vault | None,
        on_kept: Callable[[Version, str, str, float], None],
    ) -> None:
        """``on_kept(version, where, error, took_s)``: a commit lies in the checkpoint directory, or was not written."""
        self._node = node
        self._copies = copies
        self._vault = vault
        self._on_kept = on_kept
        self._loop = asyncio.get_running_loop()
        self._released = asyncio.Event()
        self._stock = Stock(node, job, limit_bytes, self._let_go)
        self._slots: dict[int, _Slot] = {}
        self._turns: dict[Stream, asyncio.Lock] = {}
        self._parts: dict[Stream, int] = {}
        self._fetches: dict[tuple[Version, int], asyncio.Task[None]] = {}
        self._maker = ThreadPoolExecutor(2, "edl-memory")
        self._urgent = ThreadPoolExecutor(FETCHES, "edl-keeper")
        self._sender = ThreadPoolExecutor(1, "edl-replica", _step_back)
        self._disk = ThreadPoolExecutor(1, "edl-persist", _step_back)
        self._peer: Peer | None = None
        self._given_up: Peer | None = None
        """A peer that was too slow or out of reach: nobody waits for it any more."""
        self._handed: dict[Stream, Holding] = {}
        self._complained = self._failed = False
        self._said_nowhere = False
        self._to_send = asyncio.Event()
        self._sent = asyncio.Event()
        self._writer = False
        self._wanted: Version | None = None
        self._to_save = asyncio.Event()
        self._persisted: dict[Holding, str] = {}
        self._writing = asyncio.Lock()
        self._tasks = [asyncio.create_task(self._replicate()), asyncio.create_task(self._persist_what_is_wanted())]

    def start(self, host: str, port: int = 0) -> int:
        """Serve other nodes; returns the port. Raises ``PortInUse``."""
        return self._copies.start(self._stock, host, port)

    async def close(self) -> None:
        """End all that is under way, and let go of the memory."""
        for task in (*self._tasks, *self._fetches.values()):
            await end(task)
        await asyncio.to_thread(self._copies.stop)
        for pool in (self._maker, self._urgent, self._sender, self._disk):
            pool.shutdown(wait=False, cancel_futures=True)
        for slot in tuple(self._slots):
            self.forget_worker(slot)
        self._stock.close()

    # --- workers -----------------------------------------------------------------------------------------------------

    def want(self, slot: int, stream: str, size: int) -> Coroutine[Any, Any, Grant | Refusal]:
        """A buffer for the next commit of the slot's present worker; waits for one while all are being read."""
        return self._grant(slot, self._slot(slot), Stream.of_worker(slot, stream), size)

    async def _grant(self, slot: int, worker: _Slot, line: Stream, size: int) -> Grant | Refusal:
        told = False
        async with self._turns.setdefault(line, asyncio.Lock()):
            while not worker.gone:
                released = self._released
                room = await self._run(self._maker, self._room, line, size)
                if isinstance(room, Room):
                    return self._granted(worker, room)
                if not room.later:
                    return room
                if not told:
                    log.warning("State: slot %d waits with its next commit: %s", slot, room.why)
                    told = True
                await released.wait()
        return Refusal("the worker is gone")

    def committed(self, slot: int, message: Committed) -> Coroutine[Any, Any, Grant | Refusal]:
        """The worker has filled its buffer: that counts at once. What is returned waits for the next buffer.

        Raises ``ProtocolError`` when the buffer is not the worker's or does not hold what it says.
        """
        line = Stream.of_worker(slot, message.stream)
        holding = Holding(Version(message.era, message.commit), message.shard, message.shards)
        problem = self._stock.check(line, message.buffer, message.size, holding)
        if not problem:
            try:
                self._stock.fill(line, message.buffer, message.size, holding)
            except CheckpointError as error:
                problem = str(error)
        if problem:
            raise ProtocolError(f"slot {slot}, commit {message.commit}: {problem}")
        self._parts[line] = message.shards
        self.restored(slot)
        if message.stream == STATE:
            self._stock.outgrown(line)
            self._to_send.set()
            if message.save and message.shards == 1 and self._writer:
                self._wanted = holding.version
                self._to_save.set()
            if message.shards > 1:
                return self._granted_when_copied(slot, message, holding.version)
        return self.want(slot, message.stream, message.size)

    async def _granted_when_copied(self, slot: int, message: Committed, version: Version) -> Grant | Refusal:
        """Of a sharded state every part has to be somewhere at the same commit. Nodes keep their last two; so that the
        copies of a lost one are no older, no worker gets further ahead of its copy than that."""
        line = Stream.of_worker(slot, message.stream)

        async def copied() -> None:
            while self._peer is not None and self._peer is not self._given_up:
                handed = self._handed.get(line)
                if handed is not None and handed.version.commit >= version.commit - 1:
                    return
                self._sent.clear()
                self._to_send.set()
                await self._sent.wait()
                if self._failed:
                    await asyncio.sleep(AGAIN_S)

        try:
            await asyncio.wait_for(copied(), COPY_PATIENCE_S)
        except asyncio.TimeoutError:
            log.warning("State: the copies on the other node lag behind; training goes on without waiting for them")
            self._given_up = self._peer
        return await self.want(slot, message.stream, message.size)

    def restored(self, slot: int) -> None:
        """The worker does not read any more what ``piece`` gave it."""
        worker = self._slots.get(slot)
        while worker is not None and worker.loans:
            worker.loans.pop().release()

    def forget_worker(self, slot: int) -> None:
        """The worker's process is gone, and all it said has been heard."""
        self.restored(slot)
        worker = self._slots.pop(slot, None)
        if worker is not None:
            worker.gone = True
        self._stock.abandon_slot(slot)
        self._let_go()

    def piece(
        self, slot: int, stream: str, version: Version, shard: int, sources: Sequence[Source] = ()
    ) -> Coroutine[Any, Any, tuple[int, int]]:
        """A descriptor (the caller's to close, to be read only) and the size of a part of a commit.

        From this node's memory or from one of ``sources``. It stays as it is until ``restored``, the worker's next
        commit or its end. Raises ``CheckpointError``, naming all that was tried.
        """
        return self._piece(slot, self._slot(slot), stream, version, shard, sources)

    async def _piece(
        self, slot: int, worker: _Slot, stream: str, version: Version, shard: int, sources: Sequence[Source]
    ) -> tuple[int, int]:
        if stream == STATE:
            loan = self._stock.borrow(version, shard)
            if loan is None:
                await self._fetched(version, shard, sources)
                loan = self._stock.borrow(version, shard)
            if loan is None:
                raise CheckpointError(f"shard {shard} of {version} came, and was given up at once")
        else:
            loan = self._stock.borrow_own(slot, stream, version)
            if loan is None:
                raise CheckpointError(f"slot {slot} has no values of its own of {version}")
        if worker.gone:
            loan.release()
            raise CheckpointError("the worker is gone")
        worker.loans.append(loan)
        return loan.read_only(), loan.held.size

    # --- what there is -----------------------------------------------------------------------------------------------

    def holdings(self) -> tuple[Holding, ...]:
        """Every part of the shared state that is complete in this node's memory."""
        return self._stock.holdings()

    def usage(self) -> Usage:
        """Where the memory goes."""
        return self._stock.usage()

    def trim(self, restore: Version) -> None:
        """A world that this node is in begins from this commit: let go of what that makes useless."""
        if restore != Version():
            self._stock.trim(restore)

    def drop_replicas(self, except_owners: Collection[NodeId]) -> None:
        """Forget the copies of all other nodes' state but these."""
        self._stock.drop_replicas(except_owners)

    # --- other nodes -------------------------------------------------------------------------------------------------

    def keep_with(self, node: NodeId, host: str, port: int) -> None:
        """From now on send a copy of each commit there, the newest at once; an empty ``node`` means to none."""
        self._peer = Peer(node, host, port) if node and node != self._node else None
        self._handed.clear()  # if it is told again: what is there already is not sent again
        self._complained = False
        self._to_send.set()

    async def handed_over(self, timeout_s: float) -> bool:
        """Wait until the newest commits of this node's workers are on the other one, and say whether they are."""

        async def wait() -> None:
            while self._behind() and self._peer is not None:
                self._sent.clear()
                self._to_send.set()
                await self._sent.wait()
                if self._failed:
                    await asyncio.sleep(AGAIN_S)

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), timeout_s)
        return not self._behind()

    async def _replicate(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            self._failed = False
            while (behind := self._behind()) and (peer := self._peer) is not None and not self._failed:
                for stream in behind:
                    self._failed = not await self._hand_over(stream, peer) or self._failed
            self._sent.set()  # after a failure again with the next commit, or when somebody asks

    def _behind(self) -> tuple[Stream, ...]:
        """Streams whose newest commit the other node does not have."""
        return tuple(stream for stream, holding in self._stock.own() if self._handed.get(stream) != holding)

    async def _hand_over(self, stream: Stream, peer: Peer) -> bool:
        loan = self._stock.borrow_newest(stream)
        if loan is None:
            return True

        def put() -> None:
            try:
                self._copies.put(peer.host, peer.port, loan)
            finally:
                loan.release()

        try:
            await self._run(self._sender, put)
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs a copy and not the keeper
            if not self._complained:
                log.warning("State: no copy on node %s: %s. It is tried again with each commit", peer.node, error)
            self._complained = True
            return False
        if self._complained:
            log.info("State: node %s has a copy again", peer.node)
        self._complained = False
        if peer == self._peer:
            self._handed[stream] = loan.held.holding
        return True

    async def _fetched(self, version: Version, shard: int, sources: Sequence[Source]) -> None:
        """Have a part of a commit brought here; whoever asks for the same one meanwhile waits for the same."""
        key = (version, shard)
        task = self._fetches.get(key)
        if task is None:
            task = asyncio.create_task(self._fetch(version, shard, sources))
            self._fetches[key] = task
            task.add_done_callback(lambda _: self._fetches.pop(key, None))
        await asyncio.shield(task)

    async def _fetch(self, version: Version, shard: int, sources: Sequence[Source]) -> None:
        stream = Stream.loaded(f"{version.era}.{version.commit}.{shard}")
        mine = [source for source in sources if source.shard == shard and source.node != self._node]
        # Many newcomers are told the same sources: each begins at another one.
        first = zlib.crc32(self._node.encode()) % len(mine) if mine else 0
        causes = []

        def arriving(label: Label) -> Any:
            return self._stock.incoming(stream, label)

        for source in (*mine[first:], *mine[:first]):
            try:
                await self._run(self._urgent, self._copies.get, source.host, source.port, version, shard, arriving)
                return
            except CheckpointError as error:
                causes.append(f"node {source.node}: {error}")
                log.info("State: node %s did not give shard %d of %s: %s", source.node, shard, version, error)
        raise CheckpointError(f"no node gave shard {shard} of {version}: {'; '.join(causes) or 'none is known'}")

    # --- the checkpoint directory ------------------------------------------------------------------------------------

    def writer(self, is_writer: bool) -> None:
        """Whether this node is the one that writes what its workers save."""
        self._writer = is_writer

    async def load(self) -> Version:
        """Hold the newest usable checkpoint; ``Version()`` when there is none. One that workers have to read themselves
        is only named. Raises ``CheckpointError``."""
        vault = self._vault
        if vault is None:
            return Version()
        newest = await self._run(self._urgent, vault.newest)
        if newest is None or newest[1] or any(held.version == newest[0] for held in self.holdings()):
            return Version() if newest is None else newest[0]
        holding = await self._run(self._urgent, self._stock.load, lambda allocate: vault.read(None, allocate))
        self._persisted[holding] = ""
        return holding.version

    async def flush(self, reason: str, version: Version | None = None) -> Version | None:
        """Write the newest state that this node holds, or the one of ``version``, if the checkpoint directory lacks it,
        whoever the writer is.

        Returns which commit lies there now, None if none does; of a sharded state only the parts that are here.
        """
        here = (held for held in self.holdings() if held.version == version)
        newest = self._stock.newest() if version is None else next(here, None)
        if newest is None or self._vault is None:
            return None
        parts = [held for held in self.holdings() if held.version == newest.version and held.shards == newest.shards]
        missing = [holding for holding in parts if holding not in self._persisted]
        if missing:
            log.info("State: commit %d goes to the checkpoint directory: %s", newest.version.commit, reason)
        for holding in missing:
            await self._persist(holding, once=True)
        return newest.version if all(holding in self._persisted for holding in parts) else None

    async def stored(self, version: Version, folder: str) -> None:
        """The workers have written their parts of a checkpoint into this folder: make it count."""
        if self._vault is not None:
            vault = self._vault
            async with self._writing:
                await self._kept(version, lambda: vault.finish(folder, version))

    async def _persist_what_is_wanted(self) -> None:
        while True:
            await self._to_save.wait()
            self._to_save.clear()
            if self._wanted is not None:
                holding, self._wanted = Holding(self._wanted), None
                await self._persist(holding)

    async def _persist(self, holding: Holding, *, once: bool = False) -> None:
        """Write it, or what has taken its place meanwhile. ``once``: unless that has been done by the time."""
        vault = self._vault
        if vault is None:
            if not self._said_nowhere:
                self._on_kept(
                    holding.version, "", "there is no checkpoint directory: name one with --checkpoint-dir", 0.0
                )
            self._said_nowhere = True
            return
        async with self._writing:
            loan = self._stock.borrow(holding.version, holding.shard) or self._stock.borrow_newer(holding)
            if loan is None:
                self._on_kept(holding.version, "", "it is not held any more", 0.0)
                return
            taken = loan.held.holding
            if once and taken in self._persisted:
                loan.release()
                return

            def write() -> str:
                try:
                    return vault.write(taken.version, loan.view, taken.shard, taken.shards)
                finally:
                    loan.release()

            where = await self._kept(taken.version, write)
            if where is not None:
                older = [held for held in self._persisted if held.version < taken.version]
                for held in older:
                    del self._persisted[held]
                self._persisted[taken] = where

    async def _kept(self, version: Version, write: Callable[[], str]) -> str | None:
        begun_s = self._loop.time()
        try:
            where = await self._run(self._disk, write)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                log.exception("State: commit %d was not written", version.commit)
            self._on_kept(version, "", str(error) or type(error).__name__, 0.0)
            return None
        self._on_kept(version, where, "", self._loop.time() - begun_s)
        return where

    # --- inside ------------------------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> _Slot:
        return self._slots.setdefault(slot, _Slot(set(), []))

    def _room(self, line: Stream, size: int) -> Room | Refusal:
        # What only this slot has must not run ahead of what the others can restore, so there the one before stays too.
        keep = line.name == OWN or self._parts.get(line, 1) > 1
        return self._stock.room(line, size, keep_previous=keep)

    def _granted(self, worker: _Slot, room: Room) -> Grant | Refusal:
        if worker.gone:
            return Refusal("the worker is gone")
        descriptor = None if room.buffer in worker.buffers else self._stock.duplicate(room.buffer)
        worker.buffers.add(room.buffer)
        return Grant(room.buffer, room.capacity, descriptor)

    def _let_go(self) -> None:
        """A reader has let go of a buffer. Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
        """In a thread, which comes to its end also when the caller is cancelled."""
        future = self._loop.run_in_executor(pool, work, *arguments)
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(future)


def _step_back() -> None:
    """Let everything else on the machine go before this thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_IDLE)
