"""Measures a worker's throughput and the share of time that it waits for data, for ``edl status``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from data_service.loader.lease_client import LeaseClient
from data_service.protocol.messages import ReadRate
from edl.ports import Clock

PACE_S = 2.0
"""Seconds between two reports."""


class Meter:
    """The meter of one worker and one data set."""

    def __init__(self, clock: Clock, waited: Callable[[float], None]) -> None:
        """``waited``: called with the seconds of each wait."""
        self._clock = clock
        self._waited = waited
        self._since_s = self._clock.now_s()
        self._records = 0
        self._waited_s = 0.0

    def count(self, records: int) -> None:
        """Count records that the script has received."""
        self._records += records

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the script waits for data."""
        began_s = self._clock.now_s()
        try:
            yield
        finally:
            waited_s = self._clock.now_s() - began_s
            self._waited_s += waited_s
            self._waited(waited_s)

    def tell(self, client: LeaseClient | None, name: str) -> None:
        """Send a report if one is due."""
        elapsed_s = self._clock.now_s() - self._since_s
        if elapsed_s < PACE_S or client is None:
            return
        client.tell(ReadRate(0, name, self._records / elapsed_s, min(1.0, self._waited_s / elapsed_s)))
        self._since_s, self._records, self._waited_s = self._clock.now_s(), 0, 0.0
