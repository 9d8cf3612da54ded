"""Dependencies of an agent's shell on a simulated node: processes, workers, their connections, ports and checkpoints.

Each class stands for an adapter, or for the room of the agent that talks to processes; see ``edl.agent.deps``.
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
from edl.wire.messages import Asked, Holding, KeepWith, NodeInfo, Purpose, ServiceToWorker, Version, World
from edl.wire.process_events import (
    ForkServerLost,
    ProcessEvent,
    WorkerExited,
    WorkerResumed,
    WorkersStopped,
    WorkerSuspended,
)

REPORT_S = 0.001
"""From the end of a worker until its launcher hears of it."""
SPAWN_S = 0.005
POLL_S = 1.0


class WorkerParent(Parent, Protocol):
    """The launcher, as its workers' room needs it."""

    deps: SimDeps
    info: NodeInfo
    workers: list[SimWorker]
    lost: int
    """How often its fork server was lost."""

    def now_s(self) -> float:
        """Seconds on this host's own clock."""
        ...


class SimProcesses:
    """``edl.agent.deps.WorkerStarter``: a fork server that lives beside the launcher, and does not freeze with it."""

    def __init__(self, process: SimProcess, warm_s: float, workers: Callable[[], Iterable[SimWorker]]) -> None:
        self._process = process
        self._warm_s = warm_s
        self._workers = workers
        self._happened: asyncio.Queue[ProcessEvent] = asyncio.Queue()
        self._until_s = float("inf")
        self.starts = 0
        """How often it has been started."""

    async def warm(self) -> str:
        """Bring it up."""
        self.starts += 1
        await asyncio.sleep(self._warm_s * self._process.deps.rng.uniform(0.5, 1.5))
        return "warm"

    async def events(self) -> AsyncIterator[ProcessEvent]:
        """Events of the workers, in order."""
        while True:
            yield await self._happened.get()

    def report(self, event: ProcessEvent) -> None:
        """Something has happened; the launcher hears soon."""
        self._process.after(REPORT_S, self._happened.put_nowait, event)

    def entitle(self, until_s: float) -> None:
        """Workers may run until then."""
        self._until_s = until_s
        self._process.deps.timeline.after(until_s - self._process.now_s(), self.silent, until_s)

    def silent(self, until_s: float) -> None:
        """The time has come up to which workers may run without a word from their launcher."""
        if not self._process.alive or until_s < self._until_s:
            return
        workers = [worker for worker in self._workers() if worker.alive]
        if workers:
            self._process.say("fork server: the launcher is silent")
            self.report(WorkersStopped("the launcher was silent"))
        for worker in workers:
            self._process.deps.training.end(worker, -SIGKILL)

    def lose(self) -> None:
        """The fork server is killed; what it had started dies with it."""
        for worker in self._workers():
            if worker.alive:
                self._process.deps.checks.worker_failures += 1
                self._process.deps.training.end(worker, -SIGKILL)
        self.report(ForkServerLost("killed by SIGKILL"))


class SimWorkers:
    """``edl.agent.deps.Workers``: this node's part of the simulated job."""

    def __init__(self, parent: WorkerParent, processes: SimProcesses) -> None:
        self._parent = parent
        self._processes = processes
        self._pids = itertools.count(1000)
        self._running: dict[int, SimWorker] = {}
        self._losses: set[int] = set()
        """Processes that ended because they had lost a peer."""
        self.warn: Callable[[str], None] = lambda why: None
        self.worlds: dict[Round, World] = {}
        """Worlds in which seats were assigned, by round."""

    def meet_at(self, worker_server: str) -> None:
        """Workers find their agent by themselves here."""

    def warn_by(self, warn: Callable[[str], None]) -> None:
        """``warn`` hears of a full disk, and that there is room again."""
        self.warn = warn

    async def start(self, world: World, slots: tuple[int, ...]) -> list[ag.WorkerEnded]:
        """Start workers of a world in these slots."""
        parent = self._parent
        member = world.member(parent.info.node)
        assert member is not None  # noqa: S101 - the machine starts only worlds it is in
        if not await self._spawns():
            return self._killed(world.round, slots)
        self._add(parent.deps.training.start(parent, world, member, slots))
        return []

    async def start_ahead(self, born: Round, slots: tuple[int, ...], uses: tuple[int, ...]) -> list[ag.WorkerEnded]:
        """Start workers that wait for their world."""
        parent = self._parent
        if not await self._spawns():
            return self._killed(born, slots)
        owner = parent.info.node, parent.info.incarnation
        self._add([parent.deps.training.start_ahead(parent, owner, born, slot) for slot in slots])
        return []

    async def _spawns(self) -> bool:
        """Whether the fork server lives until the workers are there."""
        lost = self._processes.starts, self._parent.lost
        await asyncio.sleep(SPAWN_S * self._parent.deps.rng.random())
        return lost == (self._processes.starts, self._parent.lost)

    def _killed(self, born: Round, slots: tuple[int, ...]) -> list[ag.WorkerEnded]:
        """Workers that die with the fork server while it starts them: failures like any other."""
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
        """The place of a worker that lives."""
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
        """Signal these workers, or all."""
        for worker in list(self._running.values()):
            if worker.alive and (not slots or worker.slot in slots):
                self._parent.deps.training.signal(worker, number)

    async def forward(self, number: int) -> None:
        """No worker here has a handler."""

    async def dump_stacks(self) -> None:
        """There are no stacks here."""

    def watched(self) -> dict[int, Watched]:
        """The workers that have a process."""
        return {worker.slot: Watched(pid, 0) for pid, worker in self._running.items()}

    def place(self, pid: int) -> tuple[Round, int] | None:
        """The round a process was born in, and its slot."""
        worker = self._running.get(pid)
        return (worker.born, worker.slot) if worker is not None else None

    async def ended(self, pid: int, code: int) -> ag.WorkerEnded | None:
        """A process is gone."""
        worker = self._running.pop(pid, None)
        if worker is None:
            return None
        return ag.WorkerEnded(worker.born, worker.slot, code, peer_loss=pid in self._losses, pid=pid)

    async def done(self, limit_s: float) -> None:
        """Output is always written here."""

    # --- what the simulated processes tell -----------------------------------------------------------------------

    def _pid(self, worker: SimWorker) -> int:
        return next(pid for pid, one in self._running.items() if one is worker)

    def worker_ended(self, worker: SimWorker, code: int, peer_loss: bool) -> None:
        """The kernel tells the fork server."""
        pid = self._pid(worker)
        if peer_loss:
            self._losses.add(pid)
        self._processes.report(WorkerExited(pid, code))

    def froze(self, worker: SimWorker) -> None:
        """A worker was stopped."""
        self._processes.report(WorkerSuspended(self._pid(worker)))

    def thawed(self, worker: SimWorker) -> None:
        """A stopped worker goes on."""
        self._processes.report(WorkerResumed(self._pid(worker)))

    def alive(self, slots: tuple[int, ...] = ()) -> list[SimWorker]:
        """Live workers, in these slots or in any."""
        return [one for one in self._running.values() if one.alive and (not slots or one.slot in slots)]


class SimWorkerLink:
    """``edl.agent.deps.WorkerLink``: reaches the workers of the simulated job."""

    def __init__(self, parent: WorkerParent, workers: SimWorkers) -> None:
        self._parent = parent
        self._workers = workers
        self.address = ""
        self.progress: dict[int, int] = {}
        self.newest: tuple[int, float] | None = None

    def open(self) -> None:
        """Accept connections."""

    def close(self) -> None:
        """Workers end with their launcher anyway."""

    def tell(self, message: local.ToWorker, slots: tuple[int, ...]) -> None:
        """Send to these workers."""
        for worker in self._workers.alive(slots) if slots else ():
            self._parent.deps.training.hear(worker, message)

    def pass_on(self, message: ServiceToWorker) -> None:
        """A service of the Master says something to a worker."""
        for worker in self._workers.alive((message.slot,)):
            self._parent.deps.training.service_message(worker, message.service, message.body)

    def reattached(self, token: int) -> None:
        """Report to workers that their messages to services may have been lost."""
        for worker in self._workers.alive():
            self._parent.deps.training.service_message(worker, "", None)

    def give_place(self, slot: int, seat: local.Seat) -> None:
        """Send a waiting worker its place."""
        for worker in self._workers.alive((slot,)):
            self._parent.deps.training.give_place(worker, self._workers.worlds[Round(seat.round)])

    def progressed(self, slot: int, commit: int) -> None:
        """A worker has committed."""
        self.progress[slot] = commit
        if self.newest is None or commit > self.newest[0]:
            self.newest = (commit, self._parent.now_s())


class SimPorts:
    """``edl.agent.deps.Ports``: numbers that have not been used before."""

    def __init__(self, fresh: Callable[[int], tuple[int, ...]]) -> None:
        self._fresh = fresh
        self._ports: tuple[int, ...] = ()

    def ports(self, count: int) -> tuple[int, ...]:
        """The ports reserved for the next round."""
        if len(self._ports) != count:
            self._ports = self._fresh(count)
        return self._ports

    def use(self) -> None:
        """A round has started with these."""
        self._ports = ()

    def release(self) -> None:
        """Give them back."""
        self._ports = ()


class SimCheckpoints:
    """``edl.agent.deps.NodeCheckpoints`` over simulated in-memory checkpoints."""

    def __init__(self, memory: SimMemory) -> None:
        self._memory = memory
        self._rng = memory.net.rng

    @property
    def stored(self) -> tuple[Version, bool]:
        """Newest commit known to lie complete in the checkpoint directory, and whether it lies in shards."""
        return self._memory.stored

    @property
    def refused(self) -> str:
        """Why none of the checkpoints that lie there can be used."""
        return self._memory.refused

    @property
    def busy(self) -> bool:
        """Whether something that workers have written is still being looked at."""
        return self._memory.busy

    async def settled(self) -> None:
        """Until that is over."""
        while self._memory.busy:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(0.02)

    def holdings(self) -> tuple[Holding, ...]:
        """The commits in this node's memory."""
        return self._memory.holdings()

    def enter(self, world: World) -> None:
        """A world begins in which this node has a part."""
        self._memory.enter(world)

    def keep_with(self, peer: KeepWith) -> None:
        """Where copies of commits go from now on."""
        self._memory.keep_with(peer)

    async def look(self) -> None:
        """See what lies in the checkpoint directory."""
        self._memory.look()

    async def load(self) -> None:
        """Read the newest usable commit from there."""
        self._memory.loading = True
        try:
            await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        finally:
            self._memory.loading = False
        self._memory.load()

    async def write(self, version: Version, reason: str) -> None:
        """Write what is here of a commit, if that is newer than what is there."""
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        self._memory.flush(version)

    @property
    def saving(self) -> bool:
        """Whether something that workers have saved has yet to be written by this node."""
        return self._memory.busy or self._memory.saving

    @property
    def unsaved(self) -> str:
        """Why the newest commit that workers have saved is not in the checkpoint directory, if this node writes."""
        return self._memory.unsaved

    async def flush_saves(self) -> str:
        """Wait until what workers have saved is written, or cannot be."""
        self._memory.try_again()
        while self._memory.writing:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
        return self._memory.unsaved

    async def save_what_is_left(self, reason: str) -> None:
        """Before the launcher ends: bring the newest commit where it survives."""
        self._memory.save_what_is_left()


class SimSwitchFiles:
    """``edl.agent.switch_watch.SwitchFiles``: the switches of the simulated checkpoint directory."""

    poll_s = POLL_S

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def poll(self) -> Collection[Asked]:
        """The current requests."""
        if self._directory.kill_asked:
            return [Asked(Purpose.KILL, self._directory.kill_asked)]
        return [Asked(Purpose.SAVE, self._directory.save_asked)] if self._directory.save_asked else []

    def clear_save(self) -> None:
        """A checkpoint was written."""
        self._directory.save_asked = ""
