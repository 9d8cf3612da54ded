"""Draws whole schedules from a seed (a job, its nodes and its faults), runs them and checks the results."""

from __future__ import annotations

import dataclasses
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edl.config import FaultTolerance, HyperPolicy, JobSpec, LrRule, NodeRange, Replicas, SlotRules, Timeouts
from edl.job_records import SchedulerChoice, SizeOwner, StragglerMode, Training
from edl.testing.sim.biases import USUAL, Biases
from edl.testing.sim.checks import Violation
from edl.testing.sim.faults import FaultKind, FaultPlan
from edl.testing.sim.health import SimHealth, is_checked, with_checks
from edl.testing.sim.injection import play_out
from edl.testing.sim.memory_checkpoints import Directory
from edl.testing.sim.pacing import RULES, SimPaces, has_paces
from edl.testing.sim.pairs import Pair
from edl.testing.sim.plugins import Plugin, Plugins
from edl.testing.sim.stepping import Script
from edl.testing.sim.world import SimWorld
from edl.types import JobId
from edl.wire.records import Version

BOUNDS = [
    NodeRange(1, 4),
    NodeRange(2, 2),
    NodeRange(2, 3),
    NodeRange(3, 5),
    NodeRange(1, 1),
    NodeRange(1, 6),
    NodeRange(2, 4, 2),
    NodeRange(1, 5, 2),
    NodeRange(3, 6, 2),
    NodeRange(4, 4, 2),
]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that determines one run."""

    seed: int
    spec: JobSpec
    starts_s: tuple[float, ...]
    """When each of the first launchers starts."""
    total_s: float
    warm_s: float
    slowness: float
    ranked: bool
    """Whether nodes request their positions with ``--node-rank``."""
    plan: FaultPlan
    script: Script | None = None
    """``None`` for a script that does not use edl."""
    saved: tuple[Version, ...] = ()
    """Commits in the checkpoint directory at the start."""
    racks: int = 1
    sized: bool = False
    """Whether users request other sizes."""
    indexed: bool = False
    """Whether a scheduler has numbered the first nodes."""
    spare_slots: int = -1
    """Spare slots of each node; nodes then have several slots, and some are dropped. -1: no such faults."""
    devices: bool = False
    """Whether the devices in the slots are known and workers are bound to them."""
    plugins: tuple[Callable[[], Plugin], ...] = ()
    """Create the extensions of this job."""

    biases: Biases = USUAL

    def describe(self) -> str:
        """The schedule in one line."""
        spec = self.spec
        return (
            f"--nnodes={spec.nodes}, {spec.fault_tolerance.value}, {spec.max_restarts} restarts, "
            f"{len(self.starts_s)} nodes, {self.total_s:g} s of work, {len(self.plan.faults)} faults, "
            f"{self.script or 'plain'}"
        )

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        """The schedule of a seed. The variants of the specification take turns, so that a few runs cover all of
        them."""
        rng = random.Random(f"schedule {seed}")  # noqa: S311 - not for secrets
        bounds = BOUNDS[seed % len(BOUNDS)]
        level = list(FaultTolerance)[seed // len(BOUNDS) % 3]
        timeouts = Timeouts(
            recover_s=rng.choice((5.0, 30.0, 60.0, 60.0)),
            shutdown_s=rng.choice((0.0, 1.0, 3.0)),
            rejoin_s=rng.choice((1.0, 3.0, 6.0)),
            boundary_s=rng.choice((3.0, 10.0, 20.0)),
        )
        spec = JobSpec(JobId("sim"), bounds, rng.choice((0, 1, 2, 3, 5, 5, 20, 20)), level, timeouts)
        if has_paces(seed):
            spec = dataclasses.replace(spec, stragglers=RULES)
        nodes = rng.randint(bounds.lowest, min(bounds.highest + 1, 7))
        together = rng.random() < 0.6
        starts_s = tuple(rng.uniform(0.0, 0.5 if together else 6.0) for _ in range(nodes))
        total_s = rng.choice((3.0, 15.0, 100.0, 100.0, 100.0))
        warm_s = rng.choice((0.05, 0.5, 2.0))
        slowness = rng.choice((1.0, 1.0, 10.0, 40.0))
        ranked = rng.random() < 0.15
        plan = FaultPlan.draw(rng)
        script = _draw_script(rng)
        if script is not None and script.sharded:
            replicas = random.Random(f"copies {seed}").choice((1, 2, 3))  # noqa: S311 - not for secrets
            script = dataclasses.replace(script, replicas=replicas)
        saved: tuple[Version, ...] = ()
        if script is not None and rng.random() < 0.2:
            saved = tuple(Version(rng.randint(1, 5), rng.randint(1, 40)) for _ in range(rng.randint(1, 3)))
        racks = rng.choice((1, 1, 2))
        others = random.Random(f"settings {seed}")  # noqa: S311 - drawn apart, so that the rest stays as it was
        if script is not None and others.random() < 0.4:
            spec = dataclasses.replace(spec, hyper=_draw_policy(others))
            plan = plan.with_requests(others)
        plan = plan.with_signs(random.Random(f"signs {seed}"))  # noqa: S311 - as above
        return cls(seed, spec, starts_s, total_s, warm_s, slowness, ranked, plan, script, saved, racks)

    @classmethod
    def independent(cls, seed: int) -> Schedule:
        """The schedule of ``draw`` with independent workers."""
        drawn = cls.draw(seed)
        spec = dataclasses.replace(drawn.spec, servers=Training())
        plan = drawn.plan.with_requests(random.Random(f"requests {seed}"))  # noqa: S311 - not for secrets
        return dataclasses.replace(drawn, spec=spec, plan=plan, script=None, saved=())

    @classmethod
    def reading(cls, seed: int) -> Schedule:
        """The schedule of ``draw`` with workers that read data. In every third schedule they are independent, and half
        of those push to parameter servers."""
        from edl.testing.sim.data.plugin import DataPlugin  # needs numpy, which other schedules do not

        independent = seed % 3 == 2
        drawn = cls.independent(seed) if independent else cls.draw(seed)
        stops, rows = seed % 6 == 5, seed % 12 in (5, 8)
        plugins = (lambda: DataPlugin(seed, independent=independent, stops=stops, rows=rows),)
        if independent:
            drawn = dataclasses.replace(drawn, spec=dataclasses.replace(drawn.spec, max_restarts=20))
        script = None if independent else drawn.script or Script()
        if stops:  # faults last until others have got the shards of the stopped worker
            drawn = dataclasses.replace(drawn, plan=FaultPlan(drawn.plan.faults, max(drawn.plan.quiet_s, 55.0)))
        return dataclasses.replace(drawn, script=script, saved=(), plugins=plugins)

    @classmethod
    def resized(cls, seed: int) -> Schedule:
        """The schedule of ``draw``, in some cases without its faults, and with requests for other sizes. In every
        fourth schedule the workers are independent."""
        drawn = cls.independent(seed) if seed % 4 == 3 else cls.draw(seed)
        rng = random.Random(f"sizes {seed}")  # noqa: S311 - not for secrets
        plan = drawn.plan if rng.random() < 0.7 else FaultPlan()
        spec = dataclasses.replace(drawn.spec, cooldown_s=rng.choice((0.0, 0.0, 2.0, 8.0)))
        if drawn.script is None:  # users do not do this
            plan = FaultPlan(tuple(one for one in plan.faults if one.kind is not FaultKind.SAVE), plan.quiet_s)
        plan, indexed = plan.with_sizes(rng), rng.random() < 0.4
        return dataclasses.replace(drawn, spec=spec, plan=plan, sized=True, indexed=indexed)

    @classmethod
    def slotted(cls, seed: int) -> Schedule:
        """The schedule of ``draw``, in some cases without its faults, and with slots that fail or are cordoned. In
        every fourth schedule the workers are independent."""
        drawn = cls.independent(seed) if seed % 4 == 3 else cls.draw(seed)
        rng = random.Random(f"slots {seed}")  # noqa: S311 - not for secrets
        plan = drawn.plan if rng.random() < 0.6 else FaultPlan()
        if drawn.script is None:
            plan = FaultPlan(tuple(one for one in plan.faults if one.kind is not FaultKind.SAVE), plan.quiet_s)
        rules = SlotRules(rng.choice((0, 1, 2, 2, 3)), rng.choice((0.0, 0.0, 4.0, 15.0)))
        spec = dataclasses.replace(drawn.spec, slots=rules)
        if has_paces(seed):
            spec = dataclasses.replace(spec, stragglers=dataclasses.replace(RULES, mode=StragglerMode.EXCLUDE))
        spare, known, sized = rng.choice((0, 0, 1, 2)), rng.random() < 0.5, rng.random() < 0.3
        plan = plan.with_slots(rng)
        plan = plan.with_sizes(rng) if sized else plan
        return dataclasses.replace(drawn, spec=spec, plan=plan, spare_slots=spare, devices=known, sized=sized)

    @classmethod
    def grouped(cls, seed: int) -> Schedule:
        """The schedule of ``slotted`` with replicas of several workers, which share a node or need several."""
        drawn = cls.slotted(4 * seed)  # every fourth has independent workers
        rng = random.Random(f"replicas {seed}")  # noqa: S311 - not for secrets
        replicas = Replicas(*rng.choice(((2, 2), (2, 4), (2, 1), (4, 2), (3, 1))))
        unit = replicas.nodes
        bounds = NodeRange(rng.randint(1, 2 * unit), unit * rng.choice((2, 3) if unit < 3 else (2,)), unit)
        spec = dataclasses.replace(drawn.spec, nodes=bounds, replicas=replicas)
        starts_s = tuple(rng.uniform(0.0, 3.0) for _ in range(rng.randint(bounds.lowest, min(bounds.highest + 1, 7))))
        return dataclasses.replace(drawn, spec=spec, starts_s=starts_s)

    @classmethod
    def bursting(cls, seed: int) -> Schedule:
        """The schedule of ``slotted`` with bursts of faults of every kind and its own biases. Workers that ignore
        SIGTERM, slow fork servers and short jobs prolong states that are usually short."""
        drawn = cls.slotted(seed)
        rng = random.Random(f"bursts {seed}")  # noqa: S311 - not for secrets
        timeouts = dataclasses.replace(drawn.spec.timeouts, shutdown_s=rng.choice((0.0, 1.0, 3.0, 6.0)))
        return dataclasses.replace(
            drawn,
            spec=dataclasses.replace(drawn.spec, timeouts=timeouts),
            plan=FaultPlan.draw_bursts(rng),
            total_s=rng.choice((3.0, 8.0, 15.0, 100.0)),
            warm_s=rng.choice((0.05, 2.0, 6.0)),
            sized=True,
            biases=Biases.draw(rng),
        )

    @classmethod
    def scheduled(cls, seed: int) -> Schedule:
        """The job of ``resized`` on a cluster whose scheduler provides the nodes, in some cases without its faults."""
        from edl.testing.sim.scheduler_plugin import SchedulerPlugin

        drawn = cls.resized(seed)
        rng = random.Random(f"cluster {seed}")  # noqa: S311 - not for secrets
        owner = SizeOwner.EXTERNAL if rng.random() < 0.25 else SizeOwner.MASTER
        faults = drawn.plan.faults if rng.random() < 0.8 else ()
        kept = [one for one in faults if one.kind not in (FaultKind.RESTART, FaultKind.NEW_NODE, FaultKind.KILL)]
        replicas = rng.randint(0, 7)
        return dataclasses.replace(
            drawn,
            spec=dataclasses.replace(drawn.spec, scheduler=SchedulerChoice("statefulset", "sim", owner=owner)),
            starts_s=(),
            total_s=500.0,
            plan=FaultPlan(tuple(kept), max(drawn.plan.quiet_s, 42.0)),
            saved=(),
            plugins=(lambda: SchedulerPlugin(seed, owner, replicas),),
        )


def _draw_policy(rng: random.Random) -> HyperPolicy:
    return HyperPolicy(
        global_batch=rng.choice((0, 0, 64, 97)),
        local_batch=rng.choice((0, 16)),
        rule=rng.choice((LrRule.NONE, LrRule.LINEAR, LrRule.SQRT)),
        warmup=rng.choice((0, 10)),
    )


def _draw_script(rng: random.Random) -> Script | None:
    if rng.random() < 0.4:
        return None
    return Script(
        rejoins=rng.random() < 0.75,
        sharded=rng.random() < 0.25,
        copy_every=rng.choice((1, 1, 1, 3)),
        save_every=rng.choice((0, 0, 7)),
        step_s=rng.choice((0.1, 0.25, 0.25, 1.0)),
        skew_s=rng.choice((0.01, 0.05, 0.2)),
        clumsy=rng.choice((0.0, 0.0, 0.05)),
    )


@dataclass(slots=True)
class Result:
    """Outcome and statistics of a run."""

    seed: int
    violation: str = ""
    steps: int = 0
    events: int = 0
    virtual_s: float = 0.0
    worlds: int = 0
    faults: int = 0
    outcome: str = ""
    pairs: Counter[Pair] = field(default_factory=Counter)
    """How often each event occurred in each state."""


def play(schedule: Schedule, trace: Callable[[str], None] | None = None) -> Result:
    """Run a schedule from its start to its final checks."""
    directory = Directory()
    for version in schedule.saved:
        directory.write(version)
    parts, spec = [make() for make in schedule.plugins], schedule.spec
    if is_checked(schedule.seed):
        parts, spec = [*parts, SimHealth(schedule.seed)], with_checks(schedule.seed, spec)
    world = SimWorld(
        schedule.seed,
        spec,
        total_s=schedule.total_s,
        warm_s=schedule.warm_s,
        script=schedule.script,
        directory=directory,
        trace=trace,
        plugin=Plugins(parts),
    )
    world.sized = schedule.sized
    world.slotted = schedule.spare_slots >= 0
    if has_paces(schedule.seed):
        world.deps.paces = SimPaces(schedule.seed, schedule.plan.quiet_s)
    world.network.biases = world.training.biases = schedule.biases
    world.network.usual_slowness = world.network.slowness = schedule.slowness
    for index, at_s in enumerate(schedule.starts_s):
        node_rank = index if schedule.ranked else -1
        rack = f"rack{index % schedule.racks}" if schedule.racks > 1 else ""
        slots, number = 1 + (schedule.seed + index) % 2, index if schedule.indexed else -1
        spare, devices = 0, tuple[str, ...]()
        if schedule.spare_slots >= 0:
            slots, spare = 1 + (schedule.seed + index) % 4, schedule.spare_slots
            slots = schedule.spec.replicas.slots or slots
            devices = tuple(f"GPU-{index}-{slot}" for slot in range(slots + spare)) if schedule.devices else ()
        world.timeline.at(at_s, world.start, f"n{index}", slots, node_rank, rack, number, spare, devices)
    result = Result(schedule.seed, faults=len(schedule.plan.faults))
    try:
        play_out(world, schedule.plan)
        world.judge()
    except Violation as violation:
        result.violation = f"at {world.timeline.now_s:.3f} s: {violation}"
    finally:
        world.close()
    result.steps = world.checks.steps
    result.pairs = world.checks.pairs
    result.events = world.timeline.events
    result.virtual_s = world.timeline.now_s
    result.worlds = len(world.checks.worlds)
    if world.checks.record is not None and world.checks.record.outcome is not None:
        result.outcome = f"exit {world.checks.record.outcome.exit_code}"
    return result


KINDS: Mapping[str, Callable[[int], Schedule]] = {
    "plain": Schedule.draw,
    "independent": Schedule.independent,
    "reading": Schedule.reading,
    "resized": Schedule.resized,
    "slotted": Schedule.slotted,
    "grouped": Schedule.grouped,
    "bursting": Schedule.bursting,
    "scheduled": Schedule.scheduled,
}
"""Kinds of schedules by name. A seed determines one schedule of each kind."""


def play_seed(seed: int, kind: str = "plain") -> Result:
    """Run the schedule of a seed."""
    return play(KINDS[kind](seed))


def shrink(schedule: Schedule) -> Schedule:
    """Remove one fault after the other as long as the run still fails."""
    index = 0
    while index < len(schedule.plan.faults):
        fewer = dataclasses.replace(schedule, plan=schedule.plan.without(index))
        if play(fewer).violation:
            schedule = fewer
        else:
            index += 1
    return schedule
