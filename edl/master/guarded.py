"""The store as a ruling Master uses it: whatever it is that keeps a write from happening, it waits, and says what for.

A write that the store refuses (it is full, a password has changed, the value is too large) is no reason to give the
Master's place up: the next Master would be refused as well, and so on, hundreds of times a second. Workers train on
meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from edl.errors import FencedOut, LeaseLost, StoreError, StoreFull, StoreUnavailable
from edl.ports import Clock, Guard, Operation, Snapshot, Store
from edl.tasks import Backoff

T = TypeVar("T")

RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
"""Pause between two tries while the store is silent, and the longest one while it refuses."""


class GuardedStore:
    """Reads and writes under one token. ``write`` raises ``FencedOut`` once another Master has been elected."""

    def __init__(self, store: Store, guard: Guard, clock: Clock, log: Callable[[str], None]) -> None:
        self._store = store
        self._guard = guard
        self._clock = clock
        self._log = log
        self._why = ""
        self._since_s = 0.0

    def trouble(self) -> str:
        """What the Master waits for; empty: for nothing."""
        if not self._why:
            return ""
        waited_s = self._clock.now_s() - self._since_s
        return f"changes of the world have waited {waited_s:.0f} s for the store; training goes on. {self._why}"

    async def read(self, prefix: str) -> Snapshot:
        """As ``Store.read``, as soon as it can be done."""
        return await self._retrying(lambda: self._store.read(prefix))

    async def write(self, operations: Sequence[Operation]) -> int:
        """Write as soon as it can be done; returns the store's revision."""
        done = await self._retrying(lambda: self._store.write(operations, [self._guard.condition()]))
        if done is None:
            raise FencedOut("another Master has been elected")
        return done

    async def _retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        pauses = Backoff(RETRY_S, LONGEST_RETRY_S)
        while True:
            try:
                result = await attempt()
            except (FencedOut, LeaseLost):
                raise
            except StoreError as error:
                self._waits(str(error))
                silent = isinstance(error, StoreUnavailable) and not isinstance(error, StoreFull)
                await asyncio.sleep(RETRY_S if silent else pauses.next())
            else:
                self._why = ""
                return result

    def _waits(self, why: str) -> None:
        if not self._why:
            self._since_s = self._clock.now_s()
        if why != self._why:
            self._log(f"a decision waits for the store ({why})")
        self._why = why
