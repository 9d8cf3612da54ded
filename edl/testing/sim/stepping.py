"""Simulated workers of scripts that use ``edl.run``: they take each step together, commit, and rejoin.

Their step boundaries are the shipped ``edl.worker.boundary``; the rest follows the worker's side of ``edl.wire.local``.
"""

from __future__ import annotations

import enum
import functools
import math
import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from edl.agent.machine import events as ag
from edl.errors import StateError
from edl.testing.sim.memory_checkpoints import Directory
from edl.testing.sim.timeline import ScheduledCall, Timeline
from edl.testing.sim.workers import SIGKILL, Job, Parent, RoundWorkers, SimWorker, Watcher
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire import local
from edl.wire.purpose import Purpose
from edl.wire.records import NO_STATE, Holding, Member, Version, World
from edl.worker.boundary import BoundaryAction, StepBoundaries
from edl.worker.part_numbers import Claim, RankPart, number

_LEAVING = (BoundaryAction.SWITCH, BoundaryAction.KILL, BoundaryAction.STOP)

LONGEST_TIMEOUT_S = 12.0
"""Longest time in seconds that a worker which lost a peer waits for its agent's message before it exits."""


class Stage(enum.Enum):
    """Where a worker is in its life."""

    BOOTING = "booting"
    WAITING = "waiting"
    FORMING = "forming"
    RESTORING = "restoring"
    TRAINING = "training"
    LEAVING = "leaving"
    """Unwinding its step; it parks soon."""
    LOST = "lost"
    """Has lost a peer and waits for its agent's message."""


IN_ROUND = (Stage.FORMING, Stage.RESTORING, Stage.TRAINING)


@dataclass(slots=True, eq=False)
class Stepper(SimWorker):
    """A simulated worker process that trains step by step and commits at step boundaries."""

    stage: Stage = Stage.BOOTING
    crew: Crew | None = None
    """The workers of its round, while it is in one."""
    boundary: StepBoundaries = field(default_factory=StepBoundaries)
    computed: int = 0
    """Last step whose collectives are complete."""
    standing: bool = False
    """Whether it waits at the boundary of that step."""
    busy: bool = False
    """Whether its agent has yet to take its last commit."""
    stuck: bool = False
    """Whether it will not react to the end of its round."""
    inbox: list[local.ToWorker | World] = field(default_factory=list)
    said_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """The kind of script that a job runs."""

    rejoins: bool = True
    """Whether its workers keep their process and rejoin; otherwise they use only edl's state and are restarted."""
    sharded: bool = False
    replicas: int = 1
    """Of a sharded model: groups of workers that hold all of it, in worlds that they divide (HSDP)."""
    copy_every: int = 1
    save_every: int = 0
    """Number of steps between checkpoints, 0 for none."""
    step_s: float = 0.25
    skew_s: float = 0.05
    clumsy: float = 0.0
    """Chance that a worker does not react to the end of its round."""


class Crew(RoundWorkers):
    """The workers of one round. A step completes on all of them or on none."""

    def __init__(self, job: SteppingJob, world: World) -> None:
        super().__init__(world, hangs=job.rng.random() < 0.3)
        self.job = job
        self.members: dict[Rank, Stepper] = {}
        """Workers that are in the round now."""
        self.broken = False
        self.stalled = False
        """Whether its collectives hang."""
        self._timer: ScheduledCall | None = None

    def join(self, worker: Stepper) -> None:
        """Add a worker to the round."""
        self.members[worker.rank] = worker
        self.workers[worker.rank] = worker
        self.look()

    def look(self) -> None:
        """Schedule the next step if all ranks are ready for it."""
        members = self.members.values()
        able = not self.broken and not self.stalled and len(members) == self.world.size
        stages = {worker.stage for worker in members} if able else set()
        if not able or len(stages) > 1 or any(worker.frozen or worker.busy for worker in members):
            self._stop_clock()
        elif self._timer is not None:
            return
        elif stages == {Stage.FORMING}:
            self._timer = self.job.timeline.after(self.job.rng.uniform(0.01, 0.1), self._formed)
        elif stages == {Stage.TRAINING} and len({worker.boundary.passed for worker in members}) == 1:
            worker = next(iter(members))
            if self.job.over(self):
                self.job.complete(self)
            elif worker.computed <= worker.boundary.passed and self.job.ready(self):
                commit = worker.boundary.passed + 1
                self._timer = self.job.timeline.after(self.job.step_s, self._computed, commit)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _formed(self) -> None:
        self._timer = None
        for worker in self.members.values():
            worker.stage = Stage.RESTORING
            self.job.restore(worker)

    def _computed(self, commit: int) -> None:
        self._timer = None
        self.job.stepped(self.world, commit)
        for worker in self.members.values():
            worker.computed = commit
            self.job.timeline.after(self.job.rng.uniform(0.0, self.job.script.skew_s), self.job.arrive, worker, self)

    def leave(self, worker: Stepper, *, agreed: bool) -> None:
        """Remove a worker. Unless that was agreed on, the other workers lose a peer."""
        if self.members.get(worker.rank) is worker:
            del self.members[worker.rank]
        worker.crew = None
        worker.round = Round(0)
        self.job.left(worker, self.world)
        self._stop_clock()
        if not agreed and not worker.done and not self.broken:
            self.broken = True
            for peer in self.members.values():
                self.suffer(peer)

    def suffer(self, peer: Stepper) -> None:
        """Let a worker detect the loss of a peer after a while."""
        if peer.alive and not self.hangs and not peer.done:
            self.job.timeline.after(self.job.rng.uniform(0.01, 1.0), self.job.notice, peer, self)


def _leads(worker: SimWorker, world: World) -> bool:
    """Whether it is the first worker of its node, which commits for all of them."""
    member = world.member(worker.node)
    return member is not None and worker.rank == member.first_rank


@functools.lru_cache(maxsize=64)
def _parts(world: World, replicas: int) -> list[RankPart]:
    """The parts of a world's workers."""
    nodes = [member.node for member in world.members for _ in member.used]
    size = len(nodes) // replicas if len(nodes) % replicas == 0 else len(nodes)
    return number([Claim(tuple(range(rank % size, len(nodes), size)), {}, node) for rank, node in enumerate(nodes)])


class SteppingJob(Job):
    """A job whose script has a training loop that commits after each step."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        watcher: Watcher,
        directory: Directory,
        total_s: float,
        script: Script,
    ) -> None:
        super().__init__(timeline, rng, watcher, directory)
        self.script = script
        self.step_s = script.step_s
        self.position = directory.usable().commit
        """Latest commit of the newest world."""
        self.farthest = self.position
        self.total = self.position + max(1, math.ceil(total_s / script.step_s))
        self.sharded = script.sharded
        self.copy_every = script.copy_every
        self.calm = False
        self.rounds: dict[Round, Crew] = {}
        self._stepped: World | None = None

    def doubles(self, world: World) -> bool:
        """Whether each part of a sharded commit of this world is made on two nodes."""
        return all(part.others for part in _parts(world, self.script.replicas))

    @property
    def left_s(self) -> float:
        """Seconds that a healthy world still needs."""
        return 0.0 if self.finished else max(0, self.total - self.position) * self.step_s

    @property
    def longest_s(self) -> float:
        """Seconds that a healthy world needs from the beginning."""
        return self.total * self.step_s

    def group(self, number: Round) -> Crew | None:
        """The workers of a round that have joined it."""
        return self.rounds.get(number)

    def shorten(self, left_s: float) -> None:
        """Reduce the remaining work to about ``left_s`` seconds, without going back behind the farthest commit."""
        self.total = min(self.total, self.farthest + max(1, math.ceil(left_s / self.step_s)))

    def heal(self) -> None:
        """End all faults of the training itself."""
        super().heal()
        self.calm = True
        for crew in self.rounds.values():
            if crew.stalled:
                crew.stalled = False
                crew.look()

    # --- to be overridden ---------------------------------------------------------------------------------------------

    def over(self, crew: Crew) -> bool:
        """Whether all workers of a round, at the same boundary, have completed their work."""
        return all(worker.boundary.passed >= self.total for worker in crew.members.values())

    def ready(self, crew: Crew) -> bool:
        """Whether all workers of a round can take the next step."""
        return True

    def began(self, worker: Stepper, world: World) -> None:
        """Called when a worker has restored its state in a world."""

    def went_on(self, worker: Stepper) -> None:
        """Called when a worker has passed a boundary and takes the next step."""

    def left(self, worker: Stepper, world: World) -> None:
        """Called when a worker has left a world."""

    # --- starting -----------------------------------------------------------------------------------------------------

    def start(self, parent: Parent, world: World, member: Member, slots: Iterable[int]) -> list[SimWorker]:
        """Start workers of a world in these slots."""
        owner = member.node, member.incarnation
        return [self._born(parent, owner, world.round, slot, world) for slot in slots]

    def start_ahead(self, parent: Parent, owner: tuple[NodeId, Incarnation], born: Round, slot: int) -> SimWorker:
        """Start a worker that waits for its world."""
        return self._born(parent, owner, born, slot, None)

    def _born(
        self, parent: Parent, owner: tuple[NodeId, Incarnation], born: Round, slot: int, world: World | None
    ) -> SimWorker:
        worker = Stepper(parent, *owner, born, slot, self.deaf())
        self.watcher.worker_started(worker, world)
        self.processes.append(worker)
        boot_s = self.rng.uniform(0.02, 0.4) + (2.0 if self.rng.random() < self.biases.sluggish else 0.0)
        self.timeline.after(boot_s, self._boots, worker)
        return worker

    def _boots(self, worker: Stepper) -> None:
        if not worker.alive:
            return
        if worker.frozen:
            self.timeline.after(0.1, self._boots, worker)
            return
        worker.stage = Stage.WAITING
        self._say(worker, ag.WorkerEntered(worker.born, worker.slot, self.script.rejoins))
        if self.script.rejoins:
            self._say(worker, ag.WorkerParked(worker.born, worker.slot, Round(0)))

    def _say(self, worker: Stepper, event: ag.Event) -> None:
        worker.said_s = max(worker.said_s, self.timeline.now_s + self.rng.uniform(0.0002, 0.002))
        self.timeline.at(worker.said_s, worker.parent.run, worker.parent.tell_agent, event)

    # --- messages of the agent ----------------------------------------------------------------------------------------

    def give_place(self, worker: SimWorker, world: World) -> None:
        """Send a worker its place in a world."""
        assert isinstance(worker, Stepper)  # noqa: S101 - this job has no others
        self.timeline.after(0.0003, self._hears, worker, world)

    def hear(self, worker: SimWorker, message: local.ToWorker) -> None:
        """Deliver a message from the agent. A worker that is not connected yet misses it."""
        assert isinstance(worker, Stepper)  # noqa: S101 - this job has no others
        if worker.stage is not Stage.BOOTING:  # it is not connected yet, and misses it
            self.timeline.after(0.0003, self._hears, worker, message)

    def _hears(self, worker: Stepper, message: local.ToWorker | World) -> None:
        if not worker.alive:
            return
        if worker.frozen:
            worker.inbox.append(message)
            return
        match message:
            case World():
                self._placed(worker, message)
            case local.Break(round=number):
                self._breaks(worker, Round(number))
            case local.HoldAtBoundary(round=number, hold=hold):
                if worker.round == number:
                    passed = worker.boundary.hold(hold)
                    self._say(worker, ag.WorkerHere(worker.born, worker.slot, hold, passed))
            case local.Target(hold=hold, commit=commit, purpose=Purpose.SET.value, settings=settings):
                worker.boundary.set_settings(hold, commit, settings)
                self._again(worker)
            case local.Target(hold=hold, commit=commit, purpose=purpose, reason=reason):
                worker.boundary.set_target(hold, commit, Purpose(purpose), reason)
                self._again(worker)
            case local.Release(hold=hold):
                worker.boundary.release(hold)
                self._again(worker)
            case local.Stop(reason=reason):
                if worker.stage is Stage.WAITING:
                    self.timeline.after(0.005, self.end, worker, 0)
                else:
                    worker.boundary.stop(reason)
                    self._again(worker)

    def _placed(self, worker: Stepper, world: World) -> None:
        if worker.stage is not Stage.WAITING:
            if worker.round != world.round:
                self.watcher.fail(f"{worker} is given a place in round {world.round} while {worker.stage.value}")
            return
        member = world.member(worker.node)
        assert member is not None  # noqa: S101 - the agent has looked
        self.watcher.placed(worker, world)
        worker.stage, worker.round = Stage.FORMING, world.round
        worker.rank = Rank(member.first_rank + member.used.index(worker.slot))
        worker.crew = self.rounds.setdefault(world.round, Crew(self, world))
        worker.crew.join(worker)
        if worker.crew.broken:
            worker.crew.suffer(worker)

    def _breaks(self, worker: Stepper, number: Round) -> None:
        if worker.crew is None or worker.round != number:
            return
        worker.boundary.end()
        if worker.stuck or (not self.calm and self.rng.random() < self.script.clumsy):
            worker.stage = Stage.LEAVING
            return
        worker.stage = Stage.LEAVING
        slow = not self.calm and self.rng.random() < self.biases.sluggish
        self.timeline.after(self.rng.uniform(0.001, 0.2) + (3.0 if slow else 0.0), self._park, worker, worker.crew)

    def _park(self, worker: Stepper, crew: Crew, *, agreed: bool = False) -> None:
        if not worker.alive or worker.crew is not crew or worker.done:
            return  # a script that has finished does not wait for another world
        if worker.frozen:
            self.timeline.after(0.05, self._park, worker, crew)
            return
        number = worker.round
        crew.leave(worker, agreed=agreed)
        worker.stage, worker.standing, worker.up = Stage.WAITING, False, False
        if self.script.rejoins:
            self._say(worker, ag.WorkerParked(worker.born, worker.slot, number))
        else:
            self.timeline.after(0.005, self.end, worker, 0)

    # --- training -----------------------------------------------------------------------------------------------------

    def restore(self, worker: Stepper) -> None:
        """Restore a worker's state once its communicator is formed."""
        crew = worker.crew
        assert crew is not None  # noqa: S101 - it has just been formed
        world = crew.world

        def done(there: bool) -> None:
            if worker.crew is not crew or worker.stage is not Stage.RESTORING or not worker.alive:
                return
            if not there:
                if world.stored or worker.parent.memory.lives(world.sources):
                    self.watcher.worker_failed()  # not explained by a peer's death
                self.notice(worker, crew)
                return
            worker.stage, worker.up = Stage.TRAINING, True
            worker.boundary.begin(world.restore.commit, world.settings)
            self.began(worker, world)
            worker.computed = world.restore.commit
            self.position = world.restore.commit
            self.watcher.restored(worker, world, world.restore)
            self.watcher.holds(worker, world, world.restore.commit, worker.boundary.settings)
            self._say(worker, ag.WorkerUnderway(worker.born, worker.slot, world.round))
            crew.look()

        if world.restore == NO_STATE:
            self.timeline.after(0.005, done, True)
        elif world.stored:
            saved = self.directory.entries.get(world.restore)
            self.timeline.after(self.rng.uniform(0.1, 0.5), done, saved is not None and not saved.corrupt)
        else:
            memory, sharded = worker.parent.memory, self.script.sharded
            recut = sharded and (world.shards != world.size or self.script.replicas > 1)
            read, what = (memory.pieces, world.shards) if recut else (memory.piece, worker.rank if sharded else 0)
            self.timeline.after(0.001, worker.parent.run, read, world.restore, what, world.sources, done)

    def stepped(self, world: World, commit: int) -> None:
        """All ranks of a round have completed a step."""
        last = self._stepped
        if last is not None and last.round > world.round:
            both = {member.node for member in last.members} & {member.node for member in world.members}
            if both:
                self.watcher.fail(
                    f"round {world.round} takes a step after round {last.round}, with {sorted(both)} in both"
                )
        else:
            self._stepped = world
        self.position = commit
        self.farthest = max(self.farthest, commit)

    def arrive(self, worker: Stepper, crew: Crew) -> None:
        """A worker reaches the boundary of its last step."""
        here = worker.alive and worker.crew is crew and worker.stage is Stage.TRAINING
        if not here or worker.computed <= worker.boundary.passed:
            return
        if worker.frozen or worker.busy:
            worker.standing = True
            return
        try:
            turn = worker.boundary.arrive(worker.computed)
        except StateError as error:
            self.watcher.fail(f"{worker}: {error}")
            return
        worker.standing = turn is BoundaryAction.WAIT
        if turn is BoundaryAction.WAIT:
            return
        if turn is BoundaryAction.OVER:
            self._park(worker, crew)
            return
        self.watcher.passed(worker, crew.world, worker.computed)
        if turn not in _LEAVING:
            self.watcher.holds(worker, crew.world, worker.computed, worker.boundary.settings)

        def after() -> None:
            if turn in _LEAVING:
                worker.stage = Stage.LEAVING
                self._park(worker, crew, agreed=True)
            else:
                self.went_on(worker)
                crew.look()

        self._commit(worker, crew, turn, after)

    def _again(self, worker: Stepper) -> None:
        if worker.standing and worker.crew is not None:
            self.arrive(worker, worker.crew)

    def _commit(self, worker: Stepper, crew: Crew, turn: BoundaryAction, then: Callable[[], None]) -> None:
        """Commit if it is due; ``then`` follows when the commit has begun."""
        script, commit, world = self.script, worker.computed, crew.world
        save = turn in (BoundaryAction.SAVE, BoundaryAction.KILL) or bool(
            script.save_every and commit % script.save_every == 0
        )
        part = _parts(world, script.replicas)[worker.rank] if script.sharded else None
        copies = part.copies if part is not None else _leads(worker, world)
        if not copies or (
            turn in (BoundaryAction.PASS, BoundaryAction.SET) and commit % script.copy_every and not save
        ):
            then()
            return
        version = Version(world.era, commit)
        holding = Holding(version) if part is None else Holding(version, part.number, part.parts)
        others = frozenset(NodeId(node) for node in part.others) if part is not None else frozenset[NodeId]()
        save = save and (part is None or part.saves or part.parts == 1)
        worker.busy = True

        def begin() -> None:
            if not worker.alive or worker.crew is not crew or worker.stage is not Stage.TRAINING:
                free()  # its round has ended while it waited
                return
            worker.said_s = max(worker.said_s, self.timeline.now_s + self.rng.uniform(0.0002, 0.002))
            self.timeline.at(worker.said_s, worker.parent.run, taken)
            then()

        def taken() -> None:
            worker.parent.memory.committed(worker.slot, holding, save, others)
            self.watcher.copied(worker.parent, version)
            free()

        def free() -> None:
            worker.busy = False
            self._again(worker)
            if worker.crew is not None:
                worker.crew.look()

        if script.sharded:
            worker.parent.memory.when_copied(worker.slot, begin)
        else:
            begin()

    def complete(self, crew: Crew) -> None:
        """All workers have completed the last step and exit."""
        self.finished = True
        for worker in crew.members.values():
            worker.done = True
            self.timeline.after(self.rng.uniform(0.0, 0.2), self.end, worker, 0)

    # --- failures and signals -----------------------------------------------------------------------------------------

    def notice(self, worker: Stepper, crew: Crew) -> None:
        """A worker detects the loss of a peer and waits for its agent's message."""
        if not worker.alive or worker.crew is not crew or worker.stage not in IN_ROUND or worker.done:
            return
        if worker.frozen or worker.standing or worker.computed > worker.boundary.passed:
            self.timeline.after(0.3, self.notice, worker, crew)  # nothing connects it to its peers now
            return
        worker.stage = Stage.LOST
        self.timeline.after(self.rng.uniform(2.0, LONGEST_TIMEOUT_S), self._give_up, worker, crew)
        crew.leave(worker, agreed=False)
        worker.crew, worker.round = crew, crew.world.round

    def _give_up(self, worker: Stepper, crew: Crew) -> None:
        if worker.crew is crew and worker.stage is Stage.LOST:
            self.end(worker, 1, True)

    def end(self, worker: SimWorker, code: int, peer_loss: bool = False) -> None:
        """End a worker process."""
        assert isinstance(worker, Stepper)  # noqa: S101 - this job has no others
        if not worker.alive or (worker.frozen and code != -SIGKILL):
            return
        worker.alive = False
        if worker.crew is not None:
            worker.crew.leave(worker, agreed=False)
        worker.parent.worker_ended(worker, code, peer_loss)

    def freeze(self, worker: SimWorker) -> None:
        """Stop a worker as SIGSTOP does."""
        assert isinstance(worker, Stepper)  # noqa: S101 - this job has no others
        worker.frozen = True
        if worker.crew is not None:
            worker.crew.look()

    def thaw(self, worker: SimWorker) -> None:
        """Continue a worker as SIGCONT does."""
        assert isinstance(worker, Stepper)  # noqa: S101 - this job has no others
        worker.frozen = False
        if worker.alive and worker.done:
            self.timeline.after(0.01, self.end, worker, 0)
            return
        inbox, worker.inbox = worker.inbox, []
        for message in inbox:
            self._hears(worker, message)
        self._again(worker)
        if worker.crew is not None:
            worker.crew.look()
