"""Windows of simulated ranks, some of which are slow for a while. Only some seeds have them."""

from __future__ import annotations

import random  # noqa: TID251 - a generator of its own, so that schedules without windows stay what they are
from collections.abc import Collection

from edl.job_records import StragglerRules
from edl.types import NodeId, Round
from edl.wire.messages import Pace
from edl.wire.rank_pace import RankPace

PACE_SEEDS = 2
"""Every eighth seed, those with this remainder, has windows."""
RULES = StragglerRules(windows=2)
"""So few windows that schedules of some seconds have stragglers."""
SHORTEST_S, LONGEST_S = 0.3, 1.0
"""Bounds of the pause between two reports of a launcher."""
_GOOD, _SLOW = 0.6, 0.1
"""Share of time that a rank waits for others."""


def has_paces(seed: int) -> bool:
    """Whether the ranks of a schedule report windows."""
    return seed % 8 == PACE_SEEDS


class SimPaces:
    """Draws how the ranks of all launchers spend their time."""

    def __init__(self, seed: int, until_s: float) -> None:
        """No rank is slow after ``until_s``."""
        self._drawn = random.Random(seed)  # noqa: S311 - not for secrets
        self._until_s = until_s
        self._slow: dict[tuple[NodeId, int], tuple[bool, float]] = {}
        """Whether each slot is slow at the moment, and until when."""

    def pace(self, node: NodeId, round: Round, commit: int, slots: Collection[int], now_s: float) -> Pace:
        """What a node reports. Now and then a rank has no new window."""
        said = [slot for slot in slots if self._drawn.random() < 0.9]
        ranks = tuple(RankPace(slot, 0.2, 0.3, self._share(node, slot, now_s)) for slot in said)
        return Pace(round, commit, 0.2, ranks=ranks)

    def _share(self, node: NodeId, slot: int, now_s: float) -> float:
        slow, until_s = self._slow.get((node, slot), (True, 0.0))
        if now_s >= until_s:
            slow = not slow and now_s < self._until_s and self._drawn.random() < 0.5
            self._slow[node, slot] = slow, now_s + self._drawn.uniform(1.0, 6.0)
        return _SLOW if slow and now_s < self._until_s else _GOOD

    def pause_s(self) -> float:
        """Seconds until the next report."""
        return self._drawn.uniform(SHORTEST_S, LONGEST_S)
