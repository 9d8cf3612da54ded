"""Keeps a launcher's lease while its event loop is busy, so that a computation costs no node and no Master.

The event loop renews the lease as long as it can. This thread asks the loop again and again whether it runs, and renews
in its place while it does not answer; for two leases at most, since a loop that is dead must not keep its node in the
job. A process that is frozen renews nothing: its threads are frozen, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edl.adapters.clock import SystemClock
from edl.agent.entitlement import LEASE_SHARE

LOOK_SHARE = 0.1
"""Of a lease, between two looks,"""
DUE_SHARE = 0.4
"""after which it is to be renewed: the event loop does so after a third,"""
DEAD_SHARE = 2.0
"""and for which the event loop may be silent before it counts as dead."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look shows. Times in seconds of one monotonic clock."""

    now_s: float
    renewed_s: float
    """When the last renewal was asked for that was answered."""
    asked_s: float | None
    """Since when the event loop owes an answer; None: it owes none."""


def is_due(seen: Seen, ttl_s: float) -> bool:
    """Whether to renew a lease of so many seconds in place of the event loop."""
    if seen.asked_s is None:
        return False
    late, silent_s = seen.now_s - seen.renewed_s >= DUE_SHARE * ttl_s, seen.now_s - seen.asked_s
    return late and silent_s <= DEAD_SHARE * ttl_s


class Leases(Protocol):
    """Renews leases. It blocks, and is called from one thread."""

    def renew(self, lease: int) -> bool:
        """Keep a lease alive; whether it worked."""
        ...

    def close(self) -> None:
        """There is nothing to do for a while."""
        ...


class LeaseGuard:
    """The thread. ``entitle`` tells the fork server until when workers may run; ``renewed`` is called on the event loop
    with the time of the newest renewal made here. ``entitle`` and ``log`` are called from the thread."""

    def __init__(
        self,
        ttl_s: float,
        leases: Leases,
        entitle: Callable[[float], None],
        renewed: Callable[[float], None],
        log: Callable[[str], None],
    ) -> None:
        self._ttl_s = ttl_s
        self._leases = leases
        self._entitle = entitle
        self._renewed = renewed
        self._log = log
        self._clock = SystemClock()
        self._loop = asyncio.get_running_loop()
        self._over = threading.Event()
        self._lease = 0
        self._renewed_s = 0.0
        self._asked_s: float | None = None
        threading.Thread(target=self._run, name="edl-lease", daemon=True).start()

    def holds(self, lease: int, asked_s: float) -> None:
        """The event loop has this lease; it was granted, or renewed, when asked at ``asked_s``. 0: it has none."""
        self._lease, self._renewed_s = lease, asked_s

    def end(self) -> None:
        """Renew no more."""
        self._over.set()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            while not self._over.wait(self._ttl_s * LOOK_SHARE):
                self._look()
        self._leases.close()

    def _look(self) -> None:
        now_s, lease = self._clock.now_s(), self._lease
        if self._asked_s is None:
            self._leases.close()
            self._asked_s = now_s
            self._loop.call_soon_threadsafe(self._answered)
        elif lease and is_due(Seen(now_s, self._renewed_s, self._asked_s), self._ttl_s) and self._leases.renew(lease):
            self._renewed_s = now_s
            self._entitle(now_s + LEASE_SHARE * self._ttl_s)
            self._loop.call_soon_threadsafe(self._tell)
            self._log("this launcher's event loop is busy: its lease has been renewed beside it")

    def _answered(self) -> None:
        self._asked_s = None

    def _tell(self) -> None:
        """Of several renewals the event loop hears of the last one alone: what an earlier one allows may be over."""
        self._renewed(self._renewed_s)
