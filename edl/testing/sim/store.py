"""The job's store: ``MemoryStore``, which follows etcd's rules, behind a network that delays, blocks or loses
answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from edl.errors import StoreError, StoreUnavailable
from edl.ports import Change, Condition, Operation, PrefixSnapshot
from edl.testing.memory_store import MemoryStore
from edl.testing.sim.loop import SimLoop
from edl.testing.sim.network import STORE, Network
from edl.testing.sim.timeline import ScheduledCall, Timeline
from edl.types import FencingToken

T = TypeVar("T")
LONGEST_WATCH_DELAY_S = 0.5
"""Longest extra delay of a watch's report, in seconds."""
AWAY_LOOK_S = 0.1


class _TimelineClock:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def now_s(self) -> float:
        """Virtual time in seconds."""
        return self._timeline.now_s


class SimStore:
    """The store. While ``away``, like etcd without a leader, it answers no request and lets no lease expire."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.memory = MemoryStore(_TimelineClock(timeline))
        self.away = False
        self.written: Callable[[], None] = lambda: None
        """Called after each change."""
        self.watches: dict[asyncio.Event, str] = {}
        """Prefixes of open watches, by the event that wakes each."""
        self._reported = self.memory.revision
        self._expiry: ScheduledCall | None = None

    def do(self, call: Callable[[MemoryStore], T]) -> T:
        """Run a call on the store now. Raises ``StoreError``."""
        try:
            return call(self.memory)
        finally:
            self._changed()

    def _changed(self) -> None:
        if self.memory.revision > self._reported:
            keys = [change.entry.key for change in self.memory.changes_since(self._reported)]
            self._reported = self.memory.revision
            for changed, prefix in self.watches.items():
                if not changed.is_set() and any(key.startswith(prefix) for key in keys):
                    changed.set()
            self.written()
        expiry_s = self.memory.next_expiry_s()
        if expiry_s is not None and (self._expiry is None or self._expiry.at_s > expiry_s):
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry = self.timeline.at(expiry_s, self._look)

    def _look(self) -> None:
        self._expiry = None
        if self.away:
            self._expiry = self.timeline.after(AWAY_LOOK_S, self._look)
        else:
            self.do(lambda memory: memory.tick())

    def come_back(self) -> None:
        """End an outage: every lease starts with its full TTL, and watches continue."""
        self.away = False
        self.memory.restart_leases()
        self.wake()

    def wake(self) -> None:
        """Wake every watch: a path for delayed changes may be open again."""
        for changed in self.watches:
            changed.set()

    def revoke(self, lease: int) -> None:
        """Revoke a lease at once."""
        self.do(lambda memory: memory.revoke_now(lease))

    def values(self, prefix: str) -> dict[str, bytes]:
        """Values by key under a prefix, read without the network."""
        return {entry.key: entry.value for entry in self.memory.peek(prefix)}

    def created(self, key: str) -> FencingToken:
        """Create revision of a key; 0 if it does not exist."""
        entry = self.memory.peek_one(key)
        return FencingToken(entry.create_revision if entry is not None else 0)

    def modified(self, key: str) -> int:
        """Revision of the last write of a key; 0 if it does not exist."""
        entry = self.memory.peek_one(key)
        return entry.mod_revision if entry is not None else 0


class StoreUser(Protocol):
    """The process that uses the store."""

    host: str
    loop: SimLoop

    def asks(self) -> None:
        """Count a request of this process."""
        ...


class StoreClient:
    """``Store`` for one process. A write without an answer may have taken effect, or may do so later."""

    def __init__(
        self,
        store: SimStore,
        network: Network,
        caller: StoreUser,
        writes: Callable[[Sequence[Operation]], Callable[[], None]] = lambda operations: lambda: None,
    ) -> None:
        """``writes`` is called when this process sends a write, and what it returns when that takes effect, before the
        process gets the answer."""
        self._store = store
        self._network = network
        self._caller = caller
        self._writes = writes
        self.renewed_s = caller.loop.time()
        """When the last granted renewal was requested, by the process's clock."""
        self.lease_s = 0.0
        """Duration of the last lease that the store granted; 0: none."""

    async def _ask(self, call: Callable[[MemoryStore], T], *, late: bool = False) -> T:
        """``late``: the call may take effect after its process has given up on it."""
        self._caller.asks()
        answer: asyncio.Future[T] = self._caller.loop.create_future()
        self._store.timeline.after(self._network.delay_s(), self._arrives, call, answer, late)
        return await answer

    def _arrives(self, call: Callable[[MemoryStore], T], answer: asyncio.Future[T], late: bool) -> None:
        if self._store.away or not self._network.open(self._caller.host, STORE):
            self._no_answer(answer)
            late_s = self._network.late_s() if late else None
            if late_s is not None:
                self._store.timeline.after(late_s, self._arrives_late, call)
            return
        try:
            result = self._store.do(call)
        except StoreError as error:
            self._store.timeline.after(self._network.delay_s(), self._returns, answer, None, error)
        else:
            self._store.timeline.after(self._network.delay_s(), self._returns, answer, result, None)

    def _arrives_late(self, call: Callable[[MemoryStore], Any]) -> None:
        """Runs a call on which its process has given up. A member without a leader refuses it."""
        if not self._store.away:
            with contextlib.suppress(StoreError):
                self._store.do(call)

    def _returns(self, answer: asyncio.Future[Any], result: Any, error: StoreError | None) -> None:
        if not self._network.open(STORE, self._caller.host):
            self._no_answer(answer)
        elif answer.done():
            return
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _no_answer(self, answer: asyncio.Future[Any]) -> None:
        self._store.timeline.after(self._network.rng.uniform(0.1, 0.6), self._gives_up, answer)

    @staticmethod
    def _gives_up(answer: asyncio.Future[Any]) -> None:
        if not answer.done():
            answer.set_exception(StoreUnavailable("no answer"))

    # --- Store --------------------------------------------------------------------------------------------------------

    async def read(self, prefix: str) -> PrefixSnapshot:
        """All keys under a prefix and the store's revision."""
        return await self._ask(lambda memory: memory.read_now(prefix))

    async def write(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
    ) -> int | None:
        """Apply all operations if all conditions hold; returns the revision, or ``None``."""
        takes_effect = self._writes(operations)

        def write(memory: MemoryStore) -> int | None:
            revision = memory.write_now(operations, conditions)
            if revision is not None:
                takes_effect()
            return revision

        return await self._ask(write, late=True)

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Change]:
        """Changes under a prefix after a revision, in order."""
        changed, seen, rng = asyncio.Event(), after_revision, self._network.rng
        self._store.watches[changed] = prefix
        try:
            while True:
                changed.clear()
                late = rng.random() < self._network.biases.late_watch
                late_s = rng.uniform(0.02, LONGEST_WATCH_DELAY_S) if late else 0.0
                await asyncio.sleep(self._network.delay_s() + late_s)
                if not self._store.away and self._network.both(STORE, self._caller.host):
                    changes = self._store.memory.changes_since(seen, prefix)
                    for change in changes:
                        seen = change.entry.mod_revision
                        yield change
                await changed.wait()
        finally:
            self._store.watches.pop(changed, None)

    async def grant_lease(self, ttl_s: float) -> int:
        """Create a lease; returns its id."""
        lease = await self._ask(lambda memory: memory.grant_now(ttl_s))
        self.lease_s = ttl_s
        return lease

    async def renew_lease(self, lease: int) -> float:
        """Renew a lease; returns the seconds it has left."""
        asked_s = self._caller.loop.time()
        left_s = await self._ask(lambda memory: memory.renew_now(lease))
        self.renewed_s = asked_s
        return left_s

    async def revoke_lease(self, lease: int) -> None:
        """End a lease and delete its keys."""
        await self._ask(lambda memory: memory.revoke_now(lease))

    async def close(self) -> None:
        """Does nothing: there is no connection to close."""
