"""How long this node's workers may train if nothing more is heard from their launcher.

A launcher that freezes cannot stop its workers, and when its lease has ended the others form a world without it. So the
fork server is told again and again until when workers may run, and kills them then. The inequality that keeps two
worlds from training side by side is in docs/decisions/0034-frozen-launchers.md.
"""

from __future__ import annotations

import math

LEASE_SHARE = 0.9
"""Of a lease, counted from when its renewal was asked for; the rest is for a fork server that wakes up late."""
LIFE_SHARE = 0.5
"""So much of a lease more, where a launcher lives that has no answer from the store: it stops its workers by itself."""
RENEW_SHARE = 1 / 3
"""It is said once no more than so much of a lease is left,"""
LOOK_SHARE = 1 / 6
"""and looked at so often."""


class Entitlement:
    """The arithmetic. No clock, no IO: times are the launcher's own, and those of the fork server on the same host."""

    def __init__(self, lease_ttl_s: float, now_s: float) -> None:
        self._lease_ttl_s = lease_ttl_s
        self.interval_s = lease_ttl_s * LOOK_SHARE
        """How far apart looks are meant to be."""
        self._leased_s = -math.inf
        self._lost = False
        self.until_s = now_s + lease_ttl_s * LIFE_SHARE
        """Until then, as far as the fork server has been told."""

    def leased(self, asked_s: float) -> None:
        """The store has renewed the lease. It was asked at ``asked_s``, so the lease lasts at least from then."""
        self._leased_s = max(self._leased_s, asked_s)
        self._lost = False

    def lost(self) -> None:
        """The lease has ended, and the agent has not acted on it yet."""
        self._lost = True

    def acted(self) -> None:
        """The agent has, so it ends its workers in its own time."""
        self._lost = False

    def look(self, now_s: float) -> float | None:
        """Until when workers may run, if that is later than what was said last.

        A launcher that comes too late was held up itself: its workers are dead, and that it lives says nothing about
        the lease. Only a renewal does.
        """
        until_s = max(self.until_s, self._leased_s + self._lease_ttl_s * LEASE_SHARE)
        in_time = now_s < until_s and not self._lost
        if in_time and until_s - now_s <= self._lease_ttl_s * RENEW_SHARE:
            until_s = now_s + self._lease_ttl_s * LIFE_SHARE
        if until_s <= self.until_s:
            return None
        self.until_s = until_s
        return until_s
