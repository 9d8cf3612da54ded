"""Which nodes have been lost since the last world, and until when their files are here."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from edl.sync_dir.cut import LastMoment, LostNode
from edl.types import NodeId

LauncherId = tuple[NodeId, str]
"""A node, and the life of its launcher: a new one may have lost the files of an earlier one."""


class Losses:
    """What one node knows of the others, in case that they get lost. Times are by this host's clock."""

    def __init__(self) -> None:
        self.started = 0
        """Newest round in which workers may have run here."""
        self._last = 0
        """The same of all nodes, as far as they have said."""
        self._up_to_date = False
        """This node was in the last world, as far as the members of the next one know."""
        self._world: dict[LauncherId, int] = {}
        """The other members of that round, and since when this node and they were in the same worlds."""
        self._moments: dict[LauncherId, LastMoment] = {}
        """What would be here if they were lost now."""

    def heard(self, started: int) -> None:
        """Workers of another node may have run in this round."""
        self._last = max(self._last, started)

    def reached(self, launcher: LauncherId, moment: LastMoment) -> None:
        """Its files are here as of this moment."""
        known = self._moments.get(launcher, moment)
        self._moments[launcher] = dataclasses.replace(moment, until_ns=max(moment.until_ns, known.until_ns))

    def gathered(self, launchers: Collection[LauncherId], now_ns: int) -> None:
        """All members of the next world have been heard. The workers of these ones have ended, and all that they had
        written is here: also beside files that others have noticed since these launchers last looked."""
        self._up_to_date = self.started >= self._last
        for one in self._moments.keys() & set(launchers):
            self.reached(one, dataclasses.replace(self._moments[one], until_ns=now_ns))

    def unsure(self, launchers: Collection[LauncherId], now_ns: int) -> bool:
        """Whether any of these was in the last world and may have finished files until ``now_ns`` that are not here."""
        known = self._world.keys() & self._moments.keys() & set(launchers)
        return any(self._moments[one].until_ns < now_ns for one in known)

    def lost(self, members: Collection[LauncherId]) -> list[LostNode]:
        """Who was in the last world, and is not among the members of the next one. Empty if this node was not in it
        itself: others know, and what has been written since it was in one is not to be judged by that."""
        known = self._world.keys() & self._moments.keys() - set(members) if self._up_to_date else ()
        return [LostNode(one[0], self._moments[one], self._world[one]) for one in sorted(known)]

    def ahead_ns(self) -> dict[NodeId, int]:
        """By how much the clocks of the other nodes are ahead of this host's, as far as their files are here."""
        return {node: moment.ahead_ns for (node, _), moment in self._moments.items()}

    def start(self, number: int, members: Collection[LauncherId], living: Collection[LauncherId], now_ns: int) -> None:
        """Workers may run in a round from now on. ``living``: all launchers that are known, also those outside it."""
        since_ns = self._world if self._up_to_date else {}
        self.started = number
        self._world = {one: since_ns.get(one, now_ns) for one in members}
        self._moments = {one: moment for one, moment in self._moments.items() if one in living}
