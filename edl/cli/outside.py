"""The shell of ``edl watch``: looks at a job, notifies of alarms, and calls a heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import click

from edl.adapters.clock import SystemClock, wall_clock_s
from edl.adapters.system_threads import SYSTEM_THREADS
from edl.cli.find import LOOK_FAILURES, NoMaster, Where
from edl.cli.job_end import JobEnd
from edl.cli.polling import Finder
from edl.errors import NotificationError
from edl.exit_codes import ExitCode
from edl.notify.addresses import NamedChannel
from edl.notify.delivery import Delivery, DeliveryDeps
from edl.notify.notification import Notification, Sender
from edl.tasks import end
from edl.watch import outside, raising
from edl.wire.alarm import Alarm
from edl.wire.messages import Finish
from edl.wire.severity import Severity, severity_of
from edl.wire.status import HistoryEntry, Kind

ANSWER_S = 15.0
"""Seconds that one look may take."""
DRAIN_S = 20.0
"""Seconds that the last notifications may take."""
AGAIN_S = 1.0
"""Seconds between two looks of ``--once``, and at the end of the job."""
OUTCOME_S = 10.0
"""Seconds in which the outcome of a job that has ended is looked for."""
ALARM = 1
"""Exit status of ``--once`` while something is wrong."""
_SEVERITIES: dict[int, Severity] = {
    ExitCode.OK: Severity.INFO,
    ExitCode.KILLED: Severity.INFO,
    ExitCode.INCOMPLETE: Severity.WARNING,
}
"""Severity of the job's end by exit code, as in its history; of others: critical."""
_STATUSES = {Severity.INFO: ExitCode.OK, Severity.WARNING: ExitCode.INCOMPLETE}
"""Exit code of a job whose history alone says that it has ended, by the severity of that entry; of others: 1."""


@dataclass(frozen=True, slots=True)
class OutsideLimits:
    """The limits of ``edl watch`` in seconds."""

    limit_s: float
    """Without training or progress; not with ``--once``."""
    grace_s: float
    """Without an answer."""
    every_s: float
    """Between two looks."""


class Outside:
    """Watches one job. ``pulse``: the heartbeat."""

    def __init__(
        self,
        where: Where,
        limits: OutsideLimits,
        channels: Sequence[NamedChannel],
        pulse: NamedChannel | None,
        *,
        as_json: bool,
    ) -> None:
        self._finder = Finder(where)
        self._end = JobEnd(self._finder.connect)
        self._limits = limits
        self._json = as_json
        deps = DeliveryDeps(SystemClock(), SYSTEM_THREADS, wall_clock_s, _warn)
        self._deliveries = [Delivery(named, deps) for named in channels]
        self._pulse = Delivery(pulse, deps) if pulse is not None else None
        self._pulse_fails = False
        self._clock = SystemClock()
        self._numbers = itertools.count(1)
        host = socket.gethostname()
        self._sender = Sender(where.job or "?", f"watch-{host}-{wall_clock_s():.0f}", f"edl watch on {host}")

    async def run(self, *, once: bool) -> int:
        """Watch until the job has ended, or once; returns the exit status."""
        tasks = [asyncio.ensure_future(one.run()) for one in self._deliveries]
        try:
            status = await self._watch(once=once)
            await asyncio.gather(*(one.drain(DRAIN_S) for one in self._deliveries))
        finally:
            await self._end.aclose()
            for task in tasks:
                await end(task)
        return status

    async def _watch(self, *, once: bool) -> int:
        memory, raised = outside.OutsideMemory(), raising.Raised()
        limit_s = None if once else self._limits.limit_s
        while self._end.entry is None:
            seen = await self._look()
            if isinstance(seen, Finish):
                return self._ended(seen)
            if self._end.entry is not None:
                break
            memory, readings = outside.look(memory, seen, limit_s, self._limits.grace_s)
            before, raised = raised, raising.update(raised, readings, seen.at_s, on=False)
            self._report(before, raised)
            if not seen.silent:
                await self._beat()
            if once and (not seen.silent or raised.alarms):
                self._say(seen.silent or f"{seen.phase}: {seen.reason}")
                return ALARM if raised.alarms else int(ExitCode.OK)
            if once:
                await asyncio.sleep(AGAIN_S)
                continue
            await self._end.rest(asyncio.sleep(self._limits.every_s))
        return self._ended(await self._outcome(self._end.entry))

    async def _outcome(self, last: HistoryEntry) -> Finish:
        """How the job has ended: as it says itself, or else as the last entry of its history says."""

        async def reported() -> Finish:
            while True:
                seen = await self._look()
                if isinstance(seen, Finish):
                    return seen
                await asyncio.sleep(AGAIN_S)

        try:
            return await asyncio.wait_for(reported(), OUTCOME_S)
        except asyncio.TimeoutError:
            code = _STATUSES.get(severity_of(last.severity, Severity.CRITICAL), ExitCode.WORKER_FAILED)
            return Finish(int(code), last.text)

    async def _look(self) -> outside.OutsideSnapshot | Finish:
        """Ask the Master; the outcome if the job has ended."""
        try:
            return await asyncio.wait_for(self._ask(), ANSWER_S)
        except NoMaster as error:
            if error.outcome is not None:
                return error.outcome
            why = str(error)
        except asyncio.TimeoutError:  # from Python 3.11 on it is an OSError, too
            why = f"no answer within {ANSWER_S:g} s"
        except LOOK_FAILURES as error:  # whatever it is: nobody else would look
            why = str(error)
        return outside.OutsideSnapshot(self._clock.now_s(), why)

    async def _ask(self) -> outside.OutsideSnapshot:
        async with self._finder.connect() as client:
            status = await client.status()
        self._end.see(status)
        self._sender = Sender(status.job, self._sender.run, self._sender.node)
        return outside.snapshot_of(status, self._clock.now_s())

    def _report(self, before: raising.Raised, after: raising.Raised) -> None:
        for key, alarm in after.alarms.items():
            if key not in before.alarms:
                self._alarm(alarm, raised=True)
        for key, alarm in before.alarms.items():
            if key not in after.alarms:
                self._alarm(alarm, raised=False)

    def _alarm(self, alarm: Alarm, *, raised: bool) -> None:
        self._send(self._sender.of_alarm(alarm, raised, next(self._numbers), wall_clock_s()))

    def _ended(self, outcome: Finish) -> int:
        severity = _SEVERITIES.get(outcome.exit_code, Severity.CRITICAL)
        name = f"{self._sender.job}-{self._sender.run}-ended"
        kind, at_s = Kind.JOB_ENDED.value, wall_clock_s()
        self._send(Notification(name, self._sender.job, kind, severity, outcome.reason, at_s, master=self._sender.node))
        return outcome.exit_code

    def _send(self, notification: Notification) -> None:
        for one in self._deliveries:
            one.put(notification)
        self._say(notification.document().decode() if self._json else notification.subject)

    def _say(self, text: str) -> None:
        """Print a line. If others are notified, the watch goes on without an output, such as one on a full disk."""
        try:
            click.echo(text if not self._json or text.startswith("{") else json.dumps({"text": text}))
        except OSError:
            if not self._deliveries and self._pulse is None:
                raise

    async def _beat(self) -> None:
        """Call the heartbeat once. It is not repeated: the next look calls it again."""
        if self._pulse is None:
            return
        try:
            await self._pulse.attempt(self._sender.of_test("edl watch", 0, wall_clock_s()))
        except NotificationError as error:
            if not self._pulse_fails:
                _warn(f"{self._pulse.label}: {error}")
            self._pulse_fails = True
        else:
            self._pulse_fails = False


def _warn(text: str) -> None:
    """Print a line on stderr, if that is possible."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)
