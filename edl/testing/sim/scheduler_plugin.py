"""A scheduler as a plugin of a simulated job: the shipped reconciler beside each Master, a cluster, faults and checks.

Invariants: a Master has at most one call and one request under way. While the job runs, it calls the cluster only if it
owns the size, never while the job is suspended, and only for a number of nodes within the bounds. It releases no node
that trains. Once the faults are over, the cluster provides the nodes that the job wants, no reason for a missing size
is left, and no more calls are made.
"""

from __future__ import annotations

import enum
import math
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from edl.job_records import SizeOwner
from edl.master.shell import COMPANIONS_S
from edl.master.sizing import Sizing
from edl.master.state import Phase
from edl.ports import ElectedMaster
from edl.schedulers.plan import JobSummary
from edl.schedulers.shell import Reconciler, job_of
from edl.testing.sim.launcher import SimLauncher
from edl.testing.sim.plugins import Plugin
from edl.testing.sim.simulated_cluster import ClusterTraits, SimCluster, SimScheduler
from edl.testing.sim.world import LOOK_EVERY_S, SimWorld
from edl.types import NodeId
from edl.wire.scale_requests import Granted, ScaleRequest
from edl.wire.status import JobStatus

REST_S = 12.0
"""The reconciler is at rest after so many seconds without a call or request; longer than its interval between
queries."""
STALE_S = 2 * LOOK_EVERY_S
"""Seconds within which the reconciler must have seen a change of the job."""
SETTLE_S = 300.0
"""Seconds within which the size is reached. A call that was refused or had no effect is repeated after a minute."""


class SchedulerFaultKind(enum.Enum):
    """Changes that start in the cluster, in addition to the schedule's faults."""

    FOREIGN = "foreign"
    """Another program sets the number of nodes."""
    DOOM = "doom"
    """The cluster announces the removal of a node, and removes it."""


@dataclass(frozen=True, slots=True)
class SchedulerFault:
    """A change in the cluster and its time. ``pick``, from 0 to 1, selects the target."""

    at_s: float
    kind: SchedulerFaultKind
    pick: float = 0.0


class ObservedMaster:
    """The Master's shell as its reconciler sees it. Checks the reconciler's requests and calls."""

    def __init__(self, plugin: SchedulerPlugin, launcher: SimLauncher, master: ElectedMaster) -> None:
        self._plugin, self.launcher, self._master = plugin, launcher, master
        self.job: JobSummary | None = None
        """The job as the reconciler last saw it."""
        self.stale_since_s: float | None = None
        self._calls = self._requests = 0

    # --- edl.ports.ElectedMaster --------------------------------------------------------------------------------------

    def status(self) -> JobStatus:
        """The current status. Records that the reconciler has seen it."""
        status = self._master.status()
        self.job, self.stale_since_s = job_of(status), None
        return status

    async def submit(self, request: ScaleRequest) -> Granted:
        """Submit a request to the Master. Only one may be under way."""
        self._requests += 1
        if self._requests > 1:
            self._plugin.fail(f"two requests to the Master are under way: {request}")
        self._plugin.acted()
        try:
            return await self._master.submit(request)
        finally:
            self._requests -= 1

    async def changed(self) -> None:
        """Wait for the next change of the job."""
        await self._master.changed()

    def explain(self, text: str) -> None:
        """Set the reason why the size is not reached."""
        self._master.explain(text)

    # --- checks -------------------------------------------------------------------------------------------------------

    def begins(self, nodes: int | None, names: Sequence[str] | None) -> None:
        """Check a call that begins. ``nodes`` is ``None`` for a query, ``names`` for a request for nodes."""
        self._calls += 1
        if self._calls > 1:
            self._plugin.fail("two calls of the scheduler are under way")
        if nodes is not None:
            self._plugin.acted()
            assert self.job is not None  # noqa: S101 - the reconciler decides nothing before it has seen the job
            self._plugin.called(self.job, nodes, names)

    def ends(self) -> None:
        """A call has returned."""
        self._calls -= 1

    def look(self, now_s: float) -> None:
        """Fail if the reconciler's view of the job has been outdated for ``STALE_S``."""
        fresh = job_of(self._master.status()) == self.job
        self.stale_since_s = None if fresh else (self.stale_since_s or now_s)
        if self.stale_since_s is not None and now_s - self.stale_since_s > STALE_S:
            self._plugin.fail(f"the reconciler on {self.launcher.node} has not seen the job as it is for {STALE_S:g} s")


class SchedulerPlugin(Plugin):
    """The scheduler of one schedule, and its checks."""

    replenishes = True
    settle_s = SETTLE_S

    def __init__(
        self,
        seed: int,
        owner: SizeOwner,
        replicas: int,
        traits: ClusterTraits | None = None,
        faults: Sequence[SchedulerFault] | None = None,
    ) -> None:
        """``traits`` and ``faults``: ``None`` to draw them from the seed."""
        self.rng = rng = random.Random(f"scheduler {seed}")  # noqa: S311 - not for secrets
        self.owner = owner
        self.traits = traits or ClusterTraits.draw(rng)
        self.faults = tuple(_drawn(rng) for _ in range(rng.choice((0, 1, 3, 6)))) if faults is None else tuple(faults)
        self._replicas = replicas
        self._acted_s = 0.0
        self._terms: list[ObservedMaster] = []
        self._healed_running = False
        self._ended_s = math.inf
        self._answers_s = 0.0
        """Time at which the calls made before the faults were over will have been answered."""
        self.changes: list[tuple[int, tuple[str, ...] | None]] = []
        """Calls other than queries: the number of nodes, and the names of the nodes released (``None``: nodes
        requested)."""

    cluster: SimCluster
    _world: SimWorld

    def fail(self, text: str) -> None:
        """Report a violation found by the scheduler checks and raise it."""
        self._world.checks.fail(f"scheduler: {text}")

    def acted(self) -> None:
        """Record the time of a change that the reconciler makes."""
        self._acted_s = self._world.timeline.now_s

    # --- Plugin -------------------------------------------------------------------------------------------------------

    def start(self, world: SimWorld) -> None:
        """Set up the cluster and plan its faults."""
        self._world = world
        self.cluster = SimCluster(world, self.traits, self.rng, self._replicas)
        self.cluster.taken = self._taken
        for fault in self.faults:
            world.timeline.at(fault.at_s, self._strike, fault)

    def _strike(self, fault: SchedulerFault) -> None:
        world = self._world
        if world.ended() or not self.cluster.troubled:
            return
        if fault.kind is SchedulerFaultKind.FOREIGN:
            self.cluster.foreign(int(fault.pick * 9))
        else:
            world.checks.trouble(0.0)
            self.cluster.doom(fault.pick)

    def companions(self, launcher: SimLauncher, master: ElectedMaster) -> Sequence[Coroutine[Any, Any, None]]:
        """The reconciler of a new Master."""
        observed = ObservedMaster(self, launcher, master)
        self._terms.append(observed)
        reconciler = Reconciler(
            lambda: SimScheduler(self.cluster, launcher, observed), observed, launcher, self.owner, launcher.log
        )
        return (reconciler.run(),)

    def heal(self) -> None:
        """Let calls succeed at once. A cluster without nodes has no Master to request any, so a user restores the
        smallest size."""
        self.cluster.troubled = False
        record = self._world.checks.record  # once the job has ended, a last call may be under way, and fail
        self._healed_running = record is not None and record.phase is not Phase.ENDED
        self._answers_s = self.cluster.answers_s
        lowest = self._world.spec.nodes.lowest
        if not self.cluster.replicas or (self.owner is SizeOwner.EXTERNAL and self.cluster.replicas < lowest):
            self.cluster.foreign(lowest)

    def check(self) -> None:
        """Compare the newest reconciler's view of the job with the job."""
        record = self._world.checks.record
        if record is not None and record.phase is Phase.ENDED:
            self._ended_s = min(self._ended_s, self._world.timeline.now_s)
        master = self._world.master
        for term in self._terms:
            shell = term.launcher.master_shell
            serving = shell is not None and shell.serving and not shell.ended and not term.launcher.paused
            if term.launcher is master and serving and term is self._terms[-1] and term.job is not None:
                term.look(self._world.timeline.now_s)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def called(self, job: JobSummary, nodes: int, names: Sequence[str] | None) -> None:
        """Check a call for ``nodes`` nodes by a Master that saw this job. ``names``: the nodes to release."""
        self.changes.append((nodes, tuple(names) if names is not None else None))
        if job.ended:
            if not self.traits.ask_none_at_end or nodes or names is None:
                self.fail(f"after the end of the job the cluster is called for {nodes} nodes")
            return
        if self.owner is not SizeOwner.MASTER:
            self.fail(f"the cluster is called for {nodes} nodes, and its users own the size")
        if job.suspended:
            self.fail(f"the cluster is called for {nodes} nodes while the job is suspended")
        if nodes > job.maximum if names is None else nodes < job.minimum:
            self.fail(f"the cluster is called for {nodes} nodes, outside {job.minimum} to {job.maximum}")
        for node in job.nodes if names is not None else ():
            if node.member and (node.index >= nodes if self.traits.indexed else node.name in (names or ())):
                self.fail(f"{node.name} is given back, and it trains")

    def _taken(self, name: str) -> None:
        """Check that a node removed on request was not training. With fixed names a new node may have taken its
        place."""
        record, launcher = self._world.checks.record, self._world.launchers[NodeId(name)]
        if record is None or record.phase is not Phase.RUNNING or record.world is None or self.traits.indexed:
            return
        member = record.world.member(NodeId(name))
        if member is not None and member.incarnation == launcher.info.incarnation:
            self.fail(f"the cluster removes {name} on request, and it trains")

    def settled(self) -> bool:
        """Whether the cluster provides what the job wants and the reconciler is at rest."""
        world, master = self._world, self._world.master
        if world.ended():
            return True
        shell = master.master_shell if master is not None else None
        if shell is None or not shell.serving or shell.state is None:
            return False
        if world.timeline.now_s - self._acted_s < REST_S:
            return False
        sizing = shell.state.record.sizing
        if sizing.suspended:
            return True
        if not self.cluster.complete or not self._fits(sizing):
            return False
        # With cordoned nodes the job may lack nodes for good. The status comes last, since it takes long to make.
        return bool(sizing.cordoned) or not shell.status().scale.waiting

    def _fits(self, sizing: Sizing) -> bool:
        bounds = sizing.bounds(self._world.spec.nodes)
        desired, provided = sizing.target(self._world.spec.nodes), self.cluster.replicas

        def within(nodes: int) -> int:
            return min(max(nodes // bounds.unit * bounds.unit, bounds.lowest), bounds.highest)

        if self.owner is SizeOwner.EXTERNAL:
            return not provided or desired == within(provided)
        least, most = (within(desired), within(desired)) if sizing.desired else (bounds.lowest, bounds.highest)
        # A set of numbered nodes keeps cordoned ones for those with higher numbers.
        return least <= provided <= most + len(sizing.cordoned)

    def finish(self) -> None:
        """Check that a cluster that restarts finished nodes has been scaled to zero, if it answered soon enough."""
        slow = self._answers_s - self._ended_s > COMPANIONS_S - 2 * LOOK_EVERY_S
        if self._healed_running and self.traits.ask_none_at_end and self.cluster.replicas and not slow:
            self.fail(f"the job has ended, and the cluster still provides {self.cluster.replicas} nodes")


def _drawn(rng: random.Random) -> SchedulerFault:
    return SchedulerFault(rng.uniform(1.0, 40.0), rng.choice(list(SchedulerFaultKind)), rng.random())
