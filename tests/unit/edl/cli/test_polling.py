"""Polling of the status across changes of the Master."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest

from edl.cli.find import NoAnswer, NoMaster, Where
from edl.cli.job_end import JobEnd
from edl.cli.polling import Finder, StatusReading, readings
from edl.errors import ProtocolError, UsageError
from edl.wire.messages import Finish
from edl.wire.status import HistoryEntry, JobStatus, Kind

GONE = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


def job(phase: str = "running", number: int = 1) -> JobStatus:
    return JobStatus("job", phase, number, 2, "all is well", "1:2", "elastic", 0, 3, "a", (), (), ())


class Events:
    """A Master whose history continues with one entry, or with none."""

    def __init__(self, entry: HistoryEntry | None) -> None:
        self.entry = entry

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Events]:
        yield self

    async def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        assert follow
        if self.entry is not None:
            yield self.entry
        await asyncio.Event().wait()


class Job:
    """Masters one after the other: each answers some times, and then fails. An error alone: there is no Master."""

    def __init__(self, *story: Sequence[JobStatus | Exception] | Exception) -> None:
        self.story = list(story)
        self.pauses = 0

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Job]:
        found = self.story.pop(0)
        if isinstance(found, Exception):
            raise found
        self.answers = list(found)
        yield self

    async def status(self) -> JobStatus:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause(self) -> None:
        self.pauses += 1

    async def seen(self, most: int, end: HistoryEntry | None = None) -> list[StatusReading]:
        found: list[StatusReading] = []
        async with (
            contextlib.aclosing(JobEnd(Events(end).connect)) as job_end,
            contextlib.aclosing(readings(self.connect, self.pause, job_end)) as source,
        ):
            async for reading in source:
                found.append(reading)
                if len(found) == most:
                    break
        return found


def test_goes_on_with_the_next_master() -> None:
    away = [NoMaster("no Master at this moment"), NoAnswer("frozen"), OSError("no descriptor"), ProtocolError("odd")]
    story = Job([job(number=1), GONE], *away, [job(number=2)])
    found = asyncio.run(story.seen(7))
    assert [reading.status.round if reading.status else reading.problem for reading in found] == [
        1,
        "looking for the Master: it does not answer",
        "looking for the Master: no Master at this moment",
        "looking for the Master: frozen",
        "looking for the Master: no descriptor",
        "looking for the Master: odd",
        2,
    ]
    assert story.pauses == 6
    assert not any(reading.over for reading in found)


@pytest.mark.parametrize("error", [NoMaster("no job"), UsageError("nothing here"), NoAnswer("frozen"), GONE])
def test_a_job_that_is_not_found_at_first_is_an_error(error: Exception) -> None:
    with pytest.raises(type(error)):
        asyncio.run(Job(error).seen(1))


def test_ends_with_the_job() -> None:
    story = Job([job(), GONE], NoMaster("job job has ended with exit code 0: done", Finish(0, "done")))
    assert asyncio.run(story.seen(9))[-1] == StatusReading(None, "job job has ended with exit code 0: done", over=True)


def test_a_store_that_ends_with_its_job() -> None:
    found = asyncio.run(Job([job(), job("ended"), GONE]).seen(9))
    assert found[-1] == StatusReading(None, "job job has ended: all is well", over=True)


def test_a_job_that_ends_between_two_polls() -> None:
    """With a private store nothing is left at the next poll."""

    class Slow(Job):
        async def pause(self) -> None:
            await asyncio.Event().wait()

    end = HistoryEntry(1, 1.0, Kind.JOB_ENDED.value, "all workers are done")
    found = asyncio.run(Slow([job(), GONE]).seen(9, end))
    assert found[-1] == StatusReading(None, "job job has ended: all workers are done", over=True)


def test_the_place_of_a_job_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of this host may end while others go on."""
    gone = UsageError("no launcher runs on this host")
    here: list[Where | Exception] = [Where("job", ("unix:/one",)), gone, OSError("no descriptor")]
    used: list[Where] = []

    def located(where: Where) -> Where:
        found = here.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    @contextlib.asynccontextmanager
    async def master_of(where: Where) -> AsyncIterator[None]:
        used.append(where)
        yield

    monkeypatch.setattr("edl.cli.polling.located", located)
    monkeypatch.setattr("edl.cli.polling.master_of", master_of)

    async def connect(finder: Finder, attempts: int) -> None:
        for _ in range(attempts):
            async with finder.connect():
                pass

    asyncio.run(connect(Finder(Where()), 3))
    assert used == 3 * [Where("job", ("unix:/one",))]

    here.append(gone)
    with pytest.raises(UsageError, match="no launcher"):
        asyncio.run(connect(Finder(Where()), 1))
