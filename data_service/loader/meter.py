"""How fast a worker takes records, and how much of the time it waits for them: for ``edl status``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from data_service.loader.lease_client import LeaseClient
from data_service.protocol.messages import Pace
from edl.adapters.clock import SystemClock

_CLOCK = SystemClock()
PACE_S = 2.0
"""How often it is told."""


class Meter:
    """Of one worker and one data set."""

    def __init__(self) -> None:
        self._since_s = _CLOCK.now_s()
        self._records = 0
        self._waited_s = 0.0

    def count(self, records: int) -> None:
        """These have been handed out."""
        self._records += records

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The script waits for data meanwhile."""
        began_s = _CLOCK.now_s()
        try:
            yield
        finally:
            self._waited_s += _CLOCK.now_s() - began_s

    def tell(self, client: LeaseClient | None, name: str) -> None:
        """Say it, if that is due."""
        elapsed_s = _CLOCK.now_s() - self._since_s
        if elapsed_s < PACE_S or client is None:
            return
        client.tell(Pace(0, name, self._records / elapsed_s, min(1.0, self._waited_s / elapsed_s)))
        self._since_s, self._records, self._waited_s = _CLOCK.now_s(), 0, 0.0
