"""Decides how long this node's workers may train without hearing from their launcher.

A frozen launcher cannot stop its workers, and when its lease has ended the other nodes form a world without it. So the
launcher keeps extending a deadline in the fork server, which kills the workers when it passes. The inequality that
keeps two worlds from training side by side is in docs/decisions/0034-frozen-launchers.md.
"""

from __future__ import annotations

import math

LEASE_SHARE = 0.9
"""Share of a lease that a renewal grants, counted from the renewal request; the rest covers a fork server that wakes up
late."""
LIFE_SHARE = 0.5
"""Share of a lease that is added while the launcher lives but the store does not answer: it then stops its workers
itself."""
RENEW_SHARE = 1 / 3
"""The deadline is extended when no more than this share of a lease is left."""
LOOK_SHARE = 1 / 6
"""Interval between two checks, as a share of ``--lease-ttl``, the shortest lease: the next one may be a short one."""


class Entitlement:
    """The arithmetic, without clock or I/O. Times are those of the launcher and of the fork server on the same host."""

    def __init__(self, lease_ttl_s: float, now_s: float) -> None:
        self._lease_ttl_s = lease_ttl_s
        self._leased_s = -math.inf
        self._lost = False
        self.until_s = now_s + lease_ttl_s * LIFE_SHARE
        """The deadline that the fork server was last given."""

    def granted(self, asked_s: float, lease_ttl_s: float) -> None:
        """Note that the store has granted a new lease of ``lease_ttl_s`` seconds, asked for at ``asked_s``."""
        self._lease_ttl_s = lease_ttl_s
        self.leased(asked_s)

    def leased(self, asked_s: float) -> None:
        """Note that the store renewed the lease. The request was sent at ``asked_s``, so the lease lasts at least from
        then on."""
        self._leased_s = max(self._leased_s, asked_s)
        self._lost = False

    def lost(self) -> None:
        """Note that the lease has ended and the agent has not reacted yet."""
        self._lost = True

    def acted(self) -> None:
        """Note that the agent has reacted: it now ends its workers itself."""
        self._lost = False

    def look(self, now_s: float) -> float | None:
        """The new deadline if it should change, else None.

        A launcher that comes after the deadline was frozen itself: its workers are dead, and being alive proves nothing
        about the lease. Only a renewal does. A deadline of an earlier, longer lease is taken back: the new one may end
        before it.
        """
        leased_s, alive_s = self._leased_s + self._lease_ttl_s * LEASE_SHARE, now_s + self._lease_ttl_s * LIFE_SHARE
        until_s = max(self.until_s, leased_s)
        in_time = now_s < until_s and not self._lost
        if in_time and until_s - now_s <= self._lease_ttl_s * RENEW_SHARE:
            until_s = alive_s
        until_s = min(until_s, max(leased_s, alive_s))
        if until_s == self.until_s:
            return None
        self.until_s = until_s
        return until_s
