"""The store as an elected Master uses it: a write is retried until it succeeds or another Master has been elected.

A write that the store refuses (it is full, a password has changed, the value is too large) is no reason to step down,
because every other Master would be refused as well. The Master waits and logs why; workers continue to train.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from edl.errors import FencedOut, LeaseLost, StoreError, StoreFull, StoreUnavailable
from edl.ports import Clock, Guard, Operation, PrefixSnapshot, Store
from edl.tasks import Backoff

T = TypeVar("T")

RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
"""Seconds between two attempts: ``RETRY_S`` while the store does not answer; growing up to ``LONGEST_RETRY_S`` while it
refuses."""


class GuardedStore:
    """Reads and writes under one fencing token. ``write`` raises ``FencedOut`` once another Master has been elected."""

    def __init__(self, store: Store, guard: Guard, clock: Clock, log: Callable[[str], None]) -> None:
        self._store = store
        self._guard = guard
        self._clock = clock
        self._log = log
        self._why = ""
        self._since_s = 0.0

    def trouble(self) -> str:
        """The problem of the store that the Master waits for, for the status; empty: none."""
        if not self._why:
            return ""
        waited_s = self._clock.now_s() - self._since_s
        return f"world changes have waited {waited_s:.0f} s for the store; training continues. {self._why}"

    async def read(self, prefix: str) -> PrefixSnapshot:
        """Read like ``Store.read``, retried until it succeeds."""
        return await self._retrying(lambda: self._store.read(prefix))

    async def write(self, operations: Sequence[Operation]) -> int:
        """Write, retried until it succeeds; returns the store's revision. Raises ``FencedOut`` and ``LeaseLost``."""
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
            self._log(f"world changes wait for the store, training continues: {why}")
        self._why = why
