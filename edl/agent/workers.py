"""The worker processes of one round on this node: their environments, their output, their ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edl.agent.diagnosis import last_words
from edl.agent.environment import LocalPaths, worker_environment
from edl.agent.events import WorkerEnded
from edl.agent.logs import OutputStream, StreamPlan
from edl.config import JobSpec, LogPlan, StreamTarget
from edl.errors import WorkerStartError
from edl.ports import Processes
from edl.types import NodeId, Round
from edl.wire.messages import World

CANNOT_START = 127
"""Exit status reported for a worker that could not be created; what a shell says for a missing program."""


@dataclass(slots=True)
class _Running:
    round: Round
    local_rank: int
    error_file: Path
    stdout: OutputStream
    stderr: OutputStream
    pid: int = 0


class WorkerGroup:
    """Starts, signals and describes the workers of this node."""

    def __init__(
        self,
        processes: Processes,
        spec: JobSpec,
        node: NodeId,
        environment: Mapping[str, str],
        logs: LogPlan,
        gpus: int,
        log: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._spec = spec
        self._node = node
        self._environment = environment
        self._logs = logs
        self._gpus = gpus
        self._log = log
        self._running: dict[int, _Running] = {}

    async def start(self, world: World) -> list[WorkerEnded]:
        """Start this node's workers; returns an end for each that could not be created."""
        member = world.member(self._node)
        assert member is not None  # noqa: S101 - the machine starts only worlds it is in
        ends = await asyncio.gather(*(self._start_one(world, local_rank) for local_rank in range(member.slots)))
        return [end for end in ends if end is not None]

    async def _start_one(self, world: World, local_rank: int) -> WorkerEnded | None:
        folder = Path(self._logs.folder) / f"attempt_{world.round - 1}" / str(local_rank)
        try:
            stdout = OutputStream(self._plan(world, local_rank, folder, "stdout"), self._log)
            try:
                stderr = OutputStream(self._plan(world, local_rank, folder, "stderr"), self._log)
            except OSError:
                stdout.close()
                raise
        except OSError as error:
            why = f"no pipe for its output: {error.strerror}. Raise the limit of open files (ulimit -n)"
            return WorkerEnded(world.round, local_rank, CANNOT_START, exception=why)
        worker = _Running(world.round, local_rank, folder / "error.json", stdout, stderr)
        paths = LocalPaths(str(worker.error_file), str(folder))
        environment = worker_environment(
            self._environment, self._spec, world, self._node, local_rank, paths, self._gpus
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._log(f"cannot make the log folder {folder} ({error.strerror}): training goes on without it")
        try:
            worker.pid = await self._processes.spawn(environment, worker.stdout.write_fd, worker.stderr.write_fd)
        except WorkerStartError as error:
            self._close(worker)
            return WorkerEnded(world.round, local_rank, CANNOT_START, exception=str(error))
        finally:
            worker.stdout.close_write_end()
            worker.stderr.close_write_end()
        self._running[worker.pid] = worker
        return None

    def _plan(self, world: World, local_rank: int, folder: Path, name: str) -> StreamPlan:
        target = self._logs.stdout(local_rank) if name == "stdout" else self._logs.stderr(local_rank)
        console: BinaryIO = sys.stdout.buffer if name == "stdout" else sys.stderr.buffer
        member = world.member(self._node)
        rank = (member.first_rank if member else 0) + local_rank
        return StreamPlan(
            console=console if target is not StreamTarget.FILE else None,
            prefix=f"[default{rank}]:".encode() if target is StreamTarget.BOTH else b"",
            file=None if target is StreamTarget.CONSOLE else folder / f"{name}.log",
        )

    async def signal(self, number: int, local_ranks: tuple[int, ...]) -> None:
        """Signal the process groups of these workers, or of all when none is named."""
        for worker in list(self._running.values()):
            if not local_ranks or worker.local_rank in local_ranks:
                await self._processes.signal(worker.pid, number)

    def place(self, pid: int) -> tuple[Round, int] | None:
        """Round and local rank of a process."""
        worker = self._running.get(pid)
        return (worker.round, worker.local_rank) if worker else None

    def ended(self, pid: int, code: int) -> WorkerEnded | None:
        """A process is gone: what it left behind."""
        worker = self._running.pop(pid, None)
        if worker is None:
            return None
        tail = worker.stderr.tail() if code else ""
        words = last_words(code, tail, _read(worker.error_file) if code else "")
        self._close(worker)
        return WorkerEnded(
            worker.round, worker.local_rank, code, words.exception, words.traceback, tail, words.peer_loss
        )

    def _close(self, worker: _Running) -> None:
        worker.stdout.close()
        worker.stderr.close()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
