"""The job's clock, by which rows get old: whole seconds during which the job had pservers.

It is not the time of day. A pserver counts its own seconds, and is never behind a second that it has seen: in rows that
were restored, moved or replicated, and in trainers' requests, which carry the largest that they were answered with. So
pservers agree within the time between two steps, whatever their hosts' clocks show. After a restore, also a rollback,
the clock goes on from the youngest row: while the job was down no row got older.
"""

from __future__ import annotations

from collections.abc import Callable

from edl.threads import ThreadLock

MOST = (1 << 32) - 1
"""A row has 32 bits for it, 136 years."""


class JobClock:
    """One pserver's view of the job's clock. Thread-safe."""

    def __init__(self, now_s: Callable[[], float], lock: ThreadLock) -> None:
        """``now_s``: a monotonic clock."""
        self._now_s, self._lock = now_s, lock
        self._zero_s = now_s()

    def now(self) -> int:
        """The current second, from 0."""
        return min(int(self._now_s() - self._zero_s), MOST)

    def restart(self) -> None:
        """Count from 0 again."""
        with self._lock:
            self._zero_s = self._now_s()

    def at_least(self, second: int) -> None:
        """Advance to this second if it is later."""
        if self.now() < second:
            with self._lock:
                self._zero_s = min(self._zero_s, self._now_s() - min(second, MOST))
