"""The dependencies of an agent's shell on a simulated node: processes, workers, their connections, ports and
checkpoints.

Each class replaces an adapter or the part of the agent that handles processes; see ``edl.agent.deps``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Protocol

from edl.agent.machine import events as ag
from edl.agent.workers.hang import Watched
from edl.testing.sim.memory_checkpoints import Directory, SimMemory
from edl.testing.sim.process import SimDeps, SimProcess
from edl.testing.sim.workers import SIGKILL, Parent, SimWorker
from edl.types import Round
from edl.wire import local
from edl.wire.messages import Asked, KeepWith, ServiceToWorker
from edl.wire.process_events import (
    ForkServerLost,
    ProcessEvent,
    WorkerExited,
    WorkerResumed,
    WorkersStopped,
    WorkerSuspended,
)
from edl.wire.purpose import Purpose
from edl.wire.records import Holding, NodeInfo, Version, World

REPORT_S = 0.001
"""Seconds from the end of a worker until its launcher is notified."""
SPAWN_S = 0.005
POLL_S = 1.0


class WorkerParent(Parent, Protocol):
    """The launcher, as ``SimWorkers`` and ``SimWorkerLink`` use it."""

    deps: SimDeps
    info: NodeInfo
    workers: list[SimWorker]
    lost: int
    """How often its fork server was killed."""

    def now_s(self) -> float:
        """Seconds on this host's own clock."""
        ...


class SimProcesses:
    """``edl.agent.deps.WorkerStarter``: a fork server, which keeps running while its launcher is stopped."""

    def __init__(self, process: SimProcess, warm_s: float, workers: Callable[[], Iterable[SimWorker]]) -> None:
        self._process = process
        self._warm_s = warm_s
        self._workers = workers
        self._happened: asyncio.Queue[ProcessEvent] = asyncio.Queue()
        self._until_s = float("inf")
        self.starts = 0
        """How often it was started."""

    async def warm(self) -> str:
        """Start the fork server."""
        self.starts += 1
        await asyncio.sleep(self._warm_s * self._process.deps.rng.uniform(0.5, 1.5))
        return "warm"

    async def events(self) -> AsyncIterator[ProcessEvent]:
        """Events of the workers, in order."""
        while True:
            yield await self._happened.get()

    def report(self, event: ProcessEvent) -> None:
        """Deliver an event to the launcher after ``REPORT_S``."""
        self._process.after(REPORT_S, self._happened.put_nowait, event)

    def entitle(self, until_s: float) -> None:
        """Workers may run until this time."""
        self._until_s = until_s
        self._process.deps.timeline.after(until_s - self._process.now_s(), self.silent, until_s)

    def silent(self, until_s: float) -> None:
        """Kill the workers if the launcher has not extended their time."""
        if not self._process.alive or until_s < self._until_s:
            return
        workers = [worker for worker in self._workers() if worker.alive]
        if workers:
            self._process.say("fork server: the launcher is silent")
            self.report(WorkersStopped("the launcher was silent"))
        for worker in workers:
            self._process.deps.training.end(worker, -SIGKILL)

    def started(self) -> None:
        """Note that workers were started: after their time, they end at once."""
        if self._process.now_s() >= self._until_s:
            self.silent(self._until_s)

    def lose(self) -> None:
        """Kill the fork server, and with it the workers it has started."""
        for worker in self._workers():
            if worker.alive:
                self._process.deps.checks.worker_failures += 1
                self._process.deps.training.end(worker, -SIGKILL)
        self.report(ForkServerLost("killed by SIGKILL"))


class SimWorkers:
    """``edl.agent.deps.Workers``: this node's workers of the simulated job."""

    def __init__(self, parent: WorkerParent, processes: SimProcesses) -> None:
        self._parent = parent
        self._processes = processes
        self._pids = itertools.count(1000)
        self._running: dict[int, SimWorker] = {}
        self._losses: set[int] = set()
        """Processes that ended because they lost a peer."""
        self.warn: Callable[[str], None] = lambda why: None
        self.worlds: dict[Round, World] = {}
        """Worlds in which seats were assigned, by round."""

    def meet_at(self, worker_server: str) -> None:
        """Does nothing: simulated workers reach their agent directly."""

    def warn_by(self, warn: Callable[[str], None]) -> None:
        """Set the function that is called when the disk is full, and with an empty string when it no longer is."""
        self.warn = warn

    async def start(self, world: World, slots: tuple[int, ...]) -> list[ag.WorkerEnded]:
        """Start workers of a world in these slots. Returns those killed with the fork server."""
        parent = self._parent
        member = world.member(parent.info.node)
        assert member is not None  # noqa: S101 - the machine starts only worlds it is in
        if not await self._spawns():
            return self._killed(world.round, slots)
        self._add(parent.deps.training.start(parent, world, member, slots))
        self._processes.started()
        return []

    async def start_ahead(self, born: Round, slots: tuple[int, ...], uses: tuple[int, ...]) -> list[ag.WorkerEnded]:
        """Start workers that wait for their world. Returns those killed with the fork server."""
        parent = self._parent
        if not await self._spawns():
            return self._killed(born, slots)
        owner = parent.info.node, parent.info.incarnation
        self._add([parent.deps.training.start_ahead(parent, owner, born, slot) for slot in slots])
        self._processes.started()
        return []

    async def _spawns(self) -> bool:
        """Whether the fork server survives until the workers are started."""
        lost = self._processes.starts, self._parent.lost
        await asyncio.sleep(SPAWN_S * self._parent.deps.rng.random())
        return lost == (self._processes.starts, self._parent.lost)

    def _killed(self, born: Round, slots: tuple[int, ...]) -> list[ag.WorkerEnded]:
        """Workers killed with the fork server while it starts them. They count as worker failures."""
        self._parent.deps.checks.worker_failures += len(slots)
        return [ag.WorkerEnded(born, slot, -SIGKILL) for slot in slots]

    def _add(self, workers: list[SimWorker]) -> None:
        taken = [worker.slot for worker in self._running.values() if worker.alive]
        for worker in workers:
            if worker.slot in taken:
                self._parent.deps.checks.fail(f"{worker.node} has two processes in slot {worker.slot}")
            self._running[next(self._pids)] = worker
        self._parent.workers = [*(one for one in self._parent.workers if one.alive), *workers]

    def seat(self, world: World, slot: int, secret: str) -> local.Seat:
        """The seat of a living worker in a world."""
        self.worlds[world.round] = world
        member = world.member(self._parent.info.node)
        assert member is not None  # noqa: S101 - as above
        rank, restore = member.first_rank + member.used.index(slot), world.restore
        return local.Seat(
            round=world.round,
            rank=rank,
            local_rank=member.used.index(slot),
            world_size=world.size,
            local_world_size=len(member.used),
            node=member.node,
            nodes=len(world.members),
            position=world.position(member.node),
            endpoints=(),
            master="",
            era=world.era,
            restore_era=restore.era,
            restore_commit=restore.commit,
            shards=world.shards,
            stored=world.stored,
            checkpoint_dir="",
            token=secret,
            settings=world.settings,
            slot=slot,
        )

    async def signal(self, number: int, slots: tuple[int, ...]) -> None:
        """Signal the living workers in these slots; with no slots, all."""
        for worker in list(self._running.values()):
            if worker.alive and (not slots or worker.slot in slots):
                self._parent.deps.training.signal(worker, number)

    async def forward(self, number: int) -> None:
        """Does nothing: simulated workers have no signal handlers."""

    async def dump_stacks(self) -> None:
        """Does nothing: simulated workers have no stacks."""

    def watched(self) -> dict[int, Watched]:
        """The pids of the workers, by slot."""
        return {worker.slot: Watched(pid, 0) for pid, worker in self._running.items()}

    def place(self, pid: int) -> tuple[Round, int] | None:
        """The round in which a process was started, and its slot."""
        worker = self._running.get(pid)
        return (worker.born, worker.slot) if worker is not None else None

    async def ended(self, pid: int, code: int) -> ag.WorkerEnded | None:
        """A process is gone."""
        worker = self._running.pop(pid, None)
        if worker is None:
            return None
        return ag.WorkerEnded(worker.born, worker.slot, code, peer_loss=pid in self._losses, pid=pid)

    async def done(self, limit_s: float) -> None:
        """Returns at once: there is no output to wait for."""

    # --- reported by the processes ------------------------------------------------------------------------------------

    def _pid(self, worker: SimWorker) -> int:
        return next(pid for pid, one in self._running.items() if one is worker)

    def worker_ended(self, worker: SimWorker, code: int, peer_loss: bool) -> None:
        """Report the exit of a worker process."""
        pid = self._pid(worker)
        if peer_loss:
            self._losses.add(pid)
        self._processes.report(WorkerExited(pid, code))

    def froze(self, worker: SimWorker) -> None:
        """Report that a worker was stopped."""
        self._processes.report(WorkerSuspended(self._pid(worker)))

    def thawed(self, worker: SimWorker) -> None:
        """Report that a stopped worker continues."""
        self._processes.report(WorkerResumed(self._pid(worker)))

    def alive(self, slots: tuple[int, ...] = ()) -> list[SimWorker]:
        """Living workers in these slots; with no slots, all."""
        return [one for one in self._running.values() if one.alive and (not slots or one.slot in slots)]


class SimWorkerLink:
    """``edl.agent.deps.WorkerLink``: the connections to this node's simulated workers."""

    def __init__(self, parent: WorkerParent, workers: SimWorkers) -> None:
        self._parent = parent
        self._workers = workers
        self.address = ""
        self.progress: dict[int, int] = {}
        self.newest: tuple[int, float] | None = None
        self.waits: dict[int, tuple[float, float]] = {}
        self.times: dict[int, local.StepTimes] = {}

    def open(self) -> None:
        """Does nothing: simulated workers need no listener."""

    def close(self) -> None:
        """Does nothing: workers end with their launcher."""

    def tell(self, message: local.ToWorker, slots: tuple[int, ...]) -> None:
        """Send a message to the workers in these slots."""
        for worker in self._workers.alive(slots) if slots else ():
            self._parent.deps.training.hear(worker, message)

    def pass_on(self, message: ServiceToWorker) -> None:
        """Deliver a message of a service of the Master."""
        for worker in self._workers.alive((message.slot,)):
            self._parent.deps.training.service_message(worker, message.service, message.body)

    def reattached(self, token: int) -> None:
        """Notify the workers that their messages to services may be lost."""
        for worker in self._workers.alive():
            self._parent.deps.training.service_message(worker, "", None)

    def give_place(self, slot: int, seat: local.Seat) -> None:
        """Send a waiting worker its seat."""
        for worker in self._workers.alive((slot,)):
            self._parent.deps.training.give_place(worker, self._workers.worlds[Round(seat.round)])

    def progressed(self, slot: int, commit: int) -> None:
        """Record a worker's newest commit."""
        self.progress[slot] = commit
        if self.newest is None or commit > self.newest[0]:
            self.newest = (commit, self._parent.now_s())


class SimPorts:
    """``edl.agent.deps.Ports``: numbers that were never used before."""

    def __init__(self, fresh: Callable[[int], tuple[int, ...]]) -> None:
        self._fresh = fresh
        self._ports: tuple[int, ...] = ()

    def ports(self, count: int) -> tuple[int, ...]:
        """The ports reserved for the next round."""
        if len(self._ports) != count:
            self._ports = self._fresh(count)
        return self._ports

    def use(self) -> None:
        """A round has started with the reserved ports; reserve others for the next one."""
        self._ports = ()

    def release(self) -> None:
        """Release the reserved ports."""
        self._ports = ()


class SimCheckpoints:
    """``edl.agent.deps.NodeCheckpoints`` on top of ``SimMemory``."""

    def __init__(self, memory: SimMemory) -> None:
        self._memory = memory
        self._rng = memory.net.rng

    @property
    def stored(self) -> tuple[Version, bool]:
        """Newest commit known to be complete in the checkpoint directory, and whether it is sharded."""
        return self._memory.stored

    @property
    def refused(self) -> str:
        """Why no checkpoint in the directory is usable; empty if one is or there is none."""
        return self._memory.refused

    @property
    def busy(self) -> bool:
        """Whether ``stored`` may be outdated."""
        return self._memory.busy

    @property
    def loading(self) -> bool:
        """Whether ``load`` is in progress."""
        return self._memory.loading

    async def settled(self) -> None:
        """Wait until ``busy`` is false."""
        while self._memory.busy:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(0.02)

    def holdings(self) -> tuple[Holding, ...]:
        """The shards in this node's memory."""
        return self._memory.holdings()

    def holders(self) -> int:
        """Not simulated."""
        return 0

    def enter(self, world: World) -> None:
        """A world that includes this node begins."""
        self._memory.enter(world)

    def keep_with(self, peer: KeepWith) -> None:
        """Send copies of commits to this node from now on."""
        self._memory.keep_with(peer)

    async def look(self) -> None:
        """Read which checkpoint in the directory is the newest."""
        self._memory.look()

    async def load(self) -> None:
        """Load the newest intact commit from the directory."""
        self._memory.loading = True
        try:
            await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        finally:
            self._memory.loading = False
        self._memory.load()

    async def write(self, version: Version, reason: str) -> None:
        """Write this node's shards of a commit if the directory has none as new."""
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        self._memory.flush(version)

    @property
    def saving(self) -> bool:
        """Whether this node has yet to write a commit that workers saved."""
        return self._memory.busy or self._memory.saving

    @property
    def unsaved(self) -> str:
        """Why the newest commit that workers saved is not in the directory, if this node is the writer."""
        return self._memory.unsaved

    async def flush_saves(self) -> str:
        """Retry and wait for the writes of saved commits; returns ``unsaved``."""
        self._memory.try_again()
        while self._memory.writing:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
        return self._memory.unsaved

    async def save_what_is_left(self, reason: str) -> None:
        """Write the newest commit before the launcher ends."""
        self._memory.save_what_is_left()


class SimSwitchFiles:
    """``edl.agent.switch_watch.SwitchFiles`` of the simulated checkpoint directory."""

    poll_s = POLL_S

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def poll(self) -> Collection[Asked]:
        """The pending request, if any. A request to end the job takes precedence, since it includes a save."""
        if self._directory.kill_asked:
            return [Asked(Purpose.KILL, self._directory.kill_asked)]
        return [Asked(Purpose.SAVE, self._directory.save_asked)] if self._directory.save_asked else []

    def clear_save(self) -> None:
        """Remove the pending save: a checkpoint was written."""
        self._directory.save_asked = ""
