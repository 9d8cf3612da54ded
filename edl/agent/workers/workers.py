"""The worker processes of one round on this node: environment, output and exits."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from edl.agent.machine.diagnosis import last_words
from edl.agent.machine.events import WorkerEnded
from edl.agent.workers.environment import LocalPaths, WorkerGroupDeps, ahead_environment, seat, worker_environment
from edl.agent.workers.hang import Watched
from edl.agent.workers.log_paths import Attempt, WorkerFiles
from edl.agent.workers.oom import OutOfMemory, was_killed
from edl.agent.workers.outputs import TIMEOUT_S, Output, Outputs
from edl.config import JobSpec, LogPlan
from edl.errors import StarterLost, WorkerStartError
from edl.ports import Processes
from edl.types import NodeId, Round
from edl.wire.local import AGENT_VARIABLE, Seat
from edl.wire.node_requests import OutputLines, OutputRequest, StacksRequest
from edl.wire.records import Member, World

CANNOT_START = 127
"""Exit status reported for a worker that could not be created, as a shell does for a missing program."""

_STACKS_BEGIN_S = 1.0
"""Seconds for a worker to start writing its stacks; shared by all workers of a dump."""
_STACKS_PAUSE_S = 0.05
"""A worker that has been silent for this many seconds has written all its stacks."""


SHORT_TIMEOUT_S = 0.1
"""Seconds to wait for a disk that did not answer the last time."""


@dataclass(slots=True)
class _Running:
    born: Round
    """Round in which, or after which, it was started; together with the slot it identifies the process."""
    slot: int
    output: Output
    pid: int = 0


class WorkerGroup:
    """Starts, signals and observes the workers of this node.

    A worker that lives through several rounds writes to the files of each.
    """

    def __init__(
        self,
        processes: Processes,
        spec: JobSpec,
        node: NodeId,
        environment: Mapping[str, str],
        logs: LogPlan,
        deps: WorkerGroupDeps,
        log: Callable[[str], None],
        wall_clock_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._processes = processes
        self._spec = spec
        self._node = node
        self._environment = dict(environment)
        # Independent workers keep the error file's path of their first round.
        self._outputs = Outputs(
            *(logs, node, self._environment, log), path_each_round=not spec.independent, wall_clock_s=wall_clock_s
        )
        self._deps = deps
        self._log = log
        self._wall_clock_s = wall_clock_s
        self._running: dict[int, _Running] = {}
        self._outputs.ask_busy(lambda: {one.output.files.attempt.folder for one in self._running.values()})
        self._memory = OutOfMemory()
        self._timeout_s = TIMEOUT_S
        self._stacks_lock = asyncio.Lock()

    def meet_at(self, worker_server: str) -> None:
        """Set the address at which workers find their agent."""
        self._environment[AGENT_VARIABLE] = worker_server

    def warn_by(self, warn: Callable[[str], None]) -> None:
        """``warn`` gets the reason when workers' output is not written to files, and an empty text when it is again."""
        self._outputs.warn_by(warn)

    async def start(self, world: World, slots: tuple[int, ...]) -> list[WorkerEnded]:
        """Start workers of a world in these slots; returns a ``WorkerEnded`` for each that could not be created."""
        uses = self._member(world).used
        self._outputs.met(self._spec.job, world)
        starting = (self._start_one(world.round, slot, uses, self._attempt(world, slot), world) for slot in slots)
        return await self._all_started(slots, starting, lambda worker: f"rank {worker.output.files.attempt.rank}")

    async def start_ahead(self, born: Round, slots: tuple[int, ...], uses: tuple[int, ...]) -> list[WorkerEnded]:
        """Start workers in these slots that wait for their world; returns a ``WorkerEnded`` for each that could not be
        created. ``uses``: all slots that the world is likely to use here."""
        starting = (self._start_one(born, slot, uses, Attempt(born, slot, ahead=True), None) for slot in slots)
        return await self._all_started(slots, starting, lambda worker: f"slot {worker.slot}, waiting for a world")

    async def _all_started(
        self,
        slots: tuple[int, ...],
        starting: Iterable[Awaitable[WorkerEnded | None]],
        what: Callable[[_Running], str],
    ) -> list[WorkerEnded]:
        """Wait until the workers of these slots are started, and log their processes, for debuggers and profilers."""
        failed = [end for end in await asyncio.gather(*starting) if end is not None]
        started = sorted((one for one in self._running.values() if one.slot in slots), key=lambda one: one.slot)
        if started:
            self._log("worker processes: " + ", ".join(f"{one.pid} ({what(one)})" for one in started))
        return failed

    def seat(self, world: World, slot: int, secret: str) -> Seat:
        """The place of a living worker in a world. Its further output goes to the files of that world's round."""
        worker = next((one for one in self._running.values() if one.slot == slot), None)
        attempt, uses = self._attempt(world, slot), self._member(world).used
        self._outputs.met(self._spec.job, world)
        if worker is None or worker.output.files.attempt == attempt:
            files = worker.output.files if worker is not None else WorkerFiles("", attempt)
            environment = self._worker_environment(world, slot, uses, files)
        else:
            files = self._outputs.files(attempt)
            environment = self._worker_environment(world, slot, uses, files)
            self._outputs.move(worker.output, files, environment)
        return seat(world, self._node, attempt.local_rank, environment, self._deps, secret)

    def _member(self, world: World) -> Member:
        member = world.member(self._node)
        assert member is not None  # noqa: S101 - the machine only starts worlds that this node is in
        return member

    def _attempt(self, world: World, slot: int) -> Attempt:
        member = self._member(world)
        local_rank = member.used.index(slot)
        return Attempt(world.round, local_rank, member.first_rank + local_rank, len(world.members))

    async def _start_one(
        self, born: Round, slot: int, uses: tuple[int, ...], attempt: Attempt, world: World | None
    ) -> WorkerEnded | None:
        files = self._outputs.files(attempt)
        environment = await self._outputs.backed_up(files, self._worker_environment(world, slot, uses, files))
        try:
            output = self._outputs.open(files, environment)
        except OSError as error:
            why = f"no pipe for its output: {error.strerror}. Raise the limit of open files (ulimit -n)"
            return WorkerEnded(born, slot, CANNOT_START, exception=why)
        worker = _Running(born, slot, output)
        try:
            streams = (output.stdout.write_fd, output.stderr.write_fd)
            cores = self._deps.cores[slot] if self._deps.cores else ()
            worker.pid = await self._processes.spawn(environment, *streams, uses.index(slot), cores)
        except WorkerStartError as error:
            output.close()
            code = -signal.SIGKILL if isinstance(error, StarterLost) else CANNOT_START
            return WorkerEnded(born, slot, code, exception=str(error))
        finally:
            output.stdout.close_write_end()
            output.stderr.close_write_end()
        self._running[worker.pid] = worker
        return None

    def _worker_environment(
        self, world: World | None, slot: int, uses: tuple[int, ...], files: WorkerFiles
    ) -> dict[str, str]:
        paths = LocalPaths(files.error_file, self._outputs.log_dir(files))
        base, deps = self._environment, self._deps
        if world is None:
            return ahead_environment(base, self._spec, self._node, uses, slot, paths, deps)
        return worker_environment(base, self._spec, world, self._node, uses.index(slot), paths, deps)

    async def signal(self, number: int, slots: tuple[int, ...]) -> None:
        """Signal the process groups of these workers, or of all if ``slots`` is empty."""
        for worker in list(self._running.values()):
            if not slots or worker.slot in slots:
                await self._processes.signal(worker.pid, number)

    async def forward(self, number: int) -> None:
        """Pass a signal on to each worker that has a handler for it."""
        for worker in list(self._running.values()):
            await self._processes.forward(worker.pid, number)

    def output(self, request: OutputRequest) -> OutputLines:
        """Recent output of the workers, those that have ended included."""
        return self._outputs.recent.read(request)

    async def stacks(self, request: StacksRequest) -> OutputLines:
        """The stacks of living workers: what these write to stderr while they dump them, which their logs get too."""
        async with self._stacks_lock:  # one caller would get the stacks of another
            before = self._outputs.recent.last
            await self.dump_stacks(request.ranks)
            found = self._outputs.recent.read(OutputRequest(request.ranks, after=before))
        return replace(found, lines=tuple(line for line in found.lines if line.stderr))

    async def dump_stacks(self, ranks: tuple[int, ...] = ()) -> None:
        """Have workers write the stacks of their threads to stderr, one after another; all of them if ``ranks`` is
        empty.

        Returns when they have, since the next signal may end them.
        """
        budget = _TimeBudget(_STACKS_BEGIN_S)
        for worker in sorted(self._running.values(), key=lambda worker: worker.slot):
            if ranks and worker.output.files.attempt.rank not in ranks:
                continue
            local_rank = worker.output.files.attempt.local_rank
            self._log(f"stacks of local rank {local_rank} (process {worker.pid}), in its stderr:")
            before = worker.output.stderr.received
            await self._processes.dump(worker.pid)
            while worker.output.stderr.received == before and await budget.wait():
                pass
            while worker.output.stderr.received != before and worker.pid in self._running:
                before = worker.output.stderr.received
                await asyncio.sleep(_STACKS_PAUSE_S)

    def watched(self) -> dict[int, Watched]:
        """The workers with a process, by slot, for the detection of hangs."""
        return {
            worker.slot: Watched(worker.pid, worker.output.stdout.received + worker.output.stderr.received)
            for worker in self._running.values()
        }

    def flight_recorder(self, pid: int) -> str:
        """Path for the content of a worker's flight recorder; empty: its files are not kept, or it is gone."""
        worker = self._running.get(pid)
        return worker.output.files.flight_recorder if worker is not None else ""

    def place(self, pid: int) -> tuple[Round, int] | None:
        """The round in which a process was started, and its slot; None if unknown."""
        worker = self._running.get(pid)
        return (worker.born, worker.slot) if worker else None

    async def done(self, limit_s: float) -> None:
        """Wait until the workers' output is in files, at most ``limit_s`` seconds."""
        if not await self._outputs.done(limit_s):
            self._log(f"the log disk has not answered for {limit_s:g} s: some of the workers' output is lost")

    async def ended(self, pid: int, code: int) -> WorkerEnded | None:
        """The event for a process that has ended, with its last output; None for an unknown process."""
        written = await self._last_error(pid) if code else ""
        worker = self._running.pop(pid, None)
        if worker is None:
            return None
        output = worker.output
        if not code:
            output.close()
            return WorkerEnded(worker.born, worker.slot, code)
        tail = output.stderr.tail()
        words = last_words(code, tail, written)
        output.close()
        starved = self._memory.look() if was_killed(code, words.exception) else ""
        return WorkerEnded(
            worker.born,
            worker.slot,
            code,
            "; ".join(text for text in (words.exception, starved) if text),
            words.traceback,
            tail,
            words.peer_loss,
            host=socket.gethostname(),
            pid=pid,
            time_s=self._wall_clock_s(),
            error_file=output.error_file if written else "",
        )

    async def _last_error(self, pid: int) -> str:
        """The worker's description of an uncaught exception, with a time limit, since its disk may hang; "" for
        none."""
        worker = self._running.get(pid)
        if worker is None or not worker.output.error_file:
            return ""
        written = await worker.output.last_error(self._timeout_s)
        self._timeout_s = TIMEOUT_S if written is not None else SHORT_TIMEOUT_S  # its peers wait in line
        return written or ""


class _TimeBudget:
    """A waiting time shared by several waits."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    async def wait(self) -> bool:
        """Wait a little; False when no time is left."""
        self._left_s -= _STACKS_PAUSE_S
        if self._left_s > 0:
            await asyncio.sleep(_STACKS_PAUSE_S)
        return self._left_s > 0
