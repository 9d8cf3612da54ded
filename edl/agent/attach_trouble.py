"""Says why this node has no stream to its Master, once it has tried for a while: it would wait in silence otherwise."""

from __future__ import annotations

from collections.abc import Callable

from edl.wire.address import address
from edl.wire.messages import NOT_THE_MASTER

QUIET_LEASES = 3.0
"""Lease times for which attempts may fail without a word: so long an election may take, and a Master's take-over."""


class AttachTrouble:
    """Failed attempts to attach to one Master after another. ``log`` gets whole sentences."""

    def __init__(self, log: Callable[[str], None], now_s: Callable[[], float], lease_ttl_s: float) -> None:
        self._log = log
        self._now_s = now_s
        self._quiet_s = QUIET_LEASES * lease_ttl_s
        self._place: tuple[str, int] | None = None
        """Address at which attempts fail; None: the last one succeeded."""
        self._since_s = 0.0
        self._said = False

    def failed(self, host: str, port: int, why: str) -> None:
        """Note that an attempt has failed."""
        if self._place != (host, port):
            self._place, self._since_s, self._said = (host, port), self._now_s(), False
        tried_s = self._now_s() - self._since_s
        if tried_s < self._quiet_s or self._said:
            return
        self._said = True
        self._log(
            f"cannot attach to the Master at {address(host, port)} for {tried_s:.0f} s: {why}. {_advice(why)}. "
            "Trying again"
        )

    def attached(self) -> None:
        """Note that an attempt has succeeded."""
        if self._said:
            self._log("attached to the Master")
        self._place, self._said = None, False


def _advice(why: str) -> str:
    if NOT_THE_MASTER in why:  # the network is fine
        return "It has stepped down, or cannot take office because the store is slow or full: its log says why"
    return "If its launcher runs, check that this host may connect to that port (firewalls, and --local-addr there)"
