"""How long a call to the store may take: the configured time, and more while the store is slow.

A limit that a busy store cannot keep makes it useless: every call is given up shortly before its answer, and sent
again, which keeps the store busy.
"""

from __future__ import annotations

SILENCE_SHARE = 0.5
"""A call may take this share of the time for which the store has given no answer."""
TIMES = 3.0
"""Each try of a call may take this many times as long as answers usually take."""
MOST_TIMES = 4.0
"""The limit is never more than this many times the configured one."""
FORGET = 0.25
"""Weight of an answer that came faster than usual. One that came slower counts fully."""


class AnswerTime:
    """The time limit of calls, from the answers so far. Without clock or I/O; all times are in seconds.

    ``least_s``: the configured limit, which holds for a store that answers quickly. ``members``: the number of members
    of the store, among which a call may have to divide its time.
    """

    def __init__(self, least_s: float, members: int) -> None:
        self._least_s = least_s
        self._members = members
        self._usual_s = 0.0
        self._silent_since_s: float | None = None

    def asked(self, now_s: float) -> None:
        """Note that a call is sent."""
        if self._silent_since_s is None:
            self._silent_since_s = now_s

    def answered(self, took_s: float) -> None:
        """Note that a call has been answered after ``took_s``."""
        self._silent_since_s = None
        self._usual_s = max(took_s, self._usual_s + FORGET * (took_s - self._usual_s))

    def refused(self) -> None:
        """Note that a call has been refused. That says that a member lives, and nothing about how fast the store is."""
        self._silent_since_s = None

    def limit_s(self, now_s: float) -> float:
        """Seconds that a call which begins now may take."""
        silent_s = 0.0 if self._silent_since_s is None else now_s - self._silent_since_s
        wanted_s = max(SILENCE_SHARE * silent_s, TIMES * self._members * self._usual_s)
        return min(max(self._least_s, wanted_s), MOST_TIMES * self._least_s)
