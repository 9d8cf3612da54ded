"""Invariants of the whole simulated job, beyond those of a single machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edl.agent.machine import events as ag
from edl.agent.machine.state import AgentPhase, AgentState, WorkerStatus
from edl.config import FaultTolerance, JobSpec
from edl.exit_codes import ExitCode
from edl.master import events as ev
from edl.master.invariants import step_violations, world_violations
from edl.master.sizing import Sizing
from edl.master.state import MasterState, NodeEntry, NodeStatus, Phase, Record
from edl.testing.sim.asking import Promises
from edl.testing.sim.memory_checkpoints import Directory, SimMemory
from edl.testing.sim.pairs import Pair, agent_pair, master_pair, why_impossible
from edl.testing.sim.timeline import Timeline
from edl.testing.sim.workers import Job, Parent, SimWorker
from edl.types import FencingToken, Round
from edl.wire.local import Target
from edl.wire.messages import (
    NO_SETTINGS,
    NO_STATE,
    Depart,
    Dismissed,
    Expelled,
    Finish,
    Purpose,
    Settings,
    StartRound,
    StopRound,
    Version,
    World,
)

REPORT_S = 2.0
"""Seconds until the Master must know that a node has a copy."""
AFTERMATH_S = 15.0
"""Seconds after a fault in which its consequences may appear."""


UNDERWAY_STEPS = 20
"""After so many steps the Master knows that a world is underway, and can be changed at a boundary."""


class Violation(AssertionError):
    """Something that must never happen did."""


def succession_violations(before: World, after: World, spec: JobSpec, sizing: Sizing) -> Iterator[str]:
    """Rules that one world owes to the one before it."""
    old, new = len(before.members), len(after.members)
    level, bounds, requested = spec.fault_tolerance, sizing.bounds(spec.nodes), sizing.requested(spec.nodes)
    kept = min(max(old, bounds.lowest), requested or bounds.highest)
    if after.round != before.round + 1:
        yield f"round {before.round} is followed by {after.round}"
    if level is FaultTolerance.RECOVER and new not in (kept, requested):
        yield f"round {after.round} has {new} nodes after {old} with --fault-tolerance=recover"
    if level is FaultTolerance.SHRINK and new > (requested or old):
        yield f"round {after.round} has {new} nodes after {old} with --fault-tolerance=shrink"
    if before.members and before.master_port == after.master_port and before.master_host == after.master_host:
        yield f"round {after.round} has the master address of the one before"
    if after.era <= before.era:
        yield f"round {after.round} has era {after.era} after {before.era}"


@dataclass(slots=True)
class RoundProgress:
    """Progress of a round."""

    reached: int
    """Highest commit that a worker has passed."""
    copied_by: set[int]
    """Which launchers have copies of its commits, by ``id``."""
    target: int = 0
    """The commit at which the round ends, once agreed; no worker may pass it."""
    saves: set[int] = field(default_factory=set)
    """Commits that are to be saved on the way."""
    passed_s: float = 0.0
    """When a worker has passed a boundary last."""
    agreed_s: float = 0.0
    """When that was agreed."""


class Checks:
    """Watches everything; raises ``Violation`` at the first wrong."""

    def __init__(self, spec: JobSpec, timeline: Timeline) -> None:
        self.spec = spec
        self.timeline = timeline
        self.training: Job
        self.memories: Mapping[tuple[str, int], SimMemory] = {}
        self.directory = Directory()
        self.record: Record | None = None
        """Content of the store."""
        self.worlds: dict[Round, World] = {}
        """Every world ever recorded."""
        self.courses: dict[Round, RoundProgress] = {}
        self.worker_failures = 0
        """Worker failures caused by the fault plan."""
        self.trouble_until_s = 0.0
        """Until when the consequences of a fault may show."""
        self.rotten = False
        """A checkpoint has been spoilt."""
        self.gave_up = False
        """A worker has said that its job cannot go on."""
        self.lost_memories = 0
        """In-memory checkpoints that went without writing what they had."""
        self.owed: tuple[Version, int] | None = None
        """The checkpoint that the kill switch must leave in the directory, unless more memories are lost."""
        self.steps = 0
        self.pairs: Counter[Pair] = Counter()
        """Which events have met which states."""
        self.promises = Promises(spec.nodes, self.fail)
        self.settings: dict[int, Settings] = {0: NO_SETTINGS}
        """All that were ever recorded, by number."""
        self._held: dict[tuple[Round, int], Settings] = {}
        """Under which ones the step after a commit is taken."""
        self._placed: dict[tuple[int, int], Round] = defaultdict(lambda: Round(0))
        self._token = ""
        """Of the job that is looked at, once it has been founded."""
        self._next_port = 20_000

    def note(self, text: str) -> None:
        """Report a violation; time stops after this call. The first one counts."""
        self.timeline.failure = self.timeline.failure or Violation(text)

    def fail(self, text: str) -> None:
        """Report a violation and raise it. A task may catch what is raised, so time stops as well."""
        self.note(text)
        assert self.timeline.failure is not None  # noqa: S101 - just noted
        raise self.timeline.failure

    def _met(self, pair: Pair) -> None:
        """Count a pair; one that is declared impossible is a violation."""
        self.pairs[pair] += 1
        if self.pairs[pair] == 1 and (why := why_impossible(pair)):
            self.fail(f"{' '.join(pair)} is declared impossible: {why}. Fix the cause, or remove it from IMPOSSIBLE")

    def demand(self, violations: Iterable[str]) -> None:
        """Fail on the first of these."""
        for violation in violations:
            self.fail(violation)

    def trouble(self, for_s: float) -> None:
        """A fault strikes, and lasts so long."""
        self.trouble_until_s = max(self.trouble_until_s, self.timeline.now_s + for_s + AFTERMATH_S)

    @property
    def calm(self) -> bool:
        """No fault has struck for a while."""
        return self.timeline.now_s > self.trouble_until_s

    def fresh_ports(self, count: int) -> tuple[int, ...]:
        """Ports that have not been used yet."""
        first = self._next_port
        self._next_port += count
        return tuple(range(first, first + count))

    # --- reported by the shells --------------------------------------------------------------------------------------

    def master_stepped(
        self, before: MasterState, events: Sequence[ev.Event], decision: ev.Decision, where: str
    ) -> None:
        """A Master has decided; nothing is written or sent yet."""
        self.steps += 1
        for event in events:
            self._met(master_pair(before, event))
        for violation in step_violations(before, decision):
            self.fail(f"Master on {where}: {violation}")

    def is_this_job(self, token: str) -> bool:
        """Whether a launcher that has agreed on this token belongs to the job that is looked at, which is the first."""
        self._token = self._token or token
        return token == self._token

    def job_founded(self, where: str) -> None:
        """A launcher has written a new job's specification."""
        if self._token and (self.record is None or self.record.outcome is None):
            self.fail(f"{where} founds the job again, and it has not ended")

    def record_written(
        self, state: MasterState, decided_s: float, token: FencingToken, real: FencingToken, revision: int
    ) -> None:
        """The store has taken a record."""
        if token != real:
            self.fail(f"a Master of token {token} wrote although {real} rules")
        before, record = self.record, state.record
        self.record = before if before is not None and before.phase is Phase.ENDED else record
        if before is not None:
            if before.phase is Phase.ENDED:
                if (record.phase, record.outcome) != (before.phase, before.outcome):
                    self.fail(f"the stored record changed after the end, from {before} to {record}")
                return
            if record.round < before.round:
                self.fail(f"the stored round went back from {before.round} to {record.round}")
        if record.world is not None:
            known = self.worlds.setdefault(record.round, record.world)
            if known != record.world:
                self.fail(f"round {record.round} got a second world")
            self.demand(world_violations(record.world, self.spec.nodes.unit))
            if before is None or before.round < record.round:
                self._world_formed(before.world if before is not None else None, state, record.world, decided_s)
        formed = record.world is not None and (before is None or before.round < record.round)
        self.promises.stored(record, revision, formed=formed)
        self._check_budget(record)
        if self.settings.setdefault(record.settings.number, record.settings) != record.settings:
            self.fail(f"settings {record.settings} are recorded after {self.settings[record.settings.number]}")
        if record.phase is Phase.ENDED and record.outcome is not None and record.outcome.exit_code == ExitCode.KILLED:
            self.owed = self._newest(list(self.memories.values()), 0, decided_s), self.lost_memories
        if record.outcome is not None and record.outcome.exit_code == ExitCode.CHECKPOINT_UNUSABLE and record != before:
            self._check_unusable(state, decided_s)

    def _check_budget(self, record: Record) -> None:
        # While a world forms, a node may still report that it stopped its workers itself, and the charge is returned. A
        # job that ends before that has no use for it; one that ends for its budget is checked in ``SimWorld``.
        settled = record.phase not in (Phase.FORMING, Phase.ENDED)
        if settled and record.restarts > self.worker_failures:
            self.fail(f"{record.restarts} restarts charged for {self.worker_failures} worker failures: {record.reason}")

    # --- state -------------------------------------------------------------------------------------------------------

    def _world_formed(self, before: World | None, state: MasterState, world: World, decided_s: float) -> None:
        if world.era <= world.restore.era:
            self.fail(f"round {world.round} continues era {world.restore.era} under era {world.era}")
        self._check_newest(state, world, decided_s)
        if before is not None:
            self.demand(succession_violations(before, world, self.spec, state.record.sizing))
            self._check_redone(before, world)

    def _check_newest(self, state: MasterState, world: World, decided_s: float) -> None:
        """The newest complete commit of those that attached, ready nodes hold is what a world begins from."""
        ready = [entry for entry in state.nodes.values() if entry.status is NodeStatus.READY]
        members = [entry for entry in state.nodes.values() if world.member(entry.info.node) is not None]
        newest = self._newest(self._attached([*ready, *members]), world.size, decided_s - REPORT_S)
        if newest > world.restore:
            self.fail(f"round {world.round} begins from {world.restore} although {newest} is there")

    def _check_unusable(self, state: MasterState, decided_s: float) -> None:
        """When that was decided, the Master knew of no node with a state to start from, and the directory held none.
        What a node that was away then writes when it ends is for the next job."""
        until_s = decided_s - REPORT_S
        found = max(self._newest(self._attached(state.nodes.values()), 1, until_s), self.directory.usable(until_s))
        if found != NO_STATE:
            self.fail(f"the job ends, {state.record.reason}, although {found} is there")

    def _attached(self, entries: Iterable[NodeEntry]) -> list[SimMemory]:
        """In-memory checkpoints of these nodes, as far as they live and the Master hears them."""
        found = ((self.memories.get((one.info.host, one.info.state_port)), one) for one in entries if one.attached)
        return [memory for memory, entry in found if memory is not None and memory.owner.info == entry.info]

    @staticmethod
    def _newest(memories: list[SimMemory], size: int, until_s: float) -> Version:
        """The newest complete commit in these; of a sharded one only those of a world of that size (0: of any)."""
        parts: dict[tuple[Version, int], set[int]] = defaultdict(set)
        for memory in memories:
            for held in memory.holdings():
                if memory.since_s[held] <= until_s and (held.shards == 1 or size in (0, held.shards)):
                    parts[held.version, held.shards].add(held.shard)
        return max((v for (v, shards), found in parts.items() if len(found) == shards), default=NO_STATE)

    def _check_redone(self, before: World, world: World) -> None:
        course = self.courses.get(before.round)
        if course is None or self.training.finished:
            return
        untroubled = self.trouble_until_s < course.agreed_s  # a suspended job may meet trouble before the next world
        if course.target and untroubled and world.restore != Version(before.era, course.target):
            self.fail(
                f"round {before.round} was left at commit {course.target}, {world.round} begins from {world.restore}"
            )
        if (
            course.passed_s > self.trouble_until_s
            and not course.target
            and course.reached > before.restore.commit + UNDERWAY_STEPS
        ):
            self.fail(f"round {before.round} was interrupted after commit {course.reached} though nothing went wrong")
        survivors = {
            id(memory.owner)
            for memory in self.memories.values()
            if any(member.incarnation == memory.owner.info.incarnation for member in world.members)
        }
        if course.copied_by & survivors and not self.training.sharded:
            every = self.training.copy_every
            least = (course.reached - 1) // every * every
            if least > before.restore.commit and world.restore < Version(before.era, least):
                self.fail(f"round {before.round} got to {course.reached}, {world.round} begins from {world.restore}")

    # --- reported by agents and workers ------------------------------------------------------------------------------

    def agent_stepped(self, before: AgentState, event: ag.Event, decision: ag.Decision, now_s: float) -> None:
        """An agent has decided."""
        self.steps += 1
        self._met(agent_pair(before, event))
        after = decision.state
        node = after.info.node
        if self.spec.independent:
            self._undisturbed(before, event, decision)
        elif after.phase is AgentPhase.IDLE and any(
            worker.status is not WorkerStatus.PARKED for worker in after.alive if worker not in after.shed
        ):
            self.fail(f"{node} is idle with living workers")
        for effect in decision.effects:
            if isinstance(effect, ag.Start | ag.GivePlace) and not before.registered:
                self.fail(f"{node} takes part in a world without a lease")
            if isinstance(effect, ag.Start | ag.StartAhead):
                taken = {w.slot for w in before.alive} & set(effect.slots)
                if isinstance(event, ag.WorkerEnded):
                    taken.discard(event.slot)
                if taken:
                    self.fail(f"{node} starts workers in slots {sorted(taken)}, where old ones live")
            self._in_slots(decision.state, effect)
            if isinstance(effect, ag.TellWorkers) and isinstance(effect.message, Target):
                self._agreed(before.running_round, effect.message)
        leaves = after.phase in (AgentPhase.LEAVING, AgentPhase.OVER) and before.phase not in (
            AgentPhase.LEAVING,
            AgentPhase.OVER,
        )
        if leaves and before.draining is not None:
            ordered = isinstance(event, ag.MasterSaid) and isinstance(event.message, Dismissed | Finish | Expelled)
            late = before.drain_by_s is not None and now_s >= before.drain_by_s
            if isinstance(event, ag.MasterSaid) and isinstance(event.message, Depart):
                late = late or not (event.message.deadline_s or before.timeouts.shutdown_s)  # has no time any more
            alone = after.outcome is not None and after.outcome.exit_code == ExitCode.STORE_UNREACHABLE
            if not (ordered or late or alone or isinstance(event, ag.Interrupted | ag.Fatal | ag.Noticed)):
                self.fail(f"{node} wanted to wait for the others and leaves on {event}")

    def _in_slots(self, after: AgentState, effect: ag.Effect) -> None:
        """Workers are where the world, or the next one, has them, and look for their devices where these are."""
        node = after.info.node
        if isinstance(effect, ag.StartAhead) and set(effect.slots) - set(after.uses):
            self.fail(f"{node} starts workers in slots {effect.slots}, and is to use {after.uses}")
        if not isinstance(effect, ag.Start | ag.GivePlace):
            return
        member = effect.world.member(node)
        used = member.used if member is not None else ()
        if set(effect.slots) - set(used):
            self.fail(f"{node} has workers in slots {effect.slots}, and the world uses {used} there")
        for worker in after.workers:
            astray = after.by_device and not after.independent and worker.bound != worker.local_rank
            if worker.slot in effect.slots and astray and not worker.anew:
                self.fail(f"{node}: {worker} would look for its device in another place")

    def _undisturbed(self, before: AgentState, event: ag.Event, decision: ag.Decision) -> None:
        """A change of the world signals no independent worker whose slot has a part in the next one."""
        if not isinstance(event, ag.MasterSaid) or before.phase not in (AgentPhase.RUNNING, AgentPhase.IDLE):
            return
        member = event.message.world.member(before.info.node) if isinstance(event.message, StartRound) else None
        if member or isinstance(event.message, StopRound):
            others = {worker.slot for worker in before.workers if worker.frozen_since_s is not None}
            others |= {worker.slot for worker in before.shed}
            if member:
                others |= {worker.slot for worker in before.workers if worker.slot not in member.used}
            done = [effect for effect in decision.effects if isinstance(effect, ag.SignalWorkers | ag.TellWorkers)]
            if any(not set(effect.slots) or set(effect.slots) - others for effect in done):
                self.fail(f"{before.info.node} disturbs its workers on {event.message}: {done}")

    def worker_started(self, worker: SimWorker, world: World | None) -> None:
        """An agent has created a worker process."""
        if world is not None:
            self.placed(worker, world)

    def _agreed(self, number: Round, order: Target) -> None:
        course = self.courses.get(number)
        if order.purpose == Purpose.SET.value:
            return  # what counts is what the workers take their steps under
        if course is None:
            self.fail(f"workers of round {number} are to go to commit {order.commit}; nobody trains there")
        elif order.commit in (course.saves if order.purpose == Purpose.SAVE.value else {course.target}):
            return  # other workers got this order before
        elif course.reached > order.commit or (course.reached == order.commit and self.calm):
            self.fail(f"round {number} is to stop at commit {order.commit}; {course.reached} has been passed")
        elif order.purpose == Purpose.SAVE.value:
            course.saves.add(order.commit)
        elif not course.target:
            course.target, course.agreed_s = order.commit, self.timeline.now_s

    def placed(self, worker: SimWorker, world: World) -> None:
        """A worker has been given a place."""
        if self.worlds.get(world.round) != world:
            self.fail(f"{worker} was given a place in a world of round {world.round} that nobody recorded")
        slot = (id(worker.parent), worker.slot)
        if world.round < self._placed[slot]:
            self.fail(f"{worker} was given a place in round {world.round} after {self._placed[slot]}")
        self._placed[slot] = world.round

    def restored(self, worker: SimWorker, world: World, version: Version) -> None:
        """A worker has its state."""
        if version != self.worlds[world.round].restore:
            self.fail(f"{worker} begins round {world.round} from {version}, not {self.worlds[world.round].restore}")
        self.courses.setdefault(world.round, RoundProgress(version.commit, set()))

    def passed(self, worker: SimWorker, world: World, commit: int) -> None:
        """A worker has passed a step boundary."""
        course = self.courses[world.round]
        course.reached = max(course.reached, commit)
        course.passed_s = self.timeline.now_s
        if course.target and commit > course.target:
            self.fail(f"{worker} passes commit {commit} although round {world.round} ends at {course.target}")

    def holds(self, worker: SimWorker, world: World, commit: int, settings: Settings) -> None:
        """Under these settings a worker takes the step after a commit."""
        if self.settings.get(settings.number) != settings:
            self.fail(f"{worker} takes a step under settings that nobody recorded: {settings}")
        others = self._held.setdefault((world.round, commit), settings)
        if others != settings:
            self.fail(f"{worker} goes on from commit {commit} under {settings}, others under {others}")

    def worker_failed(self) -> None:
        """A worker fails for a reason that may be charged."""
        self.worker_failures += 1

    def copied(self, parent: Parent, version: Version) -> None:
        """A node has taken a worker's commit."""
        for number, world in self.worlds.items():
            if world.era == version.era and number in self.courses:
                self.courses[number].copied_by.add(id(parent))
