"""Renews a launcher's lease in a thread while its event loop is busy, so that a long computation does not lose the node
or the Master.

Usually the event loop renews the lease. The thread checks whether the loop responds, and renews in its place while it
does not, for at most two lease times: a dead loop must not keep its node in the job. A frozen process renews nothing,
because its threads are frozen as well.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edl.adapters.clock import SystemClock
from edl.agent.entitlement import LEASE_SHARE

LOOK_SHARE = 0.1
"""Interval between two checks, as a fraction of the lease time."""
DUE_SHARE = 0.4
"""Age of the last renewal, as a fraction of the lease time, from which the thread renews. The event loop renews after a
third at most."""
DEAD_SHARE = 2.0
"""Time without a response of the event loop, as a fraction of the lease time, after which it counts as dead."""


@dataclass(frozen=True, slots=True)
class LeaseCheck:
    """What a check has found. Times are in seconds of the monotonic clock."""

    now_s: float
    renewed_s: float
    """When the last successful renewal was sent."""
    asked_s: float | None
    """When the event loop was asked for a response that it still owes; None: it owes none."""


def is_due(seen: LeaseCheck, ttl_s: float) -> bool:
    """Whether to renew a lease of ``ttl_s`` seconds in place of the event loop."""
    if seen.asked_s is None:
        return False
    late, silent_s = seen.now_s - seen.renewed_s >= DUE_SHARE * ttl_s, seen.now_s - seen.asked_s
    return late and silent_s <= DEAD_SHARE * ttl_s


class Leases(Protocol):
    """A blocking client that renews leases. All calls come from one thread."""

    def renew(self, lease: int) -> bool:
        """Renew a lease; returns whether that succeeded."""
        ...

    def close(self) -> None:
        """Close the connections. ``renew`` opens new ones."""
        ...


class LeaseGuard:
    """Starts the thread that checks the event loop and renews the lease.

    ``entitle`` tells the fork server until when workers may run. ``renewed`` is called on the event loop with the time
    of the newest renewal that the thread has made. ``entitle`` and ``log`` are called from the thread.
    """

    def __init__(
        self,
        ttl_s: float,
        leases: Leases,
        entitle: Callable[[float], None],
        renewed: Callable[[float], None],
        log: Callable[[str], None],
    ) -> None:
        self._leases = leases
        self._entitle = entitle
        self._renewed = renewed
        self._log = log
        self._clock = SystemClock()
        self._loop = asyncio.get_running_loop()
        self._over = threading.Event()
        self._lease = 0
        self._ttl_s = ttl_s
        self._renewed_s = 0.0
        self._asked_s: float | None = None
        threading.Thread(target=self._run, name="edl-lease", daemon=True).start()

    def holds(self, lease: int, asked_s: float, lease_s: float) -> None:
        """Called on the event loop when it has obtained or renewed this lease, of ``lease_s`` seconds, by a request
        sent at ``asked_s``. ``lease`` 0: the launcher has none."""
        self._lease, self._renewed_s, self._ttl_s = lease, asked_s, lease_s

    def end(self) -> None:
        """Let the renewing thread end. Does not wait for it."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._ttl_s * LOOK_SHARE):
            self._look()
        self._leases.close()

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the event loop is closed
            self._over.set()

    def _look(self) -> None:
        now_s, lease = self._clock.now_s(), self._lease
        if self._asked_s is None:
            self._leases.close()
            self._asked_s = now_s
            self._on_loop(self._answered)
        elif (
            lease
            and is_due(LeaseCheck(now_s, self._renewed_s, self._asked_s), self._ttl_s)
            and self._leases.renew(lease)
        ):
            self._renewed_s = now_s
            self._entitle(now_s + LEASE_SHARE * self._ttl_s)
            self._on_loop(self._report)
            self._log("this launcher's event loop does not respond: renewed its lease from a thread")

    def _answered(self) -> None:
        self._asked_s = None

    def _report(self) -> None:
        """Pass the newest renewal to the event loop's callback. An older one may have expired by now."""
        self._renewed(self._renewed_s)
