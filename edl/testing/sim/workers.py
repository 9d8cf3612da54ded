"""Simulated training: workers of one round that only get on together, like any collective."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edl.testing.sim.timeline import Timeline, Timer
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.messages import Member, World

SIGTERM, SIGKILL = 15, 9


class Parent(Protocol):
    """The launcher that a worker belongs to."""

    def worker_ended(self, worker: Worker, code: int, peer_loss: bool) -> None:
        """The worker is gone."""
        ...


@dataclass(slots=True, eq=False)
class Worker:
    """One process."""

    parent: Parent
    node: NodeId
    incarnation: Incarnation
    round: Round
    rank: Rank
    local_rank: int
    deaf: bool
    """Ignores SIGTERM."""
    alive: bool = True
    up: bool = False
    """Has connected to its peers."""
    frozen: bool = False
    done: bool = False
    """Its training is complete; it ends with status 0."""


class Training:
    """All workers of one round. Progress is kept on shared storage when the round breaks."""

    def __init__(self, job: TrainingJob, world: World) -> None:
        self.job = job
        self.world = world
        self.workers: dict[Rank, Worker] = {}
        self.broken = False
        self.hangs = job.rng.random() < 0.3
        """Peers of a dead worker hang (as NCCL does) instead of failing (as gloo does)."""
        self._since_s: float | None = None
        self._end: Timer | None = None

    def add(self, worker: Worker) -> None:
        """A worker process was created; it comes up after a while."""
        self.workers[worker.rank] = worker
        self.job.timeline.after(self.job.rng.uniform(0.02, 0.4), self._comes_up, worker)

    def _comes_up(self, worker: Worker) -> None:
        if worker.alive:
            worker.up = True
            if self.broken:
                self._suffer(worker)
            self.look()

    def look(self) -> None:
        """Go on when every worker is up, alive and not frozen; stand still otherwise."""
        able = len(self.workers) == self.world.size and all(
            worker.up and worker.alive and not worker.frozen for worker in self.workers.values()
        )
        if able and self._since_s is None and not self.broken:
            self._since_s = self.job.timeline.now_s
            self._end = self.job.timeline.after(self.job.left_s, self._complete)
        elif not able and self._since_s is not None:
            self.job.progress(self._since_s)
            self._since_s = None
            if self._end is not None:
                self._end.cancel()

    def shorten(self, left_s: float) -> None:
        """Be complete in at most this time, if it goes on as now."""
        if self._since_s is not None and self._end is not None:
            self.job.progress(self._since_s)
            self.job.left_s = min(self.job.left_s, left_s)
            self._since_s = self.job.timeline.now_s
            self._end.cancel()
            self._end = self.job.timeline.after(self.job.left_s, self._complete)

    def _complete(self) -> None:
        self.job.left_s = 0.0
        self._since_s = None
        for worker in self.workers.values():
            worker.done = True
            self.job.timeline.after(self.job.rng.uniform(0.0, 0.2), self.end, worker, 0)

    def end(self, worker: Worker, code: int, peer_loss: bool = False) -> None:
        """A worker process ends; unless its work was done, its peers feel it."""
        if not worker.alive or (worker.frozen and code != -SIGKILL):
            return
        worker.alive = False
        self.look()
        if not worker.done and not self.broken:
            self.broken = True
            for peer in self.workers.values():
                self._suffer(peer)
        worker.parent.worker_ended(worker, code, peer_loss)

    def _suffer(self, peer: Worker) -> None:
        if peer.alive and not self.hangs and not peer.done:
            self.job.timeline.after(self.job.rng.uniform(0.01, 1.0), self.end, peer, 1, True)

    def signal(self, worker: Worker, number: int) -> None:
        """A signal arrives."""
        if number == SIGKILL:
            self.job.timeline.after(0.001, self.end, worker, -SIGKILL)
        elif number == SIGTERM and not worker.deaf:
            self.job.timeline.after(self.job.rng.uniform(0.001, 0.1), self.end, worker, -SIGTERM)

    def freeze(self, worker: Worker) -> None:
        """SIGSTOP."""
        worker.frozen = True
        self.look()

    def thaw(self, worker: Worker) -> None:
        """SIGCONT."""
        worker.frozen = False
        if worker.alive and worker.done:
            self.job.timeline.after(0.01, self.end, worker, 0)
        elif worker.alive and self.broken:
            self._suffer(worker)
        self.look()


class TrainingJob:
    """What is to be computed, and how much of it is done."""

    def __init__(self, timeline: Timeline, rng: random.Random, total_s: float) -> None:
        self.timeline = timeline
        self.rng = rng
        self.left_s = total_s
        """Time a healthy world still needs."""
        self.rounds: dict[Round, Training] = {}
        self.started: Callable[[Worker, World], None] = lambda worker, world: None
        """Told of every worker that is created."""

    def shorten(self, left_s: float) -> None:
        """See that not much is left to do; what runs now ends as planned."""
        for training in self.rounds.values():
            training.shorten(left_s)
        self.left_s = min(self.left_s, left_s)

    def progress(self, since_s: float) -> None:
        """Work since then is kept, but for the last, interrupted step."""
        step_s = 0.25
        done_s = (self.timeline.now_s - since_s) // step_s * step_s
        self.left_s = max(0.0, self.left_s - done_s)

    def start(self, parent: Parent, world: World, member: Member) -> list[Worker]:
        """Create a node's workers."""
        training = self.rounds.setdefault(world.round, Training(self, world))
        workers = []
        for index in range(member.slots):
            rank = Rank(member.first_rank + index)
            deaf = self.rng.random() < 0.08
            worker = Worker(parent, member.node, member.incarnation, world.round, rank, index, deaf)
            self.started(worker, world)
            training.add(worker)
            workers.append(worker)
        return workers

    def training_of(self, worker: Worker) -> Training:
        """The round a worker belongs to."""
        return self.rounds[worker.round]

    def alive(self) -> list[Worker]:
        """All worker processes there are."""
        return [worker for training in self.rounds.values() for worker in training.workers.values() if worker.alive]
