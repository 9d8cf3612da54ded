"""A wait that logs its reason after a while, then repeatedly, and once it is over; it fails at its deadline."""

from __future__ import annotations

from collections.abc import Callable

from data_service.loader import trainers
from edl.adapters.clock import SystemClock
from edl.errors import PsError
from edl.worker.session import note

QUIET_S = 10.0
"""Seconds before the first log line."""
REPEAT_S = 30.0
ALIVE_S = 5.0
"""Seconds between signs of life to the node that leases data to this trainer."""


_now_s = SystemClock().now_s


class BoundedWait:
    """One wait. ``what`` completes the phrase "waiting for …"."""

    def __init__(
        self,
        what: str,
        *,
        deadline_s: float | None,
        now_s: Callable[[], float] = _now_s,
        notify: Callable[[str], None] = note,
        alive: Callable[[], None] = trainers.waiting,
    ) -> None:
        """``deadline_s`` None: no deadline. ``alive`` is called every ``ALIVE_S`` seconds."""
        self._what, self._deadline_s, self._now_s, self._notify = what, deadline_s, now_s, notify
        self._begun_s = self._moved_s = now_s()
        self._next_s = self._begun_s + QUIET_S
        self._alive, self._alive_s = alive, self._begun_s + ALIVE_S
        self._notified = False

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; infinite without one."""
        return float("inf") if self._deadline_s is None else self._moved_s + self._deadline_s - self._now_s()

    def moved(self) -> None:
        """Restart the deadline: there was progress."""
        self._moved_s = self._now_s()

    def look(self, why: Callable[[], str]) -> None:
        """Log ``why()`` when due. Raises ``PsError`` at the deadline."""
        now_s = self._now_s()
        if self.left_s <= 0:
            raise PsError(
                f"waited {now_s - self._begun_s:.0f} s for {self._what}, {now_s - self._moved_s:.0f} s of it without "
                f"progress: {why()}. The last request may or may not have been applied. See the logs of pservers and "
                "the Master, or increase deadline_s"
            )
        if now_s >= self._alive_s:
            self._alive_s = now_s + ALIVE_S
            self._alive()
        if now_s >= self._next_s:
            self._next_s = now_s + REPEAT_S
            self._notified = True
            self._notify(f"waiting for {self._what} for {now_s - self._begun_s:.0f} s: {why()}")

    def over(self) -> None:
        """The wait is over. Log that if the wait was logged."""
        if self._notified:
            self._notified = False
            self._notify(f"continuing after {self._now_s() - self._begun_s:.0f} s ({self._what})")
