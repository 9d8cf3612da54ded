"""Health checks of simulated nodes, some of which are faulty until the faults are over. Only some seeds have them."""

from __future__ import annotations

import asyncio
import dataclasses
import random  # noqa: TID251 - a generator of its own, so that schedules without checks stay what they are
from typing import TYPE_CHECKING

from edl.config import JobSpec
from edl.job_records import HealthMode, HealthRules, SlowNodes
from edl.testing.sim.plugins import Plugin
from edl.types import NodeId
from edl.wire.health import CheckHealth, HealthChecked, HealthPeer, LinkFinding, SlotFinding

if TYPE_CHECKING:
    from edl.testing.sim.launcher import SimLauncher
    from edl.testing.sim.world import SimWorld

HEALTH_SEEDS = 6
"""Every eighth seed, those with this remainder, has health checks."""
SHORTEST_S, LONGEST_S = 0.02, 0.4
"""Bounds of the time that a node's own part takes."""
POLL_S = 0.05
_FAULTS = ("wrong", "deaf", "dead", "slow", "slot", "no process")
FAULTY_SHARE = 0.4


def is_checked(seed: int) -> bool:
    """Whether the schedules of this seed have health checks."""
    return seed % 8 == HEALTH_SEEDS


def with_checks(seed: int, spec: JobSpec) -> JobSpec:
    """The specification with the rules for checks of this seed."""
    rng = random.Random(f"health rules {seed}")  # noqa: S311 - not for secrets
    rules = HealthRules(
        rng.choice((HealthMode.JOIN, HealthMode.FAILURE, HealthMode.BOTH, HealthMode.BOTH)),
        timeout_s=rng.choice((1.0, 3.0)),
        slow=rng.choice(tuple(SlowNodes)),
        expiry_s=rng.choice((3.0, 8.0)),
    )
    return dataclasses.replace(spec, health=rules)


class SimHealth(Plugin):
    """Draws which nodes are faulty, and answers their probes."""

    settle_s = 60.0

    def __init__(self, seed: int) -> None:
        self._drawn = random.Random(f"health {seed}")  # noqa: S311 - not for secrets
        self._world: SimWorld | None = None
        self._faults: dict[NodeId, str] = {}
        self._healed = False
        self._probed: set[tuple[NodeId, int, int]] = set()
        """Nodes that have begun a probe, with its check and stage."""

    def start(self, world: SimWorld) -> None:
        """Answer the probes of this world."""
        self._world = world
        world.deps.probe = self.probe

    def heal(self) -> None:
        """From now on, no node is faulty."""
        self._healed = True

    def _fault(self, node: NodeId) -> str:
        if node not in self._faults:
            faulty = self._drawn.random() < FAULTY_SHARE
            self._faults[node] = self._drawn.choice(_FAULTS) if faulty else ""
        return "" if self._healed else self._faults[node]

    async def probe(self, launcher: SimLauncher, order: CheckHealth) -> HealthChecked | None:
        """Probe a node, on its launcher's loop."""
        node, fault = launcher.node, self._fault(launcher.node)
        if fault == "no process":
            await asyncio.sleep(POLL_S)
            return None
        took_s = self._drawn.uniform(SHORTEST_S, LONGEST_S)
        if fault == "dead":
            await asyncio.sleep(order.timeout_s)
            return HealthChecked(order.number, order.stage, error="its own part did not end")
        self._probed.add((node, order.number, order.stage))
        await asyncio.sleep(took_s)
        left_s = order.timeout_s - took_s
        waiting = list(order.peers)
        while waiting and left_s > 0:
            waiting = [peer for peer in waiting if not self._reaches(launcher, peer, order)]
            await asyncio.sleep(POLL_S)
            left_s -= POLL_S
        late = {peer.node for peer in waiting}
        return HealthChecked(
            order.number,
            order.stage,
            "simulated",
            9.0 if fault == "slow" else 1.0,
            "wrong numbers" if fault == "wrong" else "",
            (SlotFinding(launcher.info.slots - 1, "wrong numbers"),) if fault == "slot" else (),
            tuple(LinkFinding(peer.node, "timed out" if peer.node in late else "") for peer in order.peers),
        )

    def _reaches(self, launcher: SimLauncher, peer: HealthPeer, order: CheckHealth) -> bool:
        """Whether the exchange with a peer succeeds now."""
        world = self._world
        assert world is not None  # noqa: S101 - set before there is any launcher
        other = world.launchers.get(peer.node)
        if other is None or not other.alive or other.paused or not world.network.both(launcher.host, other.host):
            return False
        deaf = "deaf" in (self._fault(launcher.node), self._fault(peer.node))
        return not deaf and (peer.node, order.number, order.stage) in self._probed
