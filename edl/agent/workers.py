"""The worker processes of one round on this node: their environments, their output, their ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edl.agent.diagnosis import last_words
from edl.agent.environment import Local, LocalPaths, ahead_environment, seat, worker_environment
from edl.agent.events import WorkerEnded
from edl.agent.hang import Watched
from edl.agent.logs import OutputStream, StreamPlan
from edl.config import JobSpec, LogPlan, StreamTarget
from edl.errors import WorkerStartError
from edl.ports import Processes
from edl.types import NodeId, Round
from edl.wire.local import AGENT_VARIABLE, Seat
from edl.wire.messages import World

CANNOT_START = 127
"""Exit status reported for a worker that could not be created; what a shell says for a missing program."""

_STACKS_BEGIN_S = 1.0
"""How long a worker may take to begin with its stacks, and all of them together beyond what they take to write."""
_STACKS_PAUSE_S = 0.05
"""A worker that has written nothing for so long is through with its stacks."""


@dataclass(slots=True)
class _Running:
    born: Round
    """Round into which, or after which, it was started; with the local rank it names the process."""
    local_rank: int
    error_file: Path
    stdout: OutputStream
    stderr: OutputStream
    pid: int = 0


class WorkerGroup:
    """Starts, signals and describes the workers of this node.

    A worker's output goes where it went at its start, through all worlds that it lives to see.
    """

    def __init__(
        self,
        processes: Processes,
        spec: JobSpec,
        node: NodeId,
        environment: Mapping[str, str],
        logs: LogPlan,
        around: Local,
        slots: int,
        log: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._spec = spec
        self._node = node
        self._environment = dict(environment)
        self._logs = logs
        self._around = around
        self._slots = slots
        self._log = log
        self._running: dict[int, _Running] = {}

    def meet_at(self, desk: str) -> None:
        """Where workers find their agent."""
        self._environment[AGENT_VARIABLE] = desk

    async def start(self, world: World, local_ranks: tuple[int, ...]) -> list[WorkerEnded]:
        """Start workers of a world; returns an end for each that could not be created."""
        member = world.member(self._node)
        assert member is not None  # noqa: S101 - the machine starts only worlds it is in
        folder, first = f"attempt_{world.round - 1}", member.first_rank
        ends = await asyncio.gather(
            *(self._start_one(world.round, rank, folder, f"[default{first + rank}]:", world) for rank in local_ranks)
        )
        return [end for end in ends if end is not None]

    async def start_ahead(self, born: Round, local_ranks: tuple[int, ...]) -> list[WorkerEnded]:
        """Start workers that wait for their world; returns an end for each that could not be created."""
        folder = f"attempt_{born}_ahead"
        ends = await asyncio.gather(
            *(self._start_one(born, rank, folder, f"[{self._node}/{rank}]:", None) for rank in local_ranks)
        )
        return [end for end in ends if end is not None]

    def seat(self, world: World, local_rank: int, secret: str) -> Seat:
        """The place of a worker that lives."""
        worker = next((one for one in self._running.values() if one.local_rank == local_rank), None)
        folder = worker.error_file.parent if worker is not None else Path()
        paths = LocalPaths(str(folder / "error.json"), str(folder))
        environment = worker_environment(
            self._environment, self._spec, world, self._node, local_rank, paths, self._around.gpus
        )
        return seat(world, self._node, local_rank, environment, self._around, secret)

    async def _start_one(
        self, born: Round, local_rank: int, attempt: str, prefix: str, world: World | None
    ) -> WorkerEnded | None:
        folder = Path(self._logs.folder) / attempt / str(local_rank)
        try:
            stdout = OutputStream(self._plan(prefix, local_rank, folder, "stdout"), self._log)
            try:
                stderr = OutputStream(self._plan(prefix, local_rank, folder, "stderr"), self._log)
            except OSError:
                stdout.close()
                raise
        except OSError as error:
            why = f"no pipe for its output: {error.strerror}. Raise the limit of open files (ulimit -n)"
            return WorkerEnded(born, local_rank, CANNOT_START, exception=why)
        worker = _Running(born, local_rank, folder / "error.json", stdout, stderr)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._log(f"cannot make the log folder {folder} ({error.strerror}): training goes on without it")
        environment = self._worker_environment(world, local_rank, LocalPaths(str(worker.error_file), str(folder)))
        try:
            worker.pid = await self._processes.spawn(environment, worker.stdout.write_fd, worker.stderr.write_fd)
        except WorkerStartError as error:
            self._close(worker)
            return WorkerEnded(born, local_rank, CANNOT_START, exception=str(error))
        finally:
            worker.stdout.close_write_end()
            worker.stderr.close_write_end()
        self._running[worker.pid] = worker
        return None

    def _worker_environment(self, world: World | None, local_rank: int, paths: LocalPaths) -> dict[str, str]:
        if world is None:
            slots, gpus = self._slots, self._around.gpus
            return ahead_environment(self._environment, self._spec, self._node, slots, local_rank, paths, gpus)
        return worker_environment(
            self._environment, self._spec, world, self._node, local_rank, paths, self._around.gpus
        )

    def _plan(self, prefix: str, local_rank: int, folder: Path, name: str) -> StreamPlan:
        target = self._logs.stdout(local_rank) if name == "stdout" else self._logs.stderr(local_rank)
        console: BinaryIO = sys.stdout.buffer if name == "stdout" else sys.stderr.buffer
        return StreamPlan(
            console=console if target is not StreamTarget.FILE else None,
            prefix=prefix.encode() if target is StreamTarget.BOTH else b"",
            file=None if target is StreamTarget.CONSOLE else folder / f"{name}.log",
        )

    async def signal(self, number: int, local_ranks: tuple[int, ...]) -> None:
        """Signal the process groups of these workers, or of all when none is named."""
        for worker in list(self._running.values()):
            if not local_ranks or worker.local_rank in local_ranks:
                await self._processes.signal(worker.pid, number)

    async def dump_stacks(self) -> None:
        """Have every worker write the stacks of its threads to its standard error, one after the other.

        Returns when they have: whatever is signalled next may end them.
        """
        patience = _Patience(_STACKS_BEGIN_S)
        for worker in sorted(self._running.values(), key=lambda worker: worker.local_rank):
            self._log(f"stacks of local rank {worker.local_rank} (process {worker.pid}), in its standard error:")
            before = worker.stderr.received
            await self._processes.dump(worker.pid)
            while worker.stderr.received == before and await patience.wait():
                pass
            while worker.stderr.received != before and worker.pid in self._running:
                before = worker.stderr.received
                await asyncio.sleep(_STACKS_PAUSE_S)

    def watched(self) -> dict[int, Watched]:
        """The workers that have a process, by local rank, for whoever looks for hangs."""
        return {
            worker.local_rank: Watched(worker.pid, worker.stdout.received + worker.stderr.received)
            for worker in self._running.values()
        }

    def place(self, pid: int) -> tuple[Round, int] | None:
        """Which process of which slot this is: the round it was born in, and its local rank."""
        worker = self._running.get(pid)
        return (worker.born, worker.local_rank) if worker else None

    def ended(self, pid: int, code: int) -> WorkerEnded | None:
        """A process is gone: what it left behind."""
        worker = self._running.pop(pid, None)
        if worker is None:
            return None
        tail = worker.stderr.tail() if code else ""
        words = last_words(code, tail, _read(worker.error_file) if code else "")
        self._close(worker)
        return WorkerEnded(
            worker.born, worker.local_rank, code, words.exception, words.traceback, tail, words.peer_loss
        )

    def _close(self, worker: _Running) -> None:
        worker.stdout.close()
        worker.stderr.close()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class _Patience:
    """A time to wait that all share."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    async def wait(self) -> bool:
        """Wait a little; False when there is no time left."""
        self._left_s -= _STACKS_PAUSE_S
        if self._left_s > 0:
            await asyncio.sleep(_STACKS_PAUSE_S)
        return self._left_s > 0
