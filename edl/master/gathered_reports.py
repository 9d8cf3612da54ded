"""Reports that nobody waits for, kept until the next decision when decisions are slow.

Each decision looks at every node, and each node reports its pace every few seconds. Without this, a Master of a
thousand nodes would spend half of a core on reports that change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from edl.master import events as ev
from edl.tasks import Timer
from edl.wire.messages import Pace

WAITS = 40.0
SHORTEST_S, LONGEST_S = 0.05, 1.0
"""How long reports wait for a decision: in durations of the last decision, and its bounds in seconds. Where the wait
would be shorter, reports are decided about at once, which is so in jobs of up to some fifty nodes."""


class GatheredReports:
    """Events in order of their arrival. Whoever decides about another event takes them first."""

    def __init__(self, now_s: Callable[[], float], due: Callable[[], None]) -> None:
        """``due``: called on the event loop when the oldest has waited long enough."""
        self._now_s = now_s
        self._timer = Timer(now_s, due)
        self._events: list[ev.Event] = []

    def keep(self, event: object, took_s: float) -> bool:
        """Keep the event if it can wait; False: it has to be decided about now. ``took_s``: duration of the last
        decision."""
        if not (isinstance(event, ev.NodeSaid) and isinstance(event.message, Pace)):
            return False
        wait_s = min(WAITS * took_s, LONGEST_S)
        if wait_s < SHORTEST_S:
            return False
        if not self._events:
            self._timer.set(self._now_s() + wait_s)
        self._events.append(event)
        return True

    def take(self) -> list[ev.Event]:
        """All that have been kept; nothing is due any more."""
        self._timer.set(None)
        taken, self._events = self._events, []
        return taken
