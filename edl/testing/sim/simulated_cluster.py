"""A simulated cluster with a scheduler, which starts and stops launchers, and its adapter for the Master.

Its controller keeps as many nodes running as were requested. Calls take time and may fail. They may take effect
although their answer is lost or the Master that made them has ended.
"""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from edl.errors import SchedulerError
from edl.schedulers.port import Disruption, Observation, SchedulerSize, Sized
from edl.testing.sim.launcher import SimLauncher
from edl.testing.sim.world import SimWorld
from edl.types import NodeId

CONTROL_S = 1.0
"""Interval of the controller, in seconds."""
GRACE_S = 30.0
"""Seconds from SIGTERM to SIGKILL for a launcher that is removed."""
CALM_CALL_S = 0.1
"""Longest duration of a call in seconds, once the faults are over."""


@dataclass(frozen=True, slots=True)
class ClusterTraits:
    """Properties and faults of a cluster. Shares are from 0 to 1."""

    indexed: bool = False
    """Whether nodes are numbered and keep their names; the highest numbers are removed first, as in a StatefulSet."""
    ask_none_at_end: bool = False
    """Whether the cluster must be scaled to 0 nodes when the job has ended."""
    error_share: float = 0.0
    """Share of calls that fail without effect; a later one may succeed."""
    lost_share: float = 0.0
    """Share of calls that take effect but return an error."""
    final_share: float = 0.0
    """Share of calls that are refused for good."""
    slow_s: float = 1.0
    """Longest duration of a call, in seconds."""
    start_s: float = 2.0
    """Longest time in seconds until a requested node starts its launcher."""
    capacity: int = 1000
    """Number of nodes that exist. Requests for more stay pending."""

    @classmethod
    def draw(cls, rng: random.Random) -> ClusterTraits:
        """A cluster with some of these faults."""
        return cls(
            indexed=rng.random() < 0.5,
            ask_none_at_end=rng.random() < 0.4,
            error_share=rng.choice((0.0, 0.1, 0.5)),
            lost_share=rng.choice((0.0, 0.1, 0.3)),
            final_share=rng.choice((0.0, 0.0, 0.05)),
            slow_s=rng.choice((0.2, 2.0, 20.0)),
            start_s=rng.choice((0.5, 3.0, 10.0)),
        )


class SimCluster:
    """The nodes that a scheduler provides, and its controller. ``replicas``: the requested number."""

    def __init__(self, world: SimWorld, traits: ClusterTraits, rng: random.Random, replicas: int) -> None:
        self.world = world
        self.traits = traits
        self.rng = rng
        self.replicas = replicas
        self.troubled = True
        """Whether calls are slow and fail."""
        self.taken: Callable[[str], None] = lambda name: None
        """Called before a node is removed on request."""
        self.answers_s = 0.0
        """Time at which all calls so far will have been answered."""
        self.watchers: list[Callable[[Observation], None]] = []
        self._coming: set[str] = set()
        self._names: dict[str, int] = {}
        """Nodes that run or ran under the controller, with their indexes."""
        self._leaving: set[str] = set()
        self._made = 0
        self._control()

    # --- nodes --------------------------------------------------------------------------------------------------------

    def running(self) -> list[str]:
        """Names of the running nodes, in the order of their creation."""
        return [name for name in self._names if self._alive(name)]

    @property
    def complete(self) -> bool:
        """Whether all requested nodes run, and no others."""
        return not self._coming and not self._leaving and len(self.running()) == self.replicas

    def _alive(self, name: str) -> bool:
        launcher = self.world.launchers.get(NodeId(name))
        return launcher is not None and launcher.alive

    def _control(self) -> None:
        """Start missing nodes and stop surplus ones, every ``CONTROL_S`` seconds."""
        if not self.world.ended():
            self.fill()
        self.world.timeline.after(CONTROL_S, self._control)

    def fill(self) -> None:
        """Compare the nodes with the requested number once."""
        if self.world.ended():
            return
        self._leaving = {name for name in self._leaving if self._alive(name)}
        if self.traits.indexed:
            for name in self.running():
                if self._names[name] >= self.replicas:
                    self._take_by_surprise(name)
            for index in range(min(self.replicas, self.traits.capacity)):
                if f"n{index}" not in self._coming and not self._alive(f"n{index}"):
                    self._bring(f"n{index}", index)
            return
        here = [name for name in self.running() if name not in self._leaving]
        surplus = len(here) + len(self._coming) - self.replicas
        self._coming -= set(sorted(self._coming)[: max(0, surplus)])
        while len(here) + len(self._coming) < min(self.replicas, self.traits.capacity):
            self._made += 1
            self._bring(f"j{self._made}", -1)

    def _bring(self, name: str, index: int) -> None:
        self._coming.add(name)

        def come() -> None:
            if name in self._coming and not self.world.ended() and not self._alive(name):
                self._names[name] = index
                self.world.start(name, slots=1 + len(self._names) % 2, index=index)
            self._coming.discard(name)

        self.world.timeline.after(self.rng.uniform(0.1, self.traits.start_s), come)

    def _take(self, name: str) -> None:
        """Send SIGTERM, and SIGKILL after ``GRACE_S`` seconds."""
        if name in self._leaving or not self._alive(name):
            return
        self._leaving.add(name)
        launcher = self.world.launchers[NodeId(name)]
        launcher.run(launcher.interrupt, 15)
        self.world.timeline.after(GRACE_S, self._kill, launcher)

    def _take_by_surprise(self, name: str) -> None:
        """Remove a node that may be training; the job may lose a step."""
        if name not in self._leaving:
            self.world.checks.trouble(0.0)
        self._take(name)

    @staticmethod
    def _kill(launcher: SimLauncher) -> None:
        if launcher.alive:
            launcher.crash()

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, nodes: int) -> None:
        """Provide at least this many nodes."""
        self.replicas = max(self.replicas, nodes)
        self.fill()

    def release(self, names: Sequence[str], nodes: int) -> None:
        """Remove these nodes until ``nodes`` are left. Without indexes only these are removed, and other running nodes
        still count."""
        going = [name for name in self.running() if self._names[name] >= nodes] if self.traits.indexed else names
        for name in going:
            if self._alive(name):
                self.taken(name)
                self._take(name)
        spared = 0 if self.traits.indexed else len([one for one in self.running() if one not in self._leaving])
        self.replicas = max(min(self.replicas, nodes), spared if nodes else 0)
        self.fill()

    def foreign(self, replicas: int) -> None:
        """Another program sets the number of nodes; the newest surplus nodes are removed."""
        self.replicas = replicas
        if self.world.deps.trace is not None:
            self.world.deps.trace(f"  CLUSTER  is set to {replicas} nodes")
        if not self.traits.indexed:
            staying = [name for name in self.running() if name not in self._leaving]
            for name in staying[replicas:]:
                self._take_by_surprise(name)
        self._tell(Sized(SchedulerSize(replicas)))
        self.fill()

    def doom(self, pick: float) -> None:
        """Announce the removal of a node, and remove it after ``GRACE_S`` seconds."""
        names = self.running()
        if names:
            name = names[int(pick * len(names))]
            self._tell(Disruption(name, "reclaimed", GRACE_S))
            self.world.timeline.after(GRACE_S, self._kill, self.world.launchers[NodeId(name)])

    def _tell(self, observation: Observation) -> None:
        for watcher in list(self.watchers):
            watcher(observation)


class CallObserver(Protocol):
    """Checks the calls of one Master's reconciler."""

    def begins(self, nodes: int | None, names: Sequence[str] | None) -> None:
        """A call begins. ``nodes``: ``None`` for a query. ``names``: ``None`` for a request for more nodes."""
        ...

    def ends(self) -> None:
        """The call has returned."""
        ...


class SimScheduler:
    """``edl.schedulers.port.Scheduler`` of one Master."""

    name = "cluster"

    def __init__(self, cluster: SimCluster, launcher: SimLauncher, observer: CallObserver) -> None:
        self._cluster, self._launcher, self._observer = cluster, launcher, observer
        self.indexed = cluster.traits.indexed
        self.ask_none_at_end = cluster.traits.ask_none_at_end

    async def current(self) -> SchedulerSize:
        """The requested number of nodes."""
        return await self._call(lambda: None, None, None)

    async def request(self, nodes: int, reason: str) -> None:
        """Ask the cluster for at least ``nodes`` nodes. The call may fail."""
        await self._call(lambda: self._cluster.request(nodes), nodes, None)

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Let the cluster remove the named nodes until ``nodes`` are left. The call may fail."""
        await self._call(lambda: self._cluster.release(names, nodes), nodes, names)

    async def _call(self, effect: Callable[[], None], nodes: int | None, names: Sequence[str] | None) -> SchedulerSize:
        cluster, traits = self._cluster, self._cluster.traits
        luck = cluster.rng.random() if cluster.troubled else 1.0
        failed = luck < traits.error_share
        lost = not failed and luck < traits.error_share + traits.lost_share
        refused = not failed and not lost and luck < traits.error_share + traits.lost_share + traits.final_share
        answer: asyncio.Future[SchedulerSize] = asyncio.get_running_loop().create_future()
        self._observer.begins(nodes, names)

        def give() -> None:
            if answer.done():
                return
            if failed or lost or refused:
                answer.set_exception(SchedulerError("cluster: it does not answer", retry=not refused))
            else:
                answer.set_result(SchedulerSize(cluster.replicas, len(cluster.running())))

        def arrive() -> None:
            if not failed and not refused:
                effect()
                if nodes is not None:
                    which = f" without {names}" if names else ""
                    self._launcher.say(f"cluster: {cluster.replicas} nodes after a call for {nodes}{which}")
            self._launcher.run(give)

        slowest_s = traits.slow_s if cluster.troubled else CALM_CALL_S
        takes_s = cluster.rng.uniform(0.01, max(0.02, slowest_s))
        cluster.answers_s = max(cluster.answers_s, cluster.world.timeline.now_s + takes_s)
        cluster.world.timeline.after(takes_s, arrive)
        try:
            return await answer
        finally:
            self._observer.ends()

    async def watch(self) -> AsyncIterator[Observation]:
        """Yield the size, then changes that others make. Raises ``SchedulerError`` now and then."""
        cluster, observations = self._cluster, asyncio.Queue[Observation]()

        def hear(observation: Observation) -> None:
            self._launcher.run(observations.put_nowait, observation)

        cluster.watchers.append(hear)
        try:
            yield Sized(SchedulerSize(cluster.replicas))
            while True:
                if cluster.troubled and cluster.rng.random() < cluster.traits.error_share:
                    raise SchedulerError("cluster: the watch has ended", retry=True)
                yield await observations.get()
        finally:
            if hear in cluster.watchers:
                cluster.watchers.remove(hear)

    async def close(self) -> None:
        """Does nothing: the nodes stay."""
