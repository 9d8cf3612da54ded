"""``edl events -f`` across changes of the Master."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from edl.cli.find import NoAnswer, NoMaster
from edl.cli.following import ATTEMPTS, followed
from edl.errors import UsageError
from edl.wire.messages import Finish
from edl.wire.status import HistoryEntry, Kind

GONE = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
ENDED = HistoryEntry(4, 0.0, Kind.JOB_ENDED.value, "all is done")


def entry(number: int) -> HistoryEntry:
    return HistoryEntry(number, 0.0, "node-joined", "a node")


class Masters:
    """Masters one after the other: each tells some entries, and fails or ends the stream. An error alone: there is
    none."""

    def __init__(self, *story: Sequence[HistoryEntry | Exception] | Exception) -> None:
        self.story = list(story)
        self.asked: list[int] = []
        self.said: list[str] = []
        self.pauses = 0
        self.told: list[HistoryEntry] = []
        self.before: list[HistoryEntry] | None = None
        """What a Master after the first one has of the history already; None: what was told so far."""

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Masters]:
        self.now = self.story.pop(0) if len(self.story) > 1 else self.story[0]
        if isinstance(self.now, Exception):
            raise self.now
        yield self

    async def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        assert not isinstance(self.now, Exception)
        if not follow:
            for kept in self.told if self.before is None else self.before:
                yield kept
            return
        self.asked.append(after)
        for one in self.now:
            if isinstance(one, Exception):
                raise one
            if one.number > after:
                self.told.append(one)
                yield one

    async def pause(self) -> None:
        self.pauses += 1

    def seen(self) -> list[int]:
        async def read() -> list[int]:
            source = followed(self.connect, self.pause, 0, self.said.append)
            async with contextlib.aclosing(source) as entries:
                return [one.number async for one in entries]

        return asyncio.run(read())


@pytest.mark.parametrize("end", [[], [GONE]])
def test_goes_on_with_the_next_master_where_the_last_one_stopped(end: list[Exception]) -> None:
    away = [NoMaster("none now"), NoAnswer("frozen"), OSError("no descriptor")]
    masters = Masters([entry(1), entry(2), *end], *away, [entry(3), ENDED])
    assert masters.seen() == [1, 2, 3, 4]
    assert masters.asked == [0, 2]
    assert masters.said == ["the Master has gone: looking for the next one"]
    assert masters.pauses == 4


@pytest.mark.parametrize(
    "before",
    [
        [entry(1)],
        [replace(entry(1), at_s=7.0), replace(entry(2), at_s=8.0), replace(entry(3), at_s=9.0)],
        [],  # none of its nodes is ready yet
    ],
)
def test_a_job_that_was_started_again_is_shown_from_its_beginning(before: list[HistoryEntry]) -> None:
    masters = Masters([entry(1), entry(2), GONE], [entry(1), entry(2), entry(3), ENDED])
    masters.before = before
    assert masters.seen() == [1, 2, 1, 2, 3, 4]
    assert masters.asked == [0, 0]
    assert masters.said[-1] == "the job has been started again: its events are counted from 1 again"


@pytest.mark.parametrize("before", [[entry(1), entry(2)], [entry(1), entry(3)]])
def test_the_same_job_is_not_shown_twice(before: list[HistoryEntry]) -> None:
    masters = Masters([entry(1), entry(2), GONE], [entry(3), ENDED])
    masters.before = before
    assert masters.seen() == [1, 2, 3, 4]
    assert masters.asked == [0, 2]


def test_a_job_that_has_ended_meanwhile_was_not_started_again() -> None:
    """Its last Master has cleared the history, and another one only tells the outcome to the nodes."""
    masters = Masters([entry(1), entry(2), GONE], [GONE], NoMaster("job job has ended", Finish(0, "stopped")))
    masters.before = []
    assert masters.seen() == [1, 2]
    assert masters.said[1:] == ["job job has ended"]


def test_ends_with_the_job_although_its_master_tells_more() -> None:
    """A checkpoint that is still being written is reported after the end."""
    masters = Masters([ENDED, entry(5), GONE])
    assert masters.seen() == [4, 5]
    assert masters.said == []


def test_says_how_a_job_ended_that_ended_meanwhile() -> None:
    masters = Masters([entry(1), GONE], NoMaster("job x has ended with exit code 1: lost", Finish(1, "lost")))
    assert masters.seen() == [1]
    assert masters.said[-1] == "job x has ended with exit code 1: lost"


@pytest.mark.parametrize("error", [UsageError("no such job"), NoAnswer("frozen"), GONE])
def test_a_job_that_is_not_found_at_first_is_an_error(error: Exception) -> None:
    with pytest.raises(type(error)):
        Masters(error).seen()


def test_gives_up_when_nobody_is_left() -> None:
    masters = Masters([entry(1), GONE], UsageError("no launcher runs on this host"))
    with pytest.raises(NoAnswer, match=r"no other Master has been found.*no launcher runs on this host"):
        masters.seen()
    assert masters.pauses == ATTEMPTS
