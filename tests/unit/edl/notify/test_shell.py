"""The notifier: each entry once in each channel, across Masters, and no channel in the way of another."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from edl.adapters.clock import SystemClock
from edl.adapters.system_threads import SYSTEM_THREADS
from edl.errors import FencedOut, NotificationError, StoreUnavailable
from edl.master.events import HistoryNote, Kind
from edl.master.history import JobHistory
from edl.notify import delivery, shell
from edl.notify.addresses import NamedChannel
from edl.notify.delivery import MOST_WAITING, Delivery, DeliveryDeps
from edl.notify.notification import Notification, Sender
from edl.notify.shell import Notifier
from edl.types import FencingToken
from edl.wire.alarm import Alarm
from edl.wire.denylist import DenylistEntry
from edl.wire.messages import Asked
from edl.wire.purpose import Purpose
from edl.wire.scale_requests import Granted, ScaleRequest
from edl.wire.severity import Severity
from edl.wire.status import Answer, EventsRequest, HistoryEntry, JobStatus

STATUS = JobStatus("job", "running", 1, 1, "", "1:1", "elastic", 0, 1, "a", (), (), ())
LIMIT_S = 60.0


class MemoryChannel:
    """Keeps what it is sent. ``fails``: the errors of the next attempts."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.sent: list[Notification] = []
        self.fails: list[NotificationError] = []
        self.attempts = 0

    def send(self, notification: Notification, now_s: float, limit_s: float) -> None:
        self.attempts += 1
        if self.fails:
            raise self.fails.pop(0)
        self.sent.append(notification)

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.sent]


class MemoryMaster:
    """What a notifier uses of a Master. ``left``: the store's values, shared by the Masters of a job."""

    def __init__(self, token: int, history: JobHistory, left: dict[str, str]) -> None:
        self.token = FencingToken(token)
        self.history, self.left = history, left
        self.store_error: Exception | None = None
        self.answers: dict[str, Callable[[Asked], Awaitable[Answer]]] = {}

    def status(self) -> JobStatus:
        return dataclasses.replace(STATUS, history=self.history.last(10))

    def events(self, request: EventsRequest) -> AsyncIterator[HistoryEntry]:
        return self.history.read(request.after, request.follow)

    def kept(self, name: str) -> str:
        return self.left.get(name, "")

    async def keep(self, name: str, value: str) -> None:
        await asyncio.sleep(0)
        if self.store_error is not None:
            raise self.store_error
        self.left[name] = value

    def denylist(self, entries: Sequence[DenylistEntry]) -> None:
        pass  # not a notifier's

    def answer_with(self, name: str, answer: Callable[[Asked], Awaitable[Answer]]) -> None:
        self.answers[name] = answer

    def watched(self, alarms: Sequence[Alarm]) -> None:
        raise AssertionError

    async def ended_within(self, limit_s: float) -> bool:
        raise AssertionError

    async def store_trouble(self) -> str:
        raise AssertionError

    async def submit(self, request: ScaleRequest) -> Granted:
        raise AssertionError

    async def changed(self) -> None:
        raise AssertionError

    def explain(self, text: str) -> None:
        raise AssertionError


class Term:
    """A Master's term with a notifier."""

    def __init__(
        self, token: int, channels: Sequence[MemoryChannel], history: JobHistory, left: dict[str, str]
    ) -> None:
        self.master = MemoryMaster(token, history, left)
        self.log: list[str] = []
        deps = DeliveryDeps(SystemClock(), SYSTEM_THREADS, lambda: 1.5, self.log.append)
        named = [NamedChannel(channel, channel.label) for channel in channels]
        sender = Sender("job", "run", f"node-{token}")
        self.notifier = Notifier(self.master, named, Severity.WARNING, sender, "job token", deps)
        self.task = asyncio.ensure_future(self.notifier.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


def add(history: JobHistory, text: str, kind: Kind = Kind.NODE_LOST, severity: str = "") -> None:
    history.publish([history.make(HistoryNote(kind, text, "b", severity), 1, 2.5)])


async def until(condition: Callable[[], bool]) -> None:
    async def look() -> None:
        while not condition():  # noqa: ASYNC110 - threads change what it looks at
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), LIMIT_S)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PAUSE_S", 0.0)


class FullSystem:
    """Threads of a system that at first allows no more."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(SYSTEM_THREADS, name)

    def start(self, target: Callable[..., object], *arguments: Any, name: str) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("can't start new thread")
        return SYSTEM_THREADS.start(target, *arguments, name=name)


def test_without_further_threads_a_notification_comes_later() -> None:
    async def body() -> None:
        channel, log = MemoryChannel("c"), list[str]()
        deps = DeliveryDeps(SystemClock(), FullSystem(2), lambda: 1.5, log.append)
        one = Delivery(NamedChannel(channel, "c"), deps)
        task = asyncio.ensure_future(one.run())
        sender = Sender("job", "run", "a")
        one.put(sender.of_test("first", 1, 1.0))
        one.put(sender.of_test("second", 2, 1.0))
        await until(lambda: len(channel.sent) == 2 or task.done())
        assert not task.done()
        assert log[0] == "a notification was not delivered to c: no further thread can be started for it"
        task.cancel()

    asyncio.run(body())


def test_only_new_entries_of_sufficient_severity_are_sent() -> None:
    async def body() -> None:
        history, channel = JobHistory(), MemoryChannel("one")
        add(history, "before")
        term = Term(1, [channel], history, {})
        await until(lambda: len(term.master.left) == 2)
        add(history, "lost")
        add(history, "joined", Kind.NODE_JOINED)
        add(history, "formed", Kind.WORLD_FORMED)
        add(history, "unwritten", Kind.STATE, "warning")
        add(history, "failed", Kind.JOB_ENDED, "critical")
        await asyncio.wait_for(term.task, LIMIT_S)
        assert channel.texts == ["lost", "unwritten", "failed"]
        assert [one.severity for one in channel.sent] == [Severity.WARNING, Severity.WARNING, Severity.CRITICAL]
        assert len({one.id for one in channel.sent}) == 3

    asyncio.run(body())


def test_the_next_master_continues_where_the_last_one_stopped() -> None:
    async def body() -> None:
        history, left, channel, other = JobHistory(), dict[str, str](), MemoryChannel("one"), MemoryChannel("two")
        first = Term(1, [channel, other], history, left)
        await until(lambda: len(left) == 3)
        add(history, "first")
        await until(lambda: list(left.values()).count("1") == 2)
        await first.end()
        add(history, "while there is none")
        second = Term(2, [channel, other], history, left)
        add(history, "second")
        await until(lambda: len(channel.sent) == len(other.sent) == 4)
        await second.end()
        changed = "node-2 is the Master now; before it was node-1"
        assert channel.texts == other.texts == ["first", changed, "while there is none", "second"]
        assert channel.sent[1].event == "master-changed"

    asyncio.run(body())


def test_each_channel_continues_where_it_stopped() -> None:
    async def body() -> None:
        history, ahead, behind = JobHistory(), MemoryChannel("ahead"), MemoryChannel("behind")
        for text in ("first", "second", "third"):
            add(history, text)
        left = {
            f"notify/{NamedChannel(one, one.label).key('job token')}": at for one, at in ((ahead, "2"), (behind, "0"))
        }
        term = Term(2, [ahead, behind], history, left)
        await until(lambda: list(left.values()).count("3") == 2)
        assert (ahead.texts, behind.texts) == (["third"], ["first", "second", "third"])
        await term.end()

    asyncio.run(body())


def test_the_same_master_again_is_no_change() -> None:
    async def body() -> None:
        left = dict[str, str]()
        for _ in range(2):
            channel = MemoryChannel("one")
            term = Term(1, [channel], JobHistory(), left)
            await until(lambda: len(left) == 2)
            await term.end()
            assert channel.sent == []

    asyncio.run(body())


def test_a_broken_channel_is_retried_reported_once_and_in_nobodys_way() -> None:
    async def body() -> None:
        history, good, bad = JobHistory(), MemoryChannel("good"), MemoryChannel("bad")
        bad.fails = [NotificationError("it answered with status 503", retry=True) for _ in range(3)]
        term = Term(1, [bad, good], history, {})
        await until(lambda: len(term.master.left) == 3)
        add(history, "first")
        add(history, "second")
        await until(lambda: len(good.sent) == len(bad.sent) == 2)
        assert bad.attempts == 5
        assert term.log == [
            "a notification was not delivered to bad: it answered with status 503",
            "notifications are delivered to bad again",
        ]
        await term.end()

    asyncio.run(body())


def test_a_channel_that_hangs_delays_no_other_and_not_the_end() -> None:
    async def body() -> None:
        history, good, mute = JobHistory(), MemoryChannel("good"), MemoryChannel("mute")
        over = threading.Event()
        mute.send = lambda *_: over.wait(LIMIT_S)  # type: ignore[assignment, method-assign]
        term = Term(1, [mute, good], history, {})
        await until(lambda: len(term.master.left) == 3)
        add(history, "first")
        add(history, "the end", Kind.JOB_ENDED)
        await asyncio.wait_for(term.task, LIMIT_S)
        assert good.texts == ["first", "the end"]
        assert not over.is_set()
        over.set()

    drain_s, shell.DRAIN_S = shell.DRAIN_S, 0.05
    try:
        asyncio.run(body())
    finally:
        shell.DRAIN_S = drain_s


def test_what_cannot_be_delivered_is_lost_and_counted() -> None:
    async def body() -> None:
        history, channel = JobHistory(), MemoryChannel("one")
        channel.fails = [NotificationError("it answered with status 404", retry=False)]
        term = Term(1, [channel], history, {})
        await until(lambda: len(term.master.left) == 2)
        add(history, "first")
        add(history, "second")
        await until(lambda: channel.texts == ["second"])
        answer = await term.master.answers["notify"](Asked(Purpose.NOTIFY, "kim@host"))
        assert answer == Answer("one: delivered (1 notification delivered so far, 1 lost)", ok=True)
        assert channel.texts[-1] == "a test of this channel, requested by kim@host"
        await term.end()

    asyncio.run(body())


def test_a_store_that_does_not_answer_is_reported_meanwhile() -> None:
    async def body() -> None:
        history, channel = JobHistory(), MemoryChannel("one")
        term = Term(1, [channel], history, {})
        await until(lambda: len(term.master.left) == 2)
        term.master.store_error = StoreUnavailable("no answer")
        add(history, "first")
        await until(lambda: len(channel.sent) == 1)
        term.notifier.tell(Alarm("store", "", "critical", "no answer for 30 s"), True)
        term.notifier.tell(Alarm("store", "", "critical", "no answer for 30 s"), False)
        await until(lambda: len(channel.sent) == 3)
        assert channel.texts[1:] == ["store: no answer for 30 s", "store: no longer"]
        assert [one.event for one in channel.sent[1:]] == ["alarm", "alarm-cleared"]
        await term.end()

    asyncio.run(body())


def test_a_master_that_is_fenced_out_sends_no_more() -> None:
    async def body() -> None:
        channel = MemoryChannel("one")
        term = Term(1, [channel], JobHistory(), {})
        term.master.store_error = FencedOut("another Master")
        await asyncio.wait_for(term.task, LIMIT_S)
        assert channel.sent == []

    asyncio.run(body())


def test_without_channels_a_test_says_what_to_do() -> None:
    async def body() -> None:
        term = Term(1, [], JobHistory(), {})
        await asyncio.wait_for(term.task, LIMIT_S)
        answer = await term.master.answers["notify"](Asked(Purpose.NOTIFY, "kim"))
        assert not answer.ok
        assert "(node-1) has no notification channels. Give every launcher --notify URL" in answer.text

    asyncio.run(body())


def test_a_failed_test_names_the_channel() -> None:
    async def body() -> None:
        good, bad = MemoryChannel("good"), MemoryChannel("bad")
        bad.fails = [NotificationError("it cannot be reached: refused", retry=True)]
        term = Term(1, [good, bad], JobHistory(), {})
        await until(lambda: "notify" in term.master.answers)
        answer = await term.master.answers["notify"](Asked(Purpose.NOTIFY, "kim"))
        assert not answer.ok
        assert answer.text.splitlines()[1].startswith("bad: FAILED: it cannot be reached: refused (0 notifications")
        await term.end()

    asyncio.run(body())


def test_the_end_waits_for_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PAUSE_S", 4 * LIMIT_S)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 4 * LIMIT_S)

    async def body() -> None:
        channel, sender = MemoryChannel("one"), Sender("job", "run", "a")
        channel.fails = [NotificationError("it answered with status 503", retry=True)]
        deps = DeliveryDeps(SystemClock(), SYSTEM_THREADS, lambda: 0.0, lambda text: None)
        one = Delivery(NamedChannel(channel, "one"), deps)
        task = asyncio.ensure_future(one.run())
        one.put(sender.of_test("first", 1, 0.0))
        await until(lambda: bool(one.counts.why))
        one.put(sender.of_test("the end", 2, 0.0))
        await one.drain(LIMIT_S)
        assert [text.split()[-1] for text in channel.texts] == ["first", "end"]
        task.cancel()

    asyncio.run(body())


def test_the_queue_is_bounded() -> None:
    async def body() -> None:
        channel = MemoryChannel("one")
        deps = DeliveryDeps(SystemClock(), SYSTEM_THREADS, lambda: 0.0, lambda text: None)
        waiting = Delivery(NamedChannel(channel, "one"), deps)
        for number in range(MOST_WAITING + 7):
            waiting.put(Sender("job", "run", "a").of_test("kim", number, 0.0))
        assert waiting.counts.lost == 7
        task = asyncio.ensure_future(waiting.run())
        await waiting.drain(LIMIT_S)
        task.cancel()
        assert [one.id for one in channel.sent] == [f"job-run-test-{number}" for number in range(7, MOST_WAITING + 7)]

    asyncio.run(body())
