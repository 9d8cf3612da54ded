"""Delivers the notifications of one channel, one after the other, with retries."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from edl.errors import NotificationError
from edl.notify.addresses import NamedChannel
from edl.notify.notification import Notification
from edl.ports import Clock
from edl.tasks import Backoff
from edl.threads import Threads

ATTEMPT_S = 10.0
"""Timeout in seconds of each wait of an attempt, and of a program."""
WHOLE_ATTEMPT_S = 30.0
"""Seconds after which an attempt counts as failed, whatever it is waiting for."""
PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Bounds of the pause between two attempts."""
GIVE_UP_S = 300.0
"""Seconds of attempts after which a notification is given up."""
MOST_WAITING = 100
"""Limit on the notifications that wait for a channel; beyond it the oldest is given up."""


@dataclass(slots=True)
class DeliveryCounts:
    """What has become of the notifications of a channel."""

    sent: int = 0
    lost: int = 0
    why: str = ""
    """Why the last attempt failed; empty: it succeeded, or there was none."""


@dataclass(frozen=True, slots=True)
class DeliveryDeps:
    """What a delivery gets from the launcher."""

    clock: Clock
    threads: Threads
    wall_clock_s: Callable[[], float]
    log: Callable[[str], None]


class Delivery:
    """The queue of one channel. ``settled``: called after a notification was delivered or given up."""

    def __init__(
        self,
        named: NamedChannel,
        deps: DeliveryDeps,
        settled: Callable[[Notification], None] = lambda notification: None,
    ) -> None:
        self.label = named.label
        self.counts = DeliveryCounts()
        self._channel = named.channel
        self._deps = deps
        self._settled = settled
        self._waiting: collections.deque[Notification] = collections.deque()
        self._more = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._turn = asyncio.Lock()
        """Held during an attempt: there is one at a time."""
        self._last: asyncio.Future[Exception | None] | None = None
        """The outcome of the last attempt; pending while its thread has not ended."""
        self._closing = asyncio.Event()

    def put(self, notification: Notification) -> None:
        """Queue a notification; never waits."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self.counts.lost += 1
        self._waiting.append(notification)
        self._idle.clear()
        self._more.set()

    async def run(self) -> None:
        """Deliver what is queued until cancelled."""
        while True:
            while not self._waiting:
                self._idle.set()
                self._more.clear()
                await self._more.wait()
            notification = self._waiting.popleft()
            await self._deliver(notification)
            self._settled(notification)

    async def drain(self, limit_s: float) -> None:
        """Wait until everything that is queued has been delivered or given up, at most ``limit_s``. From now on a
        notification is tried only once more, without pauses."""
        self._closing.set()
        await asyncio.wait({asyncio.ensure_future(self._idle.wait())}, timeout=limit_s)

    async def _deliver(self, notification: Notification) -> None:
        pauses, since_s = Backoff(PAUSE_S, LONGEST_PAUSE_S), self._deps.clock.now_s()
        failed_before = bool(self.counts.why)
        while True:
            try:
                await self.attempt(notification)
            except NotificationError as error:
                self._failed(error)
                pause_s = pauses.next()
                # After one that was given up, each is tried once: a channel that is gone for good must not keep the
                # newest notification waiting behind all others.
                late = self._deps.clock.now_s() + pause_s - since_s > GIVE_UP_S
                if not error.retry or late or failed_before or self._closing.is_set():
                    self.counts.lost += 1
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause_s)
            else:
                self._succeeded()
                return

    def _failed(self, error: NotificationError) -> None:
        if not self.counts.why:
            self._deps.log(f"a notification was not delivered to {self.label}: {error}")
        self.counts.why = str(error)

    def _succeeded(self) -> None:
        if self.counts.why:
            lost = f"; {self.counts.lost} were lost" if self.counts.lost else ""
            self._deps.log(f"notifications are delivered to {self.label} again{lost}")
        self.counts.sent += 1
        self.counts.why = ""

    async def attempt(self, notification: Notification) -> None:
        """Send once, in a thread of its own. Raises ``NotificationError``."""
        async with self._turn:
            await self._attempt(notification)

    async def _attempt(self, notification: Notification) -> None:
        if self._last is not None and not self._last.done():
            raise NotificationError("an earlier attempt has not ended yet", retry=True)
        loop = asyncio.get_running_loop()
        self._last = answer = loop.create_future()

        def send() -> None:
            outcome: Exception | None = None
            try:
                self._channel.send(notification, self._deps.wall_clock_s(), ATTEMPT_S)
            except Exception as error:  # noqa: BLE001 - top of a thread; reported below
                outcome = error
            try:
                loop.call_soon_threadsafe(_answered, answer, outcome)
            except RuntimeError:
                return  # the loop is closed: nobody waits for this attempt any more

        try:
            self._deps.threads.start(send, name="edl-notify")
        except RuntimeError:  # the system allows no more at present
            self._last = None
            raise NotificationError("no further thread can be started for it", retry=True) from None
        await asyncio.wait({answer}, timeout=WHOLE_ATTEMPT_S)
        if not answer.done():
            raise NotificationError(f"the attempt has not ended within {WHOLE_ATTEMPT_S:g} s", retry=True)
        failure = answer.result()
        if isinstance(failure, NotificationError):
            raise failure
        if failure is not None:
            raise NotificationError(f"{type(failure).__name__} in the channel", retry=False) from failure


def _answered(answer: asyncio.Future[Exception | None], outcome: Exception | None) -> None:
    if not answer.done():
        answer.set_result(outcome)
