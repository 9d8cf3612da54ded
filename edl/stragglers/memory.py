"""What a Master has measured of the ranks of one world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from edl.stragglers.streaks import Streak
from edl.types import NodeId
from edl.wire.rank_pace import RankPace

Place = tuple[NodeId, int]
"""A node and one of its slots."""


@dataclass(frozen=True, slots=True)
class StragglerMemory:
    """The windows of one round: those of the next comparison, and the results of earlier ones."""

    round: int = 0
    waiting: Mapping[NodeId, Mapping[int, RankPace]] = field(default_factory=dict)
    """The newest windows by node and slot, until there is one of each rank."""
    count: int = 0
    """Number of windows in ``waiting``."""
    streaks: Mapping[Place, Streak] = field(default_factory=dict)

    def add(self, node: NodeId, windows: Mapping[int, RankPace]) -> StragglerMemory:
        """The memory with further windows of a node; later ones replace earlier ones."""
        before = self.waiting.get(node, {})
        now = {**before, **windows}
        return replace(self, waiting={**self.waiting, node: now}, count=self.count + len(now) - len(before))

    def windows(self) -> Iterator[tuple[Place, RankPace]]:
        """All windows that wait to be compared."""
        for node, slots in self.waiting.items():
            for slot, window in slots.items():
                yield (node, slot), window


NO_WINDOWS = StragglerMemory()
