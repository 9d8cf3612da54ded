"""Simulated worker processes, and workers of scripts that do not use edl: those of a round progress only together."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from edl.agent.machine import events as ag
from edl.testing.sim.biases import USUAL
from edl.testing.sim.memory_checkpoints import Directory, SimMemory
from edl.testing.sim.timeline import ScheduledCall, Timeline
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.local import ToWorker
from edl.wire.messages import ServiceFromWorker
from edl.wire.records import Member, Settings, Version, World

SIGTERM, SIGKILL = 15, 9


class Parent(Protocol):
    """The launcher that a worker belongs to."""

    memory: SimMemory
    host: str
    relay: Callable[[ServiceFromWorker], None]
    """Receives the workers' messages to services of the Master."""

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Call soon; once the process continues if it is stopped; never if it is dead."""
        ...

    def tell_agent(self, event: ag.Event) -> None:
        """Post an event of a worker to the agent."""
        ...

    def worker_ended(self, worker: SimWorker, code: int, peer_loss: bool) -> None:
        """A worker process has ended."""
        ...


class Watcher(Protocol):
    """Checks what workers do."""

    def worker_started(self, worker: SimWorker, world: World | None) -> None:
        """An agent has created a worker process."""
        ...

    def placed(self, worker: SimWorker, world: World) -> None:
        """A running worker was given a place."""
        ...

    def restored(self, worker: SimWorker, world: World, version: Version) -> None:
        """A worker has restored its state."""
        ...

    def passed(self, worker: SimWorker, world: World, commit: int) -> None:
        """A worker has passed a step boundary."""
        ...

    def holds(self, worker: SimWorker, world: World, commit: int, settings: Settings) -> None:
        """A worker takes the step after a commit with these settings."""
        ...

    def copied(self, parent: Parent, version: Version) -> None:
        """A node has copied a worker's commit."""
        ...

    def worker_failed(self) -> None:
        """A worker fails for a reason that may be charged to the restart budget."""
        ...

    def fail(self, text: str) -> None:
        """Report a violated invariant and raise it."""
        ...


@dataclass(slots=True, eq=False)
class SimWorker:
    """A simulated worker process, as its agent and the other workers see it."""

    parent: Parent
    node: NodeId
    incarnation: Incarnation
    born: Round
    slot: int
    deaf: bool
    """Whether it ignores SIGTERM."""
    round: Round = Round(0)
    """Round of the world it is in; 0 for none."""
    rank: Rank = Rank(-1)
    alive: bool = True
    up: bool = False
    """Whether it has connected to its peers."""
    frozen: bool = False
    done: bool = False
    """Whether its training is complete; it then exits with status 0."""

    def __str__(self) -> str:
        return f"worker in slot {self.slot} of {self.node} born in {self.born}"


@dataclass(slots=True, eq=False)
class RoundWorkers:
    """The workers that have joined one round, by rank, and how a death among them shows."""

    world: World
    workers: dict[Rank, SimWorker] = field(default_factory=dict)
    hangs: bool = False
    """Whether the peers of a dead worker hang (as with NCCL) instead of failing (as with gloo)."""


class Job(ABC):
    """The computation of a job: its workers and their progress."""

    def __init__(self, timeline: Timeline, rng: random.Random, watcher: Watcher, directory: Directory) -> None:
        self.timeline = timeline
        self.rng = rng
        self.watcher = watcher
        self.directory = directory
        self.processes: list[SimWorker] = []
        self.finished = False
        self.sharded = False
        self.copy_every = 1
        self.step_s = 0.25
        """Seconds from one step boundary to the next."""
        self.biases = USUAL

    def doubles(self, world: World) -> bool:
        """Whether two nodes make each part of a commit in this world."""
        return len(world.members) > 1

    # --- called by the launcher ---------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, parent: Parent, world: World, member: Member, slots: Iterable[int]) -> list[SimWorker]:
        """Start workers of a world in these slots."""

    @abstractmethod
    def start_ahead(self, parent: Parent, owner: tuple[NodeId, Incarnation], born: Round, slot: int) -> SimWorker:
        """Start a worker that waits for its world."""

    @abstractmethod
    def give_place(self, worker: SimWorker, world: World) -> None:
        """Send a worker its place in a world."""

    @abstractmethod
    def hear(self, worker: SimWorker, message: ToWorker) -> None:
        """Deliver a message from the agent to a worker."""

    def service_message(self, worker: SimWorker, service: str, body: str | None) -> None:  # noqa: B027 - most jobs use no service
        """Deliver a message of a service; ``None``: messages to services may be lost."""

    def signal(self, worker: SimWorker, number: int) -> None:
        """Deliver a signal to a worker."""
        if number == SIGKILL:
            self.timeline.after(0.001, self.end, worker, -SIGKILL)
        elif number == SIGTERM and not worker.deaf:
            self.timeline.after(self.rng.uniform(0.001, 0.1), self.end, worker, -SIGTERM)

    # --- life cycle ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def end(self, worker: SimWorker, code: int, peer_loss: bool = False) -> None:
        """End a worker process."""

    @abstractmethod
    def freeze(self, worker: SimWorker) -> None:
        """Stop a worker as SIGSTOP does."""

    @abstractmethod
    def thaw(self, worker: SimWorker) -> None:
        """Continue a worker as SIGCONT does."""

    @abstractmethod
    def group(self, number: Round) -> RoundWorkers | None:
        """The workers of a round that have joined it."""

    @property
    @abstractmethod
    def left_s(self) -> float:
        """Seconds that a healthy world still needs."""

    @property
    def longest_s(self) -> float:
        """Seconds that a healthy world needs from the beginning."""
        return self.left_s

    @property
    def may_keep_failing(self) -> bool:
        """Whether the script may fail in every world, by its own fault, until the job has used up its restarts."""
        return False

    @abstractmethod
    def shorten(self, left_s: float) -> None:
        """Reduce the remaining work to about ``left_s`` seconds."""

    def heal(self) -> None:
        """End all faults of the training itself."""
        for worker in self.alive():
            if worker.frozen:
                self.thaw(worker)

    def alive(self) -> list[SimWorker]:
        """All living worker processes."""
        self.processes = [worker for worker in self.processes if worker.alive]
        return list(self.processes)

    def deaf(self) -> bool:
        """Draw whether the next worker ignores SIGTERM."""
        return self.rng.random() < self.biases.deaf


class PlainWorkers(RoundWorkers):
    """The workers of one round of a script that does not use edl. Their progress is kept on shared storage."""

    def __init__(self, job: PlainJob, world: World) -> None:
        super().__init__(world, hangs=job.rng.random() < 0.3)
        self.job = job
        self.broken = False
        self._since_s: float | None = None
        self._end: ScheduledCall | None = None

    def add(self, worker: SimWorker) -> None:
        """Add a new worker process, which connects to its peers after a while."""
        self.workers[worker.rank] = worker
        self.job.timeline.after(self.job.rng.uniform(0.02, 0.4), self._comes_up, worker)

    def _comes_up(self, worker: SimWorker) -> None:
        if worker.alive:
            worker.up = True
            if self.broken:
                self.suffer(worker)
            self.look()

    def look(self) -> None:
        """Progress while every worker is connected, alive and not stopped."""
        able = len(self.workers) == self.world.size and all(
            worker.up and worker.alive and not worker.frozen for worker in self.workers.values()
        )
        if able and self._since_s is None and not self.broken:
            self._since_s = self.job.timeline.now_s
            self._end = self.job.timeline.after(self.job.work_s, self._complete)
        elif not able and self._since_s is not None:
            self.job.progress(self._since_s)
            self._since_s = None
            if self._end is not None:
                self._end.cancel()

    def shorten(self, left_s: float) -> None:
        """Reduce the remaining work to at most ``left_s`` seconds."""
        if self._since_s is not None and self._end is not None:
            self.job.progress(self._since_s)
            self.job.work_s = min(self.job.work_s, left_s)
            self._since_s = self.job.timeline.now_s
            self._end.cancel()
            self._end = self.job.timeline.after(self.job.work_s, self._complete)

    def _complete(self) -> None:
        self.job.work_s = 0.0
        self.job.finished = True
        self._since_s = None
        for worker in self.workers.values():
            worker.done = True
            self.job.timeline.after(self.job.rng.uniform(0.0, 0.2), self.job.end, worker, 0)

    def ended(self, worker: SimWorker) -> None:
        """A worker process has ended. Unless its work was done, its peers fail or hang."""
        self.look()
        if not worker.done and not self.broken:
            self.broken = True
            for peer in self.workers.values():
                self.suffer(peer)

    def suffer(self, peer: SimWorker) -> None:
        """Let a worker fail after a while because it lost a peer."""
        if peer.alive and not self.hangs and not peer.done:
            self.job.timeline.after(self.job.rng.uniform(0.01, 1.0), self.job.end, peer, 1, True)


class PlainJob(Job):
    """A job whose script does not use edl."""

    def __init__(
        self, timeline: Timeline, rng: random.Random, watcher: Watcher, directory: Directory, total_s: float
    ) -> None:
        super().__init__(timeline, rng, watcher, directory)
        self.work_s = total_s
        self.rounds: dict[Round, PlainWorkers] = {}

    @property
    def left_s(self) -> float:
        """Seconds that a healthy world still needs."""
        return self.work_s

    def group(self, number: Round) -> PlainWorkers | None:
        """The workers of a round that have been started."""
        return self.rounds.get(number)

    def shorten(self, left_s: float) -> None:
        """Reduce the remaining work to at most ``left_s`` seconds."""
        for training in self.rounds.values():
            training.shorten(left_s)
        self.work_s = min(self.work_s, left_s)

    def progress(self, since_s: float) -> None:
        """Count the work since ``since_s``, except for the last, interrupted step."""
        done_s = (self.timeline.now_s - since_s) // self.step_s * self.step_s
        self.work_s = max(0.0, self.work_s - done_s)

    def start(self, parent: Parent, world: World, member: Member, slots: Iterable[int]) -> list[SimWorker]:
        """Start workers of a world in these slots."""
        training = self.rounds.setdefault(world.round, PlainWorkers(self, world))
        workers = []
        for slot in slots:
            rank = Rank(member.first_rank + member.used.index(slot))
            worker = SimWorker(
                parent, member.node, member.incarnation, world.round, slot, self.deaf(), world.round, rank
            )
            self.watcher.worker_started(worker, world)
            training.add(worker)
            workers.append(worker)
        self.processes += workers
        return workers

    def start_ahead(self, parent: Parent, owner: tuple[NodeId, Incarnation], born: Round, slot: int) -> SimWorker:
        """Fails: a script that does not use edl is never started ahead."""
        self.watcher.fail(f"{owner[0]} starts a worker ahead although the script is plain")
        raise AssertionError("unreachable")

    def give_place(self, worker: SimWorker, world: World) -> None:
        """Fails: a script that does not use edl does not wait for a place."""
        self.watcher.fail(f"{worker} is given a place although its script is plain")

    def hear(self, worker: SimWorker, message: ToWorker) -> None:
        """Does nothing: a script that does not use edl receives no messages."""

    def end(self, worker: SimWorker, code: int, peer_loss: bool = False) -> None:
        """End a worker process."""
        if not worker.alive or (worker.frozen and code != -SIGKILL):
            return
        worker.alive = False
        self.rounds[worker.round].ended(worker)
        worker.parent.worker_ended(worker, code, peer_loss)

    def freeze(self, worker: SimWorker) -> None:
        """Stop a worker as SIGSTOP does."""
        worker.frozen = True
        self.rounds[worker.round].look()

    def thaw(self, worker: SimWorker) -> None:
        """Continue a worker as SIGCONT does."""
        worker.frozen = False
        training = self.rounds[worker.round]
        if worker.alive and worker.done:
            self.timeline.after(0.01, self.end, worker, 0)
        elif worker.alive and training.broken:
            training.suffer(worker)
        training.look()
