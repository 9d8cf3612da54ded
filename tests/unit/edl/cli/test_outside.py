"""``edl watch``: how it learns of the end of a job, and what it makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
from collections.abc import AsyncIterator, Sequence

import click
import pytest
from click.testing import CliRunner

from edl.cli import outside
from edl.cli.__main__ import edl
from edl.cli.find import NoMaster, Where
from edl.cli.outside import Outside, OutsideLimits
from edl.exit_codes import ExitCode
from edl.notify.addresses import NamedChannel
from edl.notify.notification import Notification
from edl.wire.messages import Finish
from edl.wire.records import Version
from edl.wire.status import HistoryEntry, JobStatus, Kind

STATUS = JobStatus("job", "running", 1, 1, "", "1:1", "elastic", 0, 1, "a", (), (), ())
LIMIT_S = 60.0


class FakeJob:
    """A job that ends while nobody looks. ``left``: what is found in its store from then on."""

    def __init__(self, severity: str, left: NoMaster) -> None:
        self.left = left
        self.history = [HistoryEntry(7, 1.0, Kind.WORLD_FORMED.value, "round 1")]
        self.end = HistoryEntry(8, 2.0, Kind.JOB_ENDED.value, "over", severity=severity)
        self.looked = asyncio.Event()
        self.over = False
        self.phase = "running"

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[FakeJob]:
        if self.over:
            raise self.left
        yield self

    async def status(self) -> JobStatus:
        self.looked.set()
        return dataclasses.replace(STATUS, phase=self.phase, history=tuple(self.history))

    async def events(self, after: int, follow: bool) -> AsyncIterator[HistoryEntry]:
        assert (after, follow) == (7, True)
        await self.looked.wait()
        self.over = True
        yield self.end


class EndedJob(FakeJob):
    """A job that has ended already: its Master answers once more."""

    async def status(self) -> JobStatus:
        self.history, self.phase, self.over = [*self.history, self.end], "ended", True
        return await super().status()


def watched(
    monkeypatch: pytest.MonkeyPatch,
    severity: str,
    left: NoMaster,
    job_type: type[FakeJob] = FakeJob,
    *,
    once: bool = False,
    channels: Sequence[NamedChannel] = (),
    grace_s: float = 0.0,
) -> int:
    """The exit status of a watch that would look every ten minutes."""

    async def body() -> int:
        job = job_type(severity, left)
        monkeypatch.setattr(outside, "Finder", lambda where: job)
        watch = Outside(Where("job"), OutsideLimits(600.0, grace_s, 600.0), channels, None, as_json=False)
        return await asyncio.wait_for(watch.run(once=once), LIMIT_S)

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("code", "severity"),
    [
        (ExitCode.OK, "info"),
        (ExitCode.KILLED, "info"),
        (ExitCode.INCOMPLETE, "warning"),
        (ExitCode.NOT_ENOUGH_NODES, "critical"),
    ],
)
def test_the_outcome_is_asked_for_while_it_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: ExitCode, severity: str
) -> None:
    left = NoMaster("job has ended", Finish(int(code), "the reason"))
    assert watched(monkeypatch, severity, left) == code
    assert capsys.readouterr().out == f"edl job job: {severity}: job-ended: the reason\n"


@pytest.mark.parametrize(
    ("severity", "code"),
    [("info", ExitCode.OK), ("warning", ExitCode.INCOMPLETE), ("critical", ExitCode.WORKER_FAILED)],
)
def test_a_job_whose_store_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], severity: str, code: ExitCode
) -> None:
    monkeypatch.setattr(outside, "OUTCOME_S", 0.05)
    assert watched(monkeypatch, severity, NoMaster("no job here")) == code
    assert capsys.readouterr().out == f"edl job job: {severity}: job-ended: over\n"


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(("severity", "code"), [("info", ExitCode.OK), ("critical", ExitCode.WORKER_FAILED)])
def test_a_look_at_a_job_that_has_just_ended(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    severity: str,
    code: ExitCode,
    once: bool,
) -> None:
    monkeypatch.setattr(outside, "OUTCOME_S", 0.05)
    assert watched(monkeypatch, severity, NoMaster("no job here"), EndedJob, once=once) == code
    assert capsys.readouterr().out == f"edl job job: {severity}: job-ended: over\n"


class Recorder:
    """A channel that keeps what it is to send."""

    label = "recorder"

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def send(self, notification: Notification, now_s: float, limit_s: float) -> None:
        self.reasons.append(notification.text)


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("told", [True, False])
def test_those_who_are_notified_need_no_output(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """It may go to the very disk whose lack of room is the trouble."""
    left, channel = NoMaster("job has ended", Finish(int(ExitCode.OK), "the reason")), Recorder()
    channels = (NamedChannel(channel, "digest"),) if told else ()
    monkeypatch.setattr(click, "echo", no_room)
    with contextlib.nullcontext() if told else pytest.raises(OSError, match="No space left"):
        assert watched(monkeypatch, "info", left, channels=channels) == ExitCode.OK
    assert channel.reasons == (["the reason"] if told else [])


class Forming(FakeJob):
    """A job that waits for nodes."""

    async def status(self) -> JobStatus:
        return dataclasses.replace(await super().status(), phase="forming", reason="two nodes are missing")


class Training(FakeJob):
    """A job that trains; it is not known whether it gets on."""

    async def status(self) -> JobStatus:
        return dataclasses.replace(await super().status(), saved=Version(7, 1))


@pytest.mark.parametrize(
    ("job_type", "code", "reasons"),
    [(Forming, 1, ["job-running: forming: two nodes are missing. See edl status"]), (Training, 0, [])],
)
def test_once_notifies_of_a_job_that_does_not_train(
    monkeypatch: pytest.MonkeyPatch, job_type: type[FakeJob], code: int, reasons: list[str]
) -> None:
    """It has no earlier look, so it cannot wait for the limit."""
    channel = Recorder()
    channels = (NamedChannel(channel, "digest"),)
    assert watched(monkeypatch, "info", NoMaster("over"), job_type, once=True, channels=channels) == code
    assert channel.reasons == reasons


class Lacking(FakeJob):
    """At the first look, this host has no descriptor left."""

    lacks = True

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[FakeJob]:
        lacks, self.lacks = self.lacks, False
        if lacks:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        yield self


def test_a_look_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "AGAIN_S", 0.0)
    assert watched(monkeypatch, "info", NoMaster("over"), Lacking, once=True, grace_s=1000.0) == ExitCode.OK


@pytest.mark.parametrize("option", ["--every=0", "--every=-1", "--limit=-1", "--grace=-1"])
def test_an_interval_that_is_none_is_refused(option: str) -> None:
    done = CliRunner().invoke(edl, ["watch", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=job", option])
    assert done.exit_code == 2 and "is not in the range" in done.stderr
