"""How old the rows are that a trainer's gradients belong to: how many pushes each pserver had applied when it sent
them. With ``--staleness-lr`` a pserver divides the learning rate by the pushes of others since then."""

from __future__ import annotations

import threading
from collections.abc import Mapping


class PullBases:
    """The number of pushes that each pserver had applied at the oldest pull of the current step. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._applied: dict[int, int] = {}
        self._trained: set[int] = set()
        """The pservers that have answered a training pull in this step."""

    def pulled(self, applied: Mapping[int, int], *, trains: bool) -> None:
        """Pservers have sent rows. ``trains``: as a training pull does, which the gradients of this step belong to;
        other rows only count at a pserver that has sent none of these."""
        with self._lock:
            for server, number in applied.items():
                if server not in self._trained:
                    self._applied[server] = number
                elif trains:
                    self._applied[server] = min(number, self._applied[server])
            if trains:
                self._trained |= applied.keys()

    def of_push(self, *, ends: bool) -> dict[int, int]:
        """The bases of a push that begins now, by pserver. ``ends``: it ends the step, and later pulls belong to the
        next one."""
        with self._lock:
            if ends:
                self._trained.clear()
            return dict(self._applied)
