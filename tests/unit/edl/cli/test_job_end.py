"""Learning of the end of a job while nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator

import pytest

from edl.cli import job_end
from edl.cli.job_end import JobEnd
from edl.errors import ProtocolError
from edl.wire.status import HistoryEntry, JobStatus, Kind

LIMIT_S = 60.0


def seen(phase: str = "running", *entries: HistoryEntry) -> JobStatus:
    return JobStatus("job", phase, 1, 1, "the reason", "1:1", "elastic", 0, 1, "a", (), entries, ())


def entry(number: int, kind: str = Kind.WAITING.value) -> HistoryEntry:
    return HistoryEntry(number, 1.0, kind, f"text {number}")


class Master:
    """Has the entries that the test adds."""

    def __init__(self, *entries: HistoryEntry) -> None:
        self.entries = list(entries)
        self.added = asyncio.Event()

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Master]:
        yield self

    async def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        assert follow
        while True:
            for one in [one for one in self.entries if one.number > after]:
                after = one.number
                yield one
            self.added.clear()
            await self.added.wait()


async def at_once() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


def test_the_phase_says_it_as_well() -> None:
    async def body() -> None:
        end = JobEnd(Master().connect)
        end.see(seen("ended", entry(1), entry(2, Kind.JOB_ENDED.value), entry(3)))
        assert end.entry is not None and end.entry.text == "text 2"
        end = JobEnd(Master().connect)
        end.see(seen("ended"))
        assert await end.rest(at_once()) == HistoryEntry(0, 0.0, Kind.JOB_ENDED.value, "the reason")

    asyncio.run(body())


def test_a_job_that_was_started_again_under_its_name() -> None:
    async def body() -> None:
        master = Master(*map(entry, (1, 2, 3)))
        async with contextlib.aclosing(JobEnd(master.connect)) as end:
            end.see(seen("running", *master.entries))
            assert await end.rest(at_once()) is None
            master.entries = [entry(1)]
            end.see(seen("running", *master.entries))
            assert await end.rest(at_once()) is None
            master.entries.append(entry(2, Kind.JOB_ENDED.value))
            master.added.set()
            found = await end.rest(asyncio.sleep(LIMIT_S))
            assert found is not None and found.text == "text 2"

    asyncio.run(body())


def test_an_end_is_kept_if_the_status_is_from_before_it() -> None:
    """The entry comes while a look waits for its answer. After that the Master is gone, and nobody says it again."""

    async def body() -> None:
        master = Master(entry(1))
        async with contextlib.aclosing(JobEnd(master.connect)) as end:
            end.see(seen("running", entry(1)))
            assert await end.rest(at_once()) is None
            master.entries.append(entry(2, Kind.JOB_ENDED.value))
            master.added.set()
            await at_once()
            master.entries.clear()
            end.see(seen("running", entry(1)))
            found = await end.rest(at_once())
            assert found is not None and found.text == "text 2"
            assert end.ending_of(OSError()) == "job job has ended: text 2"

    asyncio.run(body())


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), ProtocolError("unreadable")])
def test_the_end_is_learnt_of_after_an_attempt_that_failed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """With no descriptor left, the files of this host's launchers cannot be listed."""
    monkeypatch.setattr(job_end, "AGAIN_S", 0.0)
    failures = [error]
    master = Master(entry(1, Kind.JOB_ENDED.value))

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[Master]:
        if failures:
            raise failures.pop()
        yield master

    async def body() -> None:
        async with contextlib.aclosing(JobEnd(connect)) as end:
            end.see(seen())
            found = await end.rest(asyncio.sleep(LIMIT_S))
            assert found is not None and found.text == "text 1"

    asyncio.run(body())
    assert not failures
