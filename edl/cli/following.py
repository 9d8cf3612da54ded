"""Follows a job's history from one Master to the next."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from edl.cli.find import LOOK_FAILURES, NoAnswer, NoMaster
from edl.wire.status import HistoryEntry, Kind

PAUSE_S = 0.5
"""Seconds between two attempts to find the next Master."""
ATTEMPTS = 40
"""Attempts in a row that find no Master, after which there is none to wait for."""


class HistoryCalls(Protocol):
    """The part of a Master's client that is followed."""

    def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        """The history after a line number, and new entries."""
        ...


async def followed(
    connect: Callable[[], AbstractAsyncContextManager[HistoryCalls]],
    pause: Callable[[], Awaitable[None]],
    after: int,
    say: Callable[[str], None],
) -> AsyncGenerator[HistoryEntry, None]:
    """The history after a number, and new entries until the job has ended. ``pause``: sleeps between two attempts to
    find the Master. ``say``: tells the user what is waited for, and how the job has ended if no entry does.

    Raises ``EdlError`` if no Master answers at first, or if no other one is found later: the launchers may have been
    killed.
    """
    found = ended = False
    last: HistoryEntry | None = None
    failed = 0
    while not ended:
        why = "it has ended the connection"
        try:
            async with connect() as client:
                if last is not None and not await _continues(client, last):
                    after = 0
                async for entry in client.events(after, follow=True):
                    if last is not None and entry.number <= last.number:
                        say("the job has been started again: its events are counted from 1 again")
                    found, failed, after, last = True, 0, entry.number, entry
                    ended = ended or entry.kind == Kind.JOB_ENDED.value
                    yield entry
        except LOOK_FAILURES as error:
            if not found:
                raise
            if isinstance(error, NoMaster) and error.outcome is not None:
                say(str(error))
                return
            why = str(error) or type(error).__name__
        found = True
        failed += 1
        if failed == 1 and not ended:
            say("the Master has gone: looking for the next one")
        if failed > ATTEMPTS:
            raise NoAnswer(f"no other Master has been found. The last attempt: {why}")
        if not ended:
            await pause()


async def _continues(client: HistoryCalls, last: HistoryEntry) -> bool:
    """Whether this history goes on after ``last``. If that entry has made room for others, its number decides. A job
    that was started again has no entries at all until its first node is ready."""
    kept = [entry async for entry in client.events(0, follow=False)]
    same = [entry for entry in kept if entry.number == last.number]
    return same == [last] if same else bool(kept) and kept[-1].number > last.number
