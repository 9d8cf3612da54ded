"""The interface of the elected Master for watchdogs and notifications, which run beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from edl.ports import ElectedMaster
from edl.types import FencingToken
from edl.wire.alarm import Alarm
from edl.wire.denylist import DenylistEntry
from edl.wire.messages import Asked
from edl.wire.status import Answer, EventsRequest, HistoryEntry


class WatchedMaster(ElectedMaster, Protocol):
    """What watchdogs and notifications use of the elected Master, in addition."""

    token: FencingToken
    """Identifies this Master's term."""

    def events(self, request: EventsRequest) -> AsyncIterator[HistoryEntry]:
        """The history, and with ``follow`` also new entries until the Master steps down."""
        ...

    async def ended_within(self, limit_s: float) -> bool:
        """Wait for the end of the job, but no longer than ``limit_s`` seconds; whether it has come. The Master's
        launcher exits when its companions have returned, so they pause by this and not by ``asyncio.sleep``."""
        ...

    def watched(self, alarms: Sequence[Alarm]) -> None:
        """Report the alarms of the watchdogs for the whole job; these are all of them. They are in the history, and
        ``status`` shows them, as soon as the store has them."""
        ...

    def denylist(self, entries: Sequence[DenylistEntry]) -> None:
        """Report the entries of the denylist that count; these are all of them."""
        ...

    async def store_trouble(self) -> str:
        """Why the store does not answer or takes no writes; empty: it does. Returns within seconds."""
        ...

    def kept(self, name: str) -> str:
        """The value that ``keep`` has stored under this name, also by an earlier Master; empty: none."""
        ...

    async def keep(self, name: str, value: str) -> None:
        """Store a small value for this Master and the next ones, until the job ends. Raises ``FencedOut`` if another
        Master has been elected, and another ``StoreError`` if the store does not answer."""
        ...

    def answer_with(self, name: str, answer: Callable[[Asked], Awaitable[Answer]]) -> None:
        """Let ``answer`` answer requests of this purpose, which must not raise."""
        ...
