"""Simulated independent workers: each has its own work and exits when that is done."""

from __future__ import annotations

import random  # noqa: TID251 - the simulator draws everything from one seeded generator
from collections.abc import Callable, Iterable

from edl.testing.sim.memory_checkpoints import Directory
from edl.testing.sim.timeline import ScheduledCall, Timeline
from edl.testing.sim.workers import SIGKILL, Job, Parent, RoundWorkers, SimWorker, Watcher
from edl.types import Incarnation, NodeId, Rank, Round
from edl.wire.local import ToWorker
from edl.wire.records import Member, World

Slot = tuple[NodeId, int]
SHORTEST_S = 0.05
"""Seconds that a process needs to find that the work of its slot is done already."""


class IndependentJob(Job):
    """A job of independent workers. A slot's progress outlives its process; the next process continues from it."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        watcher: Watcher,
        directory: Directory,
        total_s: float,
        world: Callable[[], World | None],
    ) -> None:
        """``world``: returns the recorded world."""
        super().__init__(timeline, rng, watcher, directory)
        self._total_s = total_s
        self._world = world
        self._left_s: dict[Slot, float] = {}
        self._since_s: dict[int, float] = {}
        """When each process started or resumed its work, by its ``id``."""
        self._ends: dict[int, ScheduledCall] = {}

    @property
    def left_s(self) -> float:
        """Seconds of work that the slots of the recorded world have left, at most."""
        world = self._world()
        members = world.members if world is not None else ()
        slots = [(member.node, index) for member in members for index in member.used]
        return max((self._left_s.get(slot, self._total_s) for slot in slots), default=self._total_s)

    @property
    def longest_s(self) -> float:
        """Seconds that a slot needs from the beginning."""
        return self._total_s + SHORTEST_S

    def group(self, number: Round) -> RoundWorkers | None:
        """Always ``None``: independent workers form no group."""
        return None

    def shorten(self, left_s: float) -> None:
        """Reduce the work that each slot has left to at most ``left_s`` seconds."""
        self._total_s = min(self._total_s, left_s)
        for worker in self.alive():
            self._stand_still(worker)
        for slot, left in self._left_s.items():
            self._left_s[slot] = min(left, left_s)
        for worker in self.alive():
            self._go_on(worker)

    def start(self, parent: Parent, world: World, member: Member, slots: Iterable[int]) -> list[SimWorker]:
        """Create a node's workers."""
        workers = []
        for slot in slots:
            rank = Rank(member.first_rank + member.used.index(slot))
            worker = SimWorker(
                parent, member.node, member.incarnation, world.round, slot, self.deaf(), world.round, rank
            )
            self.watcher.worker_started(worker, world)
            self._left_s.setdefault((member.node, slot), self._total_s)
            self.timeline.after(self.rng.uniform(0.02, 0.4), self._comes_up, worker)
            workers.append(worker)
        self.processes += workers
        return workers

    def _comes_up(self, worker: SimWorker) -> None:
        worker.up = True
        self._go_on(worker)

    def start_ahead(self, parent: Parent, owner: tuple[NodeId, Incarnation], born: Round, slot: int) -> SimWorker:
        """Fails: independent workers are never started ahead."""
        self.watcher.fail(f"{owner[0]} starts a worker ahead although workers are independent")
        raise AssertionError("unreachable")

    def give_place(self, worker: SimWorker, world: World) -> None:
        """Update a running worker's round and rank."""
        member = world.member(worker.node)
        assert member is not None  # noqa: S101 - the agent has looked
        worker.round, worker.rank = world.round, Rank(member.first_rank + member.used.index(worker.slot))
        self.watcher.placed(worker, world)

    def hear(self, worker: SimWorker, message: ToWorker) -> None:
        """Fails: independent workers receive no messages."""
        self.watcher.fail(f"{worker} gets {message} although workers are independent")

    def _go_on(self, worker: SimWorker) -> None:
        if worker.alive and worker.up and not worker.frozen and id(worker) not in self._ends:
            self._since_s[id(worker)] = self.timeline.now_s
            left_s = max(SHORTEST_S, self._left_s[worker.node, worker.slot])
            self._ends[id(worker)] = self.timeline.after(left_s, self._complete, worker)

    def _stand_still(self, worker: SimWorker) -> None:
        end = self._ends.pop(id(worker), None)
        if end is not None:
            end.cancel()
            done_s = self.timeline.now_s - self._since_s.pop(id(worker))
            slot = worker.node, worker.slot
            self._left_s[slot] = max(0.0, self._left_s[slot] - done_s)

    def _complete(self, worker: SimWorker) -> None:
        del self._ends[id(worker)], self._since_s[id(worker)]
        self._left_s[worker.node, worker.slot] = 0.0
        worker.done = True
        self.end(worker, 0)

    def end(self, worker: SimWorker, code: int, peer_loss: bool = False) -> None:
        """End a worker process."""
        if not worker.alive or (worker.frozen and code != -SIGKILL):
            return
        self._stand_still(worker)
        worker.alive = False
        worker.parent.worker_ended(worker, code, peer_loss)

    def freeze(self, worker: SimWorker) -> None:
        """Stop a worker as SIGSTOP does."""
        self._stand_still(worker)
        worker.frozen = True

    def thaw(self, worker: SimWorker) -> None:
        """Continue a worker as SIGCONT does."""
        worker.frozen = False
        self._go_on(worker)
