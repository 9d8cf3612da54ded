"""Watchdogs and the denylist of simulated launchers and Masters, in which something is found now and then. Only some
seeds have them."""

from __future__ import annotations

import random  # noqa: TID251 - a generator of its own, so that schedules without watchdogs stay what they are
from collections.abc import Sequence

from edl.wire.alarm import Alarm
from edl.wire.denylist import DenylistEntry
from edl.wire.messages import HangLimit
from edl.wire.records import NodeInfo

ALARM_SEEDS = 5
"""Every eighth seed, those with this remainder, has watchdogs."""
SHORTEST_S, LONGEST_S = 0.5, 3.0
"""Bounds of the pause between two reports of a launcher."""
_OF_NODES = (
    Alarm("disk-space", "logs", "warning", "2 GiB free"),
    Alarm("disk-space", "logs", "critical", "0 bytes free"),
    Alarm("inodes", "checkpoints", "warning", "7 free", shared=True),
)
_HANG = Alarm("hang", "", "warning", "no commit() for 301 s", shared=True)
_OF_JOBS = (Alarm("restarts-left", "", "warning", "1 left"), Alarm("no-progress", "", "critical", "3 worlds failed"))


class SimWatchdogs:
    """Draws what the watchdogs of all launchers find, and what is on the denylist."""

    def __init__(self, seed: int) -> None:
        self._drawn = random.Random(seed)  # noqa: S311 - not for secrets

    @staticmethod
    def of_seed(seed: int) -> SimWatchdogs | None:
        """The watchdogs of a schedule; None: it has none."""
        return SimWatchdogs(seed) if seed % 8 == ALARM_SEEDS else None

    def of_node(self) -> Sequence[Alarm]:
        """All alarms of a node's directories."""
        by_key = {alarm.key: alarm for alarm in _OF_NODES if self._drawn.random() < 0.4}
        return tuple(by_key.values())

    def suspicion(self) -> Alarm | None:
        """The alarm about workers that look as if they hung; None: they do not."""
        return _HANG if self._drawn.random() < 0.2 else None

    def hang_limit(self) -> HangLimit:
        """What a node has learnt about its pauses."""
        return HangLimit(self._drawn.choice((0.0, 300.0, 480.0)), self._drawn.randint(0, 100), 20)

    def of_job(self) -> Sequence[Alarm]:
        """All alarms of the job."""
        return tuple(alarm for alarm in _OF_JOBS if self._drawn.random() < 0.4)

    def denylist(self, infos: Sequence[NodeInfo]) -> Sequence[DenylistEntry]:
        """All entries that count for these nodes: now and then one of the hosts, or one of the devices."""
        if not infos or self._drawn.random() < 0.6:
            return ()
        info = self._drawn.choice(infos)
        devices = [""] + [one for text in info.devices for one in text.split(",")]
        return (DenylistEntry(info.host_id, self._drawn.choice(devices), "too hot", "another job", "another run"),)

    def pause_s(self) -> float:
        """Seconds until the next report."""
        return self._drawn.uniform(SHORTEST_S, LONGEST_S)
