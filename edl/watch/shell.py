"""Runs the job's watchdogs beside the elected Master."""

from __future__ import annotations

from collections.abc import Callable

from edl.ports import Clock
from edl.watch import job, raising
from edl.watch.table import WatchLimits
from edl.watched_master import WatchedMaster
from edl.wire.alarm import Alarm

LOOK_S = 2.0
"""Seconds between two looks."""
STORE = "store"
"""The watchdog whose alarm cannot be in the history, because nothing can be written then."""
Tell = Callable[[Alarm, bool], None]
"""Called with an alarm, and whether it has been raised (else: cleared)."""


class JobWatch:
    """The watchdogs for one Master's term. ``tell``: notifies of alarms that are not in the history."""

    def __init__(self, master: WatchedMaster, limits: WatchLimits, clock: Clock, tell: Tell) -> None:
        self._master = master
        self._limits = limits
        self._clock = clock
        self._tell = tell

    async def run(self) -> None:
        """Look from time to time until the job has ended, or until cancelled."""
        memory = job.JobMemory()
        status = self._master.status()
        raised = raising.resumed([alarm for alarm in status.alarms if not (alarm.node or alarm.shared)])
        over = status.phase == "ended"
        while not over:
            trouble = await self._master.store_trouble()
            status, now_s = self._master.status(), self._clock.now_s()
            memory, readings = job.look(memory, job.snapshot_of(status, now_s, trouble), self._limits)
            before, raised = raised, raising.update(raised, readings, now_s)
            self._report(before, raised)
            over = await self._master.ended_within(LOOK_S)

    def _report(self, before: raising.Raised, after: raising.Raised) -> None:
        key = (STORE, "")
        old, new = before.alarms.get(key), after.alarms.get(key)
        if new is not None and old is None:
            self._tell(new, True)
        elif old is not None and new is None:
            self._tell(old, False)
        lasting = [alarm for alarm in after.sorted if alarm.name != STORE]
        if lasting != [alarm for alarm in before.sorted if alarm.name != STORE]:
            self._master.watched(lasting)
