"""Notifies of the job's events, beside the elected Master."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Sequence

from edl.errors import FencedOut, NotificationError, StoreError
from edl.notify.addresses import NamedChannel
from edl.notify.delivery import Delivery, DeliveryDeps
from edl.notify.notification import Notification, Sender
from edl.rendezvous.phrases import count
from edl.tasks import end
from edl.watched_master import WatchedMaster
from edl.wire.alarm import Alarm
from edl.wire.messages import Asked
from edl.wire.severity import Severity
from edl.wire.status import Answer, EventsRequest, Kind

DRAIN_S = 10.0
"""Seconds at the end of the job in which notifications may still be delivered."""
KEEP_AGAIN_S = 1.0
"""Pause in seconds before a value that the store did not take is written again."""
PURPOSE = "notify"
_MASTER = "notify/master"
"""Name of the value that holds the last Master."""


class Notifier:
    """The notifications of one Master's term. ``least``: from which severity on. ``run``: see
    ``edl.launch.registration.Registration``."""

    def __init__(
        self,
        master: WatchedMaster,
        channels: Sequence[NamedChannel],
        least: Severity,
        sender: Sender,
        run: str,
        deps: DeliveryDeps,
    ) -> None:
        self._master = master
        self._least = least
        self._sender = sender
        self._deps = deps
        self._numbers = itertools.count(1)
        self._unkept: dict[str, int] = {}
        """Numbers of entries that are done with and not stored yet, by the channels' keys."""
        self._changed = asyncio.Event()
        self._keys = [f"notify/{named.key(run)}" for named in channels]
        self._deliveries = [
            Delivery(named, deps, functools.partial(self._settled, key))
            for named, key in zip(channels, self._keys, strict=True)
        ]

    def tell(self, alarm: Alarm, raised: bool) -> None:
        """Notify of an alarm that cannot be in the history."""
        number = self._master.token * 1000 + next(self._numbers)
        self._put_all(self._sender.of_alarm(alarm, raised, number, self._deps.wall_clock_s()))

    async def run(self) -> None:
        """Notify until the job has ended and everything is delivered or given up, or until cancelled."""
        self._master.answer_with(PURPOSE, self.test)
        if not self._deliveries:
            return
        tasks = [
            asyncio.ensure_future(work) for work in (*(one.run() for one in self._deliveries), self._keep_numbers())
        ]
        try:
            await self._begin()
            await self._follow()
            await asyncio.gather(*(one.drain(DRAIN_S) for one in self._deliveries))
        except FencedOut:
            return  # another Master has been elected, which continues
        finally:
            for task in tasks:
                await end(task)

    async def _begin(self) -> None:
        """Store where to begin, if no Master did before, and notify if there was another Master."""
        newest = str(self._newest())
        for key in self._keys:
            if not self._master.kept(key):
                await self._keep(key, newest)
        token, before = str(self._master.token), self._master.kept(_MASTER)
        if before.partition(" ")[0] != token:
            await self._keep(_MASTER, f"{token} {self._sender.node}")
            if before:
                node = before.partition(" ")[2]
                self._put_all(self._sender.of_change(node, self._master.token, self._deps.wall_clock_s()))

    def _newest(self) -> int:
        """Number of the newest entry of the history; 0: there is none."""
        return max((entry.number for entry in self._master.status().history), default=0)

    async def _follow(self) -> None:
        """Queue the notifications about new entries of the history, until the one about the end of the job."""
        after = [int(self._master.kept(key) or 0) for key in self._keys]
        async for entry in self._master.events(EventsRequest(min(after), follow=True)):
            notification = self._sender.of_entry(entry)
            if notification is not None:
                for delivery, sent in zip(self._deliveries, after, strict=True):
                    if entry.number > sent:
                        self._put(delivery, notification)
            if entry.kind == Kind.JOB_ENDED.value:
                return

    def _put_all(self, notification: Notification) -> None:
        for delivery in self._deliveries:
            self._put(delivery, notification)

    def _put(self, delivery: Delivery, notification: Notification) -> None:
        if notification.severity.rank >= self._least.rank:
            delivery.put(notification)

    def _settled(self, key: str, notification: Notification) -> None:
        """Remember that an entry is done with; ``_keep_numbers`` stores it."""
        if notification.number:
            self._unkept[key] = notification.number
            self._changed.set()

    async def _keep_numbers(self) -> None:
        """Store what is done with, so that the next Master does not send it again. A task of its own: the channels go
        on while the store does not answer."""
        with contextlib.suppress(FencedOut):
            while True:
                await self._changed.wait()
                self._changed.clear()
                while self._unkept:
                    key, number = self._unkept.popitem()
                    await self._keep(key, str(number))

    async def _keep(self, key: str, value: str) -> None:
        """Store a value; waits for the store. Raises ``FencedOut``."""
        while True:
            try:
                await self._master.keep(key, value)
            except FencedOut:
                raise
            except StoreError:
                await asyncio.sleep(KEEP_AGAIN_S)
            else:
                return

    async def test(self, asked: Asked) -> Answer:
        """Send a test through every channel at once; the answer has one line for each."""
        if not self._deliveries:
            where = f"the Master's launcher ({self._sender.node}) has no notification channels"
            return Answer(f"{where}. Give every launcher --notify URL, or EDL_NOTIFY", ok=False)
        number = self._master.token * 1000 + next(self._numbers)
        notification = self._sender.of_test(asked.by, number, self._deps.wall_clock_s())
        failures = await asyncio.gather(*(_tested(one, notification) for one in self._deliveries))
        lines = [_line(one, why) for one, why in zip(self._deliveries, failures, strict=True)]
        return Answer("\n".join(lines), ok=not any(failures))


async def _tested(delivery: Delivery, notification: Notification) -> str:
    """Why the test could not be delivered; empty: it was."""
    try:
        await delivery.attempt(notification)
    except NotificationError as error:
        return str(error)
    return ""


def _line(delivery: Delivery, why: str) -> str:
    counts = delivery.counts
    so_far = f"{count(counts.sent, 'notification')} delivered so far, {counts.lost} lost"
    return f"{delivery.label}: {f'FAILED: {why}' if why else 'delivered'} ({so_far})"
