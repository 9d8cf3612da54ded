"""A store in memory with etcd's rules, for tests and simulations.

All logic is in plain methods whose names end in ``_now``, which a simulator calls without asyncio. The coroutines of
``Store`` only wrap them. Time comes from a ``Clock``: a lease expires at the first access (any call, or ``tick``) at or
after its end. Leases expire in the order of their ends, each as a revision of its own, as in etcd.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from edl.errors import LeaseLost, StoreError, StoreUnavailable
from edl.ports import (
    Change,
    ChangeKind,
    Clock,
    Condition,
    CreatedAt,
    Delete,
    KeyValue,
    Operation,
    PrefixSnapshot,
    Put,
)

MAX_OPERATIONS = 128
"""etcd's limit on the operations of one transaction (``--max-txn-ops``)."""


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    ends_s: float
    keys: set[str] = field(default_factory=set)


def _order(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


class MemoryStore:
    """``Store`` in memory. ``shortest_ttl_s``: the shortest lease that it grants, in seconds.

    While ``available`` is False, every call raises ``StoreUnavailable``, and watches wait. Leases continue to run, and
    expire at the next access.
    """

    def __init__(self, clock: Clock, *, shortest_ttl_s: float = 1.0) -> None:
        self._available = True
        self._clock = clock
        self._shortest_ttl_s = shortest_ttl_s
        self._revision = 1
        self._compacted = 0
        self._entries: dict[str, KeyValue] = {}
        self._history: list[Change] = []
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._closed = False
        self._watchers: dict[asyncio.Event, None] = {}

    # --- plain methods -----------------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """Whether the store answers; it can be set."""
        return self._available

    @available.setter
    def available(self, value: bool) -> None:
        self._available = value
        self._wake_watchers()

    @property
    def revision(self) -> int:
        """Revision of the last change."""
        return self._revision

    def tick(self) -> list[int]:
        """Expire overdue leases; returns their ids."""
        now_s = self._clock.now_s()
        over = sorted((lease.ends_s, number) for number, lease in self._leases.items() if lease.ends_s <= now_s)
        for _, number in over:
            self._end_lease(number)
        return [number for _, number in over]

    def next_expiry_s(self) -> float | None:
        """Time at which the next lease expires unless it is renewed; None without leases."""
        return min((lease.ends_s for lease in self._leases.values()), default=None)

    def restart_leases(self) -> None:
        """Restart the full term of every lease, as etcd does when a new leader is elected."""
        for lease in self._leases.values():
            lease.ends_s = self._clock.now_s() + lease.ttl_s

    def peek(self, prefix: str) -> list[KeyValue]:
        """Entries under a prefix, without expiring overdue leases."""
        return [entry for key, entry in self._entries.items() if key.startswith(prefix)]

    def peek_one(self, key: str) -> KeyValue | None:
        """The entry of a key, without expiring overdue leases."""
        return self._entries.get(key)

    def read_now(self, prefix: str) -> PrefixSnapshot:
        """``Store.read`` as a synchronous call."""
        self._look()
        found = (entry for key, entry in self._entries.items() if key.startswith(prefix))
        return PrefixSnapshot(tuple(sorted(found, key=lambda entry: _order(entry.key))), self._revision)

    def write_now(self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()) -> int | None:
        """``Store.write`` as a synchronous call."""
        self._look()
        _check_operations(operations)
        if not all(self._holds(condition) for condition in conditions):
            return None
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                raise LeaseLost(f"lease {operation.lease:x} has expired or was revoked")
        self._apply(operations)
        return self._revision

    def grant_now(self, ttl_s: float) -> int:
        """``Store.grant_lease`` without waiting. Whole seconds, as in etcd."""
        self._look()
        number = self._next_lease
        self._next_lease += 1
        granted_s = max(self._shortest_ttl_s, float(math.ceil(ttl_s)))
        self._leases[number] = _Lease(granted_s, self._clock.now_s() + granted_s)
        return number

    def renew_now(self, lease: int) -> float:
        """``Store.renew_lease`` as a synchronous call."""
        self._look()
        held = self._leases.get(lease)
        if held is None:
            raise LeaseLost(f"lease {lease:x} has expired or was revoked")
        held.ends_s = self._clock.now_s() + held.ttl_s
        return held.ttl_s

    def revoke_now(self, lease: int) -> None:
        """``Store.revoke_lease`` as a synchronous call."""
        self._look()
        if lease in self._leases:
            self._end_lease(lease)

    def changes_since(self, revision: int, prefix: str = "") -> list[Change]:
        """Changes under ``prefix`` with a revision above ``revision``, in order.

        Raises ``StoreError`` if some of them have been compacted, or if the store has never reached that revision.
        """
        self._look()
        if revision > self._revision:
            raise StoreError(f"the store is at revision {self._revision} and has never been at {revision}. Read again")
        if revision < self._compacted:
            raise StoreError(f"changes up to revision {self._compacted} are no longer kept. Read again")
        first = bisect.bisect_right(self._history, revision, key=lambda change: change.entry.mod_revision)
        return [change for change in self._history[first:] if change.entry.key.startswith(prefix)]

    def compact_now(self, revision: int) -> None:
        """Drop the changes up to and including ``revision``."""
        self._compacted = min(max(revision, self._compacted), self._revision)
        self._history = [change for change in self._history if change.entry.mod_revision > self._compacted]

    def _look(self) -> None:
        if self._closed:
            raise StoreUnavailable("the memory store has been closed")
        if not self._available:
            raise StoreUnavailable("the memory store is set to be away")
        self.tick()

    def _holds(self, condition: Condition) -> bool:
        entry = self._entries.get(condition.key)
        if entry is None:
            return condition.revision == 0
        if isinstance(condition, CreatedAt):
            return entry.create_revision == condition.revision
        return entry.mod_revision == condition.revision

    def _apply(self, operations: Sequence[Operation]) -> None:
        """Apply a transaction. The revision only increases if something changes."""
        revision = self._revision + 1
        for operation in operations:
            if isinstance(operation, Put):
                self._put(operation, revision)
            elif operation.prefix:
                for key in sorted((key for key in self._entries if key.startswith(operation.key)), key=_order):
                    self._delete(key, revision)
            elif operation.key in self._entries:
                self._delete(operation.key, revision)

    def _put(self, put: Put, revision: int) -> None:
        old = self._entries.get(put.key)
        if old is not None and old.lease in self._leases:
            self._leases[old.lease].keys.discard(put.key)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        created = old.create_revision if old is not None else revision
        entry = KeyValue(put.key, bytes(put.value), created, revision, put.lease)
        self._entries[put.key] = entry
        self._record(Change(ChangeKind.PUT, entry))

    def _delete(self, key: str, revision: int) -> None:
        old = self._entries.pop(key)
        if old.lease in self._leases:
            self._leases[old.lease].keys.discard(key)
        entry = dataclasses.replace(old, value=b"", create_revision=0, mod_revision=revision, lease=0)
        self._record(Change(ChangeKind.DELETE, entry))

    def _record(self, change: Change) -> None:
        self._revision = change.entry.mod_revision
        self._history.append(change)
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    def _end_lease(self, number: int) -> None:
        lease = self._leases.pop(number)
        self._apply([Delete(key) for key in sorted(lease.keys, key=_order)])

    # --- Store -------------------------------------------------------------------------------------------------------

    async def read(self, prefix: str) -> PrefixSnapshot:
        """Implements ``Store.read``; never waits."""
        return self.read_now(prefix)

    async def write(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = (), *, repeatable: bool = False
    ) -> int | None:
        """Implements ``Store.write``; never waits."""
        return self.write_now(operations, conditions)

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Change]:
        """``Store.watch``. Reports an expired lease at the next access to the store, or call of ``tick``."""
        changed, seen = asyncio.Event(), after_revision
        self._watchers[changed] = None
        try:
            while not self._closed:
                changed.clear()
                # A copy of what there is: the consumer may write between two of them.
                changes = self.changes_since(seen, prefix) if self._available else []
                for change in changes:
                    yield change
                if changes:
                    seen = changes[-1].entry.mod_revision
                    continue
                if self._available:
                    seen = max(seen, self._revision)  # nothing for us up to here, so compaction takes nothing from us
                await changed.wait()
        finally:
            self._watchers.pop(changed, None)

    async def grant_lease(self, ttl_s: float) -> int:
        """Implements ``Store.grant_lease``; never waits."""
        return self.grant_now(ttl_s)

    async def renew_lease(self, lease: int) -> float:
        """Implements ``Store.renew_lease``; never waits."""
        return self.renew_now(lease)

    async def revoke_lease(self, lease: int) -> None:
        """Implements ``Store.revoke_lease``; never waits."""
        self.revoke_now(lease)

    async def close(self) -> None:
        """Let further calls fail and end all watches."""
        self._closed = True
        self._wake_watchers()


def _check_operations(operations: Sequence[Operation]) -> None:
    """Refuse what etcd refuses, so that no test passes with a transaction that would fail in a real job."""
    if len(operations) > MAX_OPERATIONS:
        raise StoreError(f"{len(operations)} operations in one transaction, etcd takes at most {MAX_OPERATIONS}")
    put = [operation.key for operation in operations if isinstance(operation, Put)]
    if any(not operation.key and not (isinstance(operation, Delete) and operation.prefix) for operation in operations):
        raise StoreError("a key must not be empty")
    if len(set(put)) < len(put):
        raise StoreError("etcd takes no key twice in one transaction")
    for operation in operations:
        if isinstance(operation, Delete):
            hit = [key for key in put if key == operation.key or (operation.prefix and key.startswith(operation.key))]
            if hit:
                raise StoreError(f"{hit[0]} is both put and deleted in one transaction, which etcd does not take")
