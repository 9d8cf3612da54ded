"""Probes the launchers of absent nodes: if its port refuses connections, a launcher is dead.

After the death of a Master all nodes are absent for a moment, and attach again within seconds. So only a few are probed
at a time, and those that have attached meanwhile are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from edl.ports import Clock
from edl.tasks import Backoff
from edl.types import NodeId
from edl.wire.records import NodeInfo

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Bounds of the pause in seconds between two probes of one node: a dying process may accept connections for a
moment."""
AT_ONCE = 32
"""Limit on simultaneous probes."""
CROWDED_S = 0.125
"""While more nodes wait to be probed, each probe lasts this many seconds longer, which limits the rate to 256 probes
per second."""


class Refuses(Protocol):
    """A function that finds out whether a host refuses connections on a port."""

    def __call__(self, host: str, port: int, timeout_s: float = 1.0) -> Awaitable[bool]:
        """Whether the port refuses connections; False if it accepts one or does not answer within ``timeout_s``."""
        ...


class Probing:
    """The probes of one Master. ``suspect``: the previous Master's node, which is probed without waiting for a turn."""

    def __init__(self, refuses: Refuses, clock: Clock, suspect: NodeId | None) -> None:
        self._refuses = refuses
        self._clock = clock
        self._suspect = suspect
        self._places = asyncio.Semaphore(AT_ONCE)

    async def proves_gone(self, info: NodeInfo, away: Callable[[], bool], limit_s: float) -> bool:
        """Probe a node repeatedly while it is ``away``, at most for ``limit_s`` seconds; returns whether its launcher
        is proven dead."""
        deadline_s = self._clock.now_s() + limit_s
        pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while self._clock.now_s() < deadline_s and away():
            if info.node == self._suspect:
                refused = await self._refuses(info.host, info.port)
            else:
                refused = await self._in_turn(info, away)
            if refused:
                return True
            await asyncio.sleep(pauses.next())
        return False

    async def _in_turn(self, info: NodeInfo, away: Callable[[], bool]) -> bool:
        async with self._places:
            if not away():
                return False
            refused = await self._refuses(info.host, info.port)
            if self._places.locked():
                await asyncio.sleep(CROWDED_S)
            return refused
