"""Learns of the end of a job between two looks at it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from edl.cli.find import LOOK_FAILURES, NoMaster
from edl.tasks import end
from edl.wire.status import HistoryEntry, JobStatus, Kind

AGAIN_S = 1.0
"""Seconds until a Master is looked for again."""


class EventCalls(Protocol):
    """The part of a Master's client that is followed."""

    def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        """The history after a line number, and new entries."""
        ...


class JobEnd:
    """Follows a job's history for its end. The launchers, often the store, and soon the outcome as well go with the
    job, so that the next look may find nothing. ``connect``: connects to the current Master."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[EventCalls]]) -> None:
        self._connect = connect
        self._job = ""
        self._newest = 0
        """Number of the newest entry of the history that is known."""
        self._again = False
        """Whether to follow from the newest entry that is known, because it is older than those that were seen."""
        self._following: asyncio.Future[None] | None = None
        self.entry: HistoryEntry | None = None
        """The entry about the end of the job; None: it has not ended. Set as soon as it arrives, also during a look:
        the status of that look may be from before the end."""

    def see(self, status: JobStatus) -> None:
        """Take in the result of a look."""
        self._job = status.job
        newest = status.history[-1].number if status.history else 0
        # The job may have been started again, and its entries are counted from 1 again.
        self._again = self._again or newest < self._newest
        self._newest = newest
        if status.phase == "ended" and self.entry is None:
            kind = Kind.JOB_ENDED.value
            said = [entry for entry in status.history if entry.kind == kind]
            self.entry = said[-1] if said else HistoryEntry(self._newest, 0.0, kind, status.reason)

    async def rest(self, pause: Awaitable[None]) -> HistoryEntry | None:
        """Pause between two looks, at most until the job has ended; returns the entry about that."""
        if self.entry is not None or not self._job:
            await pause
            return self.entry
        if self._again:
            await self.aclose()
        if self._following is None:
            self._following = asyncio.ensure_future(self._follow())
        pausing = asyncio.ensure_future(pause)
        both: tuple[asyncio.Future[Any], ...] = (pausing, self._following)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(pausing)
        if self._following.done():
            self._following.result()
        return self.entry

    def ending_of(self, error: Exception) -> str:
        """How the job has ended, if this failure of a look shows that it has; otherwise empty."""
        if isinstance(error, NoMaster) and error.outcome is not None:
            return str(error)
        return f"job {self._job} has ended: {self.entry.text}" if self.entry is not None else ""

    async def _follow(self) -> None:
        while self.entry is None:
            with contextlib.suppress(*LOOK_FAILURES):
                async with self._connect() as client:
                    async for entry in client.events(self._newest, follow=True):
                        self._newest = entry.number
                        if entry.kind == Kind.JOB_ENDED.value:
                            self.entry = entry
                            return
            await asyncio.sleep(AGAIN_S)

    async def aclose(self) -> None:
        """Follow no longer."""
        following, self._following, self._again = self._following, None, False
        if following is not None:
            await end(following)
