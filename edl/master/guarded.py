"""The store as an elected Master uses it: a write is retried until it succeeds or another Master has been elected.

A write that the store refuses (it is full, a password has changed, the value is too large) is no reason to step down,
because every other Master would be refused as well. The Master waits and logs why; workers continue to train.

A write without an answer may still take effect seconds later, for instance when a frozen member of the store goes on,
and would then overwrite newer values. So each write also changes one key, ``last_write``, on the condition that this
key is as the write before has left it. A write that comes late fails by that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from edl.errors import FencedOut, LeaseLost, StoreError, StoreFull, StoreUnavailable
from edl.ports import Clock, Guard, ModifiedAt, Operation, PrefixSnapshot, Put, Store
from edl.tasks import Backoff

T = TypeVar("T")

RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
"""Seconds between two attempts: ``RETRY_S`` while the store does not answer; growing up to ``LONGEST_RETRY_S`` while it
refuses."""


class GuardedStore:
    """Reads and writes under one fencing token, one write at a time and in order. Writes raise ``FencedOut`` once
    another Master has been elected."""

    def __init__(self, store: Store, guard: Guard, last_write: str, clock: Clock, log: Callable[[str], None]) -> None:
        """``last_write``: the key that every write changes."""
        self._store = store
        self._guard = guard
        self._last_write = last_write
        self._clock = clock
        self._log = log
        self._why = ""
        """The newest reason why a write or a read waits; empty: none waits."""
        self._kind: type[StoreError] | None = None
        """The kind of the reason that was logged."""
        self._since_s = 0.0
        self._writing = asyncio.Lock()
        self._revision: int | None = None
        """Store revision of the last write; None: not known yet."""
        self._own = secrets.token_hex(8)
        """What the values of ``last_write`` begin with. The token does not tell: a launcher that steps down may be
        elected under it again, if the store has not answered meanwhile."""
        self._count = 0
        """Number of the current write."""

    def trouble(self) -> str:
        """The problem of the store that the Master waits for, for the status; empty: none."""
        if not self._why:
            return ""
        waited_s = self._clock.now_s() - self._since_s
        return f"world changes have waited {waited_s:.0f} s for the store; training continues. {self._why}"

    async def read(self, prefix: str) -> PrefixSnapshot:
        """Read like ``Store.read``, retried until it succeeds. Writes that the first read of ``last_write`` does not
        show come too late."""
        found = await self._retrying(lambda: self._store.read(prefix))
        if self._revision is None and self._last_write.startswith(prefix):
            self._revision = _in(found, self._last_write)[1]
        return found

    async def write(self, operations: Sequence[Operation]) -> int:
        """Write, retried until it succeeds; returns the store's revision. Raises ``FencedOut`` and ``LeaseLost``."""
        async with self._writing:
            self._count += 1
            return await self._retrying(lambda: self._attempt(operations))

    async def write_once(self, operations: Sequence[Operation]) -> int:
        """Write without retries; returns the store's revision. Raises ``StoreError``: the write may have taken effect
        then, or may do so until the next one."""
        async with self._writing:
            self._count += 1
            return await self._attempt(operations)

    async def _attempt(self, operations: Sequence[Operation]) -> int:
        """Write, unless an earlier attempt of the current write has come through."""
        mine = f"{self._own} {self._count}".encode()
        while True:
            last = (await self._stored())[1] if self._revision is None else self._revision
            conditions = [self._guard.condition(), ModifiedAt(self._last_write, last)]
            done = await self._store.write([*operations, Put(self._last_write, mine)], conditions, repeatable=True)
            if done is not None:
                self._revision = done
                return done
            value, self._revision = await self._stored()
            if self._revision == last or not value.startswith(self._own.encode()):
                raise FencedOut("another Master has been elected")
            if value == mine:
                return self._revision

    async def _stored(self) -> tuple[bytes, int]:
        return _in(await self._store.read(self._last_write), self._last_write)

    async def _retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        pauses = Backoff(RETRY_S, LONGEST_RETRY_S)
        while True:
            try:
                result = await attempt()
            except (FencedOut, LeaseLost):
                raise
            except StoreError as error:
                self._waits(error)
                silent = isinstance(error, StoreUnavailable) and not isinstance(error, StoreFull)
                await asyncio.sleep(RETRY_S if silent else pauses.next())
            else:
                self._why, self._kind = "", None
                return result

    def _waits(self, error: StoreError) -> None:
        """Log each kind of reason once: the text names another member of the store at each attempt."""
        if not self._why:
            self._since_s = self._clock.now_s()
        if type(error) is not self._kind:
            self._log(f"world changes wait for the store, training continues: {error}")
        self._why, self._kind = str(error), type(error)


def _in(snapshot: PrefixSnapshot, key: str) -> tuple[bytes, int]:
    """The value and the revision of a key; revision 0 if it does not exist."""
    return next(((one.value, one.mod_revision) for one in snapshot.entries if one.key == key), (b"", 0))
