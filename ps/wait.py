"""Waiting that is never silent: a line on stderr after a while, more of them, one when it is over, an error at last."""

from __future__ import annotations

from collections.abc import Callable

from data_service.loader import trainers
from edl.adapters.clock import SystemClock
from edl.errors import PsError
from edl.worker.session import note

QUIET_S = 10.0
"""So long nobody is told."""
REPEAT_S = 30.0
ALIVE_S = 5.0
"""Whoever lends this trainer data hears so often that it is not dead."""


_now_s = SystemClock().now_s


class BoundedWait:
    """Of one wait. ``what`` completes "waiting for …"."""

    def __init__(
        self,
        what: str,
        *,
        deadline_s: float | None,
        now_s: Callable[[], float] = _now_s,
        tell: Callable[[str], None] = note,
        alive: Callable[[], None] = trainers.waiting,
    ) -> None:
        """``deadline_s`` None: for ever. ``alive`` is called every few seconds."""
        self._what, self._deadline_s, self._now_s, self._tell = what, deadline_s, now_s, tell
        self._begun_s = self._moved_s = now_s()
        self._next_s = self._begun_s + QUIET_S
        self._alive, self._alive_s = alive, self._begun_s + ALIVE_S
        self._told = False

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return float("inf") if self._deadline_s is None else self._moved_s + self._deadline_s - self._now_s()

    def moved(self) -> None:
        """Something has been achieved: the deadline counts from now."""
        self._moved_s = self._now_s()

    def look(self, why: Callable[[], str]) -> None:
        """Still waiting, for this reason. Raises ``PsError`` at the deadline."""
        now_s = self._now_s()
        if self.left_s <= 0:
            raise PsError(
                f"waited {now_s - self._begun_s:.0f} s for {self._what}, {now_s - self._moved_s:.0f} s of it without "
                f"progress: {why()}. Whether the last request was carried out is not known. Look at the pservers' and "
                "the Master's logs; a longer deadline_s waits longer"
            )
        if now_s >= self._alive_s:
            self._alive_s = now_s + ALIVE_S
            self._alive()
        if now_s >= self._next_s:
            self._next_s = now_s + REPEAT_S
            self._told = True
            self._tell(f"waiting for {self._what} since {now_s - self._begun_s:.0f} s: {why()}")

    def over(self) -> None:
        """It has come."""
        if self._told:
            self._told = False
            self._tell(f"after {self._now_s() - self._begun_s:.0f} s it goes on ({self._what})")
