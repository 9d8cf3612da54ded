"""Invariants of the whole simulated job, beyond those of each state machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from edl.agent.machine import events as ag
from edl.agent.machine.state import AgentPhase, AgentState, WorkerStatus
from edl.config import FaultTolerance, JobSpec
from edl.exit_codes import ExitCode
from edl.master import events as ev
from edl.master.invariants import step_violations, world_violations
from edl.master.sizing import Sizing
from edl.master.state import MasterState, NodeEntry, NodeStatus, Phase, Record
from edl.rendezvous.parting import DRAIN_SHARE
from edl.testing.sim.asking import Promises
from edl.testing.sim.memory_checkpoints import Directory, SimMemory, StateNet
from edl.testing.sim.pairs import Pair, agent_pair, master_pair, why_impossible
from edl.testing.sim.timeline import Timeline
from edl.testing.sim.workers import Job, Parent, SimWorker
from edl.types import FencingToken, Round
from edl.wire.local import Target
from edl.wire.messages import Depart, Dismissed, Expelled, Finish, StartRound, StopRound
from edl.wire.purpose import Purpose
from edl.wire.records import NO_SETTINGS, NO_STATE, Settings, Version, World

DELIVERY_S = 0.5
"""Seconds in which a node's departure is agreed on, without the step that its workers have begun."""
REPORT_S = 2.0
"""Seconds until the Master must know of a node's copy."""
AFTERMATH_S = 15.0
"""Seconds after a fault in which its effects are tolerated."""


UNDERWAY_STEPS = 20
"""After so many steps the Master knows that the world is training, and can change it at a step boundary."""


class Violation(AssertionError):
    """An invariant of the simulated job does not hold."""


def succession_violations(before: World, after: World, spec: JobSpec, sizing: Sizing) -> Iterator[str]:
    """Violations of the rules for a world and its successor."""
    old, new = len(before.members), len(after.members)
    level, bounds, requested = spec.fault_tolerance, sizing.bounds(spec.nodes), sizing.requested(spec.nodes)
    least = max(old, bounds.lowest)  # the minimum may have been raised
    if after.round != before.round + 1:
        yield f"round {before.round} is followed by {after.round}"
    if level is FaultTolerance.RECOVER and new not in (min(least, requested or bounds.highest), requested):
        yield f"round {after.round} has {new} nodes after {old} with --fault-tolerance=recover"
    if level is FaultTolerance.SHRINK and new > (requested or least):
        yield f"round {after.round} has {new} nodes after {old} with --fault-tolerance=shrink"
    if before.members and before.master_port == after.master_port and before.master_host == after.master_host:
        yield f"round {after.round} has the master address of the one before"
    if after.era <= before.era:
        yield f"round {after.round} has era {after.era} after {before.era}"


@dataclass(slots=True)
class RoundProgress:
    """How far a round's workers have got."""

    reached: int
    """Highest commit that a worker has passed."""
    copied_by: set[int]
    """Launchers that have copies of the round's commits, by ``id``."""
    target: int = 0
    """Commit at which the round ends, once agreed, else 0. No worker may pass it."""
    saves: set[int] = field(default_factory=set)
    """Commits to be saved before the round ends."""
    lost: int = 0
    """Launchers with state in memory that had died before it began."""
    impatient: int = 0
    """How often a worker had given up waiting for a copy before it began."""
    passed_s: float = 0.0
    """When a worker last passed a step boundary."""
    agreed_s: float = 0.0
    """When ``target`` was agreed."""


class Checks:
    """Observes every process and raises ``Violation`` when an invariant first fails."""

    def __init__(self, spec: JobSpec, timeline: Timeline) -> None:
        self.spec = spec
        self.timeline = timeline
        self.training: Job
        self.states: StateNet
        self.directory = Directory()
        self.record: Record | None = None
        """The record in the store."""
        self.worlds: dict[Round, World] = {}
        """Every recorded world."""
        self.progress: dict[Round, RoundProgress] = {}
        self.worker_failures = 0
        """Worker failures caused by the fault plan."""
        self.trouble_until_s = 0.0
        """Until this time the effects of faults are tolerated."""
        self.corrupted = False
        """Whether a checkpoint was corrupted."""
        self.gave_up = False
        """Whether a worker or a service has reported that the job cannot continue."""
        self.lost_memories = 0
        """Number of in-memory checkpoints that were lost before they were written to the directory."""
        self.stored_ns = 0
        """Slot-nanoseconds in the stored accounts of the goodput."""
        self.owed: tuple[Version, int] | None = None
        """The checkpoint that the kill switch must leave in the directory, and ``lost_memories`` at that time: if more
        are lost, it may be missing."""
        self.steps = 0
        self.pairs: Counter[Pair] = Counter()
        """How often each event occurred in each state."""
        self.promises = Promises(spec.nodes, self.fail)
        self.settings: dict[int, Settings] = {0: NO_SETTINGS}
        """All settings ever recorded, by number."""
        self._held: dict[tuple[Round, int], Settings] = {}
        """Settings of the step after each commit."""
        self._placed: dict[tuple[int, int], Round] = defaultdict(lambda: Round(0))
        self._token = ""
        """Token of the job under observation; empty until it is founded."""
        self._next_port = 20_000

    def note(self, text: str) -> None:
        """Report a violation and stop the simulated time after this call. Only the first violation is kept."""
        self.timeline.failure = self.timeline.failure or Violation(text)

    def fail(self, text: str) -> None:
        """Report a violation and raise it. Stops the simulated time too, because a task may catch the exception."""
        self.note(text)
        assert self.timeline.failure is not None  # noqa: S101 - just noted
        raise self.timeline.failure

    def _met(self, pair: Pair) -> None:
        """Count an event in a state. Fails if the pair is declared impossible."""
        self.pairs[pair] += 1
        if self.pairs[pair] == 1 and (why := why_impossible(pair)):
            self.fail(f"{' '.join(pair)} is declared impossible: {why}. Fix the cause, or remove it from IMPOSSIBLE")

    def demand(self, violations: Iterable[str]) -> None:
        """Fail on the first of these violations, if any."""
        for violation in violations:
            self.fail(violation)

    def trouble(self, for_s: float) -> None:
        """Tolerate the effects of a fault that lasts ``for_s`` seconds."""
        self.trouble_until_s = max(self.trouble_until_s, self.timeline.now_s + for_s + AFTERMATH_S)

    @property
    def calm(self) -> bool:
        """Whether no effects of a fault are tolerated any more."""
        return self.timeline.now_s > self.trouble_until_s

    def fresh_ports(self, count: int) -> tuple[int, ...]:
        """Port numbers that were never returned before."""
        first = self._next_port
        self._next_port += count
        return tuple(range(first, first + count))

    # --- reported by the shells ---------------------------------------------------------------------------------------

    def master_stepped(
        self, before: MasterState, events: Sequence[ev.Event], decision: ev.Decision, where: str
    ) -> None:
        """Check a Master's decision before its effects are carried out."""
        self.steps += 1
        for event in events:
            self._met(master_pair(before, event))
        for violation in step_violations(before, decision):
            self.fail(f"Master on {where}: {violation}")

    def is_this_job(self, token: str) -> bool:
        """Whether a launcher with this token belongs to the job under observation, which is the first one founded."""
        self._token = self._token or token
        return token == self._token

    def job_founded(self, where: str) -> None:
        """A launcher has written a new job's specification."""
        if self._token and (self.record is None or self.record.outcome is None):
            self.fail(f"{where} founds the job again, and it has not ended")

    def record_written(
        self, state: MasterState, decided_s: float, token: FencingToken, real: FencingToken, revision: int
    ) -> None:
        """Check a record that the store has accepted."""
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
            self.demand(world_violations(record.world, self.spec))
            if before is None or before.round < record.round:
                self._world_formed(before.world if before is not None else None, state, record.world, decided_s)
        formed = record.world is not None and (before is None or before.round < record.round)
        self.promises.stored(record, revision, formed=formed)
        self._check_budget(record)
        if self.settings.setdefault(record.settings.number, record.settings) != record.settings:
            self.fail(f"settings {record.settings} are recorded after {self.settings[record.settings.number]}")
        if record.phase is Phase.ENDED and record.outcome is not None and record.outcome.exit_code == ExitCode.KILLED:
            self.owed = self._newest(list(self.states.memories.values()), decided_s), self.lost_memories
        if record.outcome is not None and record.outcome.exit_code == ExitCode.CHECKPOINT_UNUSABLE and record != before:
            self._check_unusable(state, decided_s)

    def _check_budget(self, record: Record) -> None:
        # While a world forms, a node may still report that it stopped its workers itself, and the charge is returned. A
        # job that ends before that has no use for it; one that ends for its budget is checked in ``SimWorld``.
        settled = record.phase not in (Phase.FORMING, Phase.ENDED)
        if settled and record.restarts > self.worker_failures:
            self.fail(f"{record.restarts} restarts charged for {self.worker_failures} worker failures: {record.reason}")

    # --- state --------------------------------------------------------------------------------------------------------

    def _world_formed(self, before: World | None, state: MasterState, world: World, decided_s: float) -> None:
        if world.era <= world.restore.era:
            self.fail(f"round {world.round} continues era {world.restore.era} under era {world.era}")
        self._check_newest(state, world, decided_s)
        if before is not None:
            self.demand(succession_violations(before, world, self.spec, state.record.sizing))
            self._check_redone(before, world)

    def _check_newest(self, state: MasterState, world: World, decided_s: float) -> None:
        """A world must begin from the newest complete commit on its attached members and the attached, ready nodes."""
        ready = [entry for entry in state.nodes.values() if entry.status is NodeStatus.READY]
        members = [entry for entry in state.nodes.values() if world.member(entry.info.node) is not None]
        newest = self._newest(self._attached([*ready, *members]), decided_s - REPORT_S)
        if newest > world.restore:
            self.fail(f"round {world.round} begins from {world.restore} although {newest} is there")

    def _check_unusable(self, state: MasterState, decided_s: float) -> None:
        """The Master may end a job for want of a usable state only if no attached node and no checkpoint in the
        directory had one. States that detached nodes write when they end serve the next job."""
        until_s = decided_s - REPORT_S
        found = max(self._newest(self._attached(state.nodes.values()), until_s), self.directory.usable(until_s))
        if found != NO_STATE:
            self.fail(f"the job ends, {state.record.reason}, although {found} is there")

    def _attached(self, entries: Iterable[NodeEntry]) -> list[SimMemory]:
        """In-memory checkpoints of the attached nodes among these, as far as the nodes are alive."""
        found = (
            (self.states.memories.get((one.info.host, one.info.state_port)), one) for one in entries if one.attached
        )
        return [memory for memory, entry in found if memory is not None and memory.owner.info == entry.info]

    @staticmethod
    def _newest(memories: list[SimMemory], until_s: float) -> Version:
        """The newest complete commit in these memories."""
        parts: dict[tuple[Version, int], set[int]] = defaultdict(set)
        for memory in memories:
            for held in memory.holdings():
                if memory.since_s[held] <= until_s:
                    parts[held.version, held.shards].add(held.shard)
        return max((v for (v, shards), found in parts.items() if len(found) == shards), default=NO_STATE)

    def _check_redone(self, before: World, world: World) -> None:
        progress = self.progress.get(before.round)
        if progress is None or self.training.finished:
            return
        untroubled = self.trouble_until_s < progress.agreed_s  # a suspended job may meet trouble before the next world
        if progress.target and untroubled and world.restore != Version(before.era, progress.target):
            self.fail(
                f"round {before.round} was left at commit {progress.target}, {world.round} begins from {world.restore}"
            )
        if (
            progress.passed_s > self.trouble_until_s
            and not progress.target
            and progress.reached > before.restore.commit + UNDERWAY_STEPS
        ):
            self.fail(f"round {before.round} was interrupted after commit {progress.reached} though nothing went wrong")
        survivors = {
            id(memory.owner)
            for memory in self.states.memories.values()
            if any(member.incarnation == memory.owner.info.incarnation for member in world.members)
        }
        every = self.training.copy_every
        least = (progress.reached - 1) // every * every
        if self.training.sharded and not self._keeps_parts(before, world, progress):
            return
        if self.training.sharded and not self.training.doubles(before):
            least -= every  # the lost node's last commit may not have been copied yet
        kept = progress.copied_by & survivors and least > before.restore.commit
        if kept and world.restore < Version(before.era, least):
            self.fail(f"round {before.round} got to {progress.reached}, {world.round} begins from {world.restore}")

    def _keeps_parts(self, before: World, world: World, progress: RoundProgress) -> bool:
        """Whether every part of a sharded state must have survived: one node at most is gone, and workers waited for
        the copies of their last commits."""
        if len(before.members) < 2:
            return False
        stay = {member.incarnation for member in world.members}
        gone = sum(member.incarnation not in stay for member in before.members)
        lost = self.lost_memories - progress.lost
        return gone <= 1 and lost <= gone and progress.impatient == self.states.impatient

    # --- reported by agents and workers -------------------------------------------------------------------------------

    def _is_hurried(self, limit_s: float) -> bool:
        """Whether a node that must be gone in ``limit_s`` seconds may have to leave in the middle of a step."""
        return limit_s * DRAIN_SHARE < self.training.step_s + DELIVERY_S

    def agent_stepped(self, before: AgentState, event: ag.Event, decision: ag.Decision, now_s: float) -> None:
        """Check an agent's decision."""
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
        order = event.message if isinstance(event, ag.MasterSaid) and isinstance(event.message, Depart) else None
        limit_s = before.timeouts.shutdown_s if order is None else order.deadline_s or before.timeouts.shutdown_s
        timeless = order is not None and not limit_s  # its workers are killed at once, as --shutdown-timeout=0 asks
        if order is not None and self._is_hurried(limit_s):
            self.trouble(0.0)
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
            alone = after.outcome is not None and after.outcome.exit_code == ExitCode.STORE_UNREACHABLE
            lease_s = before.info.lease_within(before.timeouts.lease_ttl_s)
            alone = alone or (not before.connected and now_s >= before.contact_s + lease_s)
            if not (ordered or late or timeless or alone or isinstance(event, ag.Interrupted | ag.Fatal | ag.Noticed)):
                self.fail(f"{node} wanted to wait for the others and leaves on {event}")

    def _in_slots(self, after: AgentState, effect: ag.Effect) -> None:
        """Workers must be in the slots of their world, or of the next one for those started ahead, and bound to the
        right devices."""
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
            if worker.slot in effect.slots and astray and not worker.being_replaced:
                self.fail(f"{node}: {worker} would look for its device in another place")

    def _undisturbed(self, before: AgentState, event: ag.Event, decision: ag.Decision) -> None:
        """A change of the world must not signal an independent worker whose slot has a rank in the next one."""
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
        """Check the place of a worker process that an agent has just created."""
        if world is not None:
            self.placed(worker, world)

    def _agreed(self, number: Round, order: Target) -> None:
        progress = self.progress.get(number)
        if order.purpose == Purpose.SET.value:
            return  # what counts is what the workers take their steps under
        if progress is None:
            self.fail(f"workers of round {number} are to go to commit {order.commit}, at which no worker trains")
        elif order.commit in (progress.saves if order.purpose == Purpose.SAVE.value else {progress.target}):
            return  # other workers got this order before
        elif progress.reached > order.commit or (progress.reached == order.commit and self.calm):
            self.fail(f"round {number} is to stop at commit {order.commit}; {progress.reached} has been passed")
        elif order.purpose == Purpose.SAVE.value:
            progress.saves.add(order.commit)
        elif not progress.target:
            progress.target, progress.agreed_s = order.commit, self.timeline.now_s

    def placed(self, worker: SimWorker, world: World) -> None:
        """Check the place in a world that a worker was given."""
        if self.worlds.get(world.round) != world:
            self.fail(f"{worker} was given a place in a world of round {world.round} that was not recorded")
        slot = (id(worker.parent), worker.slot)
        if world.round < self._placed[slot]:
            self.fail(f"{worker} was given a place in round {world.round} after {self._placed[slot]}")
        self._placed[slot] = world.round

    def restored(self, worker: SimWorker, world: World, version: Version) -> None:
        """Check the commit that a worker has restored."""
        if version != self.worlds[world.round].restore:
            self.fail(f"{worker} begins round {world.round} from {version}, not {self.worlds[world.round].restore}")
        begun = RoundProgress(version.commit, set(), lost=self.lost_memories, impatient=self.states.impatient)
        self.progress.setdefault(world.round, begun)

    def passed(self, worker: SimWorker, world: World, commit: int) -> None:
        """Check that a worker may pass a step boundary."""
        progress = self.progress[world.round]
        progress.reached = max(progress.reached, commit)
        progress.passed_s = self.timeline.now_s
        if progress.target and commit > progress.target:
            self.fail(f"{worker} passes commit {commit} although round {world.round} ends at {progress.target}")

    def holds(self, worker: SimWorker, world: World, commit: int, settings: Settings) -> None:
        """Check the settings of the step after a commit."""
        if self.settings.get(settings.number) != settings:
            self.fail(f"{worker} takes a step under settings that were not recorded: {settings}")
        others = self._held.setdefault((world.round, commit), settings)
        if others != settings:
            self.fail(f"{worker} goes on from commit {commit} under {settings}, others under {others}")

    def worker_failed(self) -> None:
        """Count a worker failure that may be charged to the restart budget."""
        self.worker_failures += 1

    def copied(self, parent: Parent, version: Version) -> None:
        """Record that a node has copied a worker's commit."""
        for number, world in self.worlds.items():
            if world.era == version.era and number in self.progress:
                self.progress[number].copied_by.add(id(parent))
