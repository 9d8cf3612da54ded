"""Reads a job's status again and again, from whichever launcher is the Master."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from edl.cli.find import LOOK_FAILURES, JobClient, Where, located, master_of
from edl.cli.job_end import JobEnd
from edl.errors import UsageError
from edl.wire.status import JobStatus

LOOKING = "looking for the Master"


class StatusCalls(Protocol):
    """The part of a Master's client that is polled."""

    async def status(self) -> JobStatus:
        """The current status of the job."""
        ...


Connect = Callable[[], AbstractAsyncContextManager[StatusCalls]]
"""Connects to the current Master."""


@dataclass(frozen=True, slots=True)
class StatusReading:
    """The result of one poll."""

    status: JobStatus | None
    """None: the Master did not answer."""
    problem: str = ""
    """Why there is no status."""
    over: bool = False
    """Whether the job has ended, so that polling ends."""


async def readings(
    connect: Connect, pause: Callable[[], Awaitable[None]], job_end: JobEnd
) -> AsyncGenerator[StatusReading, None]:
    """Poll until the job has ended. ``pause``: sleeps between two polls.

    Raises ``EdlError`` if the first poll fails. Later failures are readings, because a job may be without a Master for
    some seconds.
    """
    found = False
    while True:
        try:
            async with connect() as client:
                while True:
                    status = await client.status()
                    found = True
                    job_end.see(status)
                    yield StatusReading(status)
                    await job_end.rest(pause())
        except LOOK_FAILURES as error:
            if not found:
                raise
            ending = job_end.ending_of(error)
            if ending:
                yield StatusReading(None, ending, over=True)
                return
            why = "" if isinstance(error, grpc.aio.AioRpcError) else str(error)
            yield StatusReading(None, f"{LOOKING}: {why or 'it does not answer'}")
        await job_end.rest(pause())


class Finder:
    """Finds the Master again and again, also after the launcher of this host has ended."""

    def __init__(self, where: Where) -> None:
        self._asked = where
        self._known: Where | None = None

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[JobClient]:
        """A client of the current Master. Raises what ``master_of`` raises."""
        try:
            self._known = located(self._asked)
        except (UsageError, OSError):
            if self._known is None:
                raise
        async with master_of(self._known) as client:
            yield client
