"""One job on simulated nodes: start, watch, inject faults, and clean up, all within deadlines."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from benchmarks.common import processes
from benchmarks.common.launchers import REPOSITORY, Driven, JobPlan, Launcher, Meeting
from benchmarks.common.outside import service
from benchmarks.common.steps import StepReader, World

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
POLL_S = 0.05
"""Seconds between two reads of the logs. The measured times are in the logs, so this adds nothing to them."""
STEPS = 20_000
"""More steps than any run needs, but few enough that an abandoned job ends within minutes."""
NEEDED_EVEN_ALONE = (Meeting.LIGHTHOUSE, Meeting.HEAD)
"""Services without which not even a job of one node starts."""
T = TypeVar("T")


class NotReached(Exception):
    """The awaited state was not reached: the deadline passed, or all processes that could reach it have ended."""


class Job:
    """Launcher processes of one job. As a context manager it leaves no process behind, even after an exception."""

    def __init__(
        self,
        launcher: Launcher,
        plan: JobPlan,
        run: str = "",
        patience: float = 1.0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.launcher = launcher
        self.plan = plan
        self.variables = variables or {}
        self.run = run or uuid.uuid4().hex
        self.patience = patience
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.driver: subprocess.Popen[bytes] | None = None
        self.steps = StepReader(plan.folder / "steps")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, node: int) -> float:
        """Start the launcher of one node, and with the first one the driver if there is one; returns the monotonic time
        just before."""
        log = self.plan.folder / f"launcher{node}.log"
        begun_s = time.monotonic()
        self.nodes[node] = self._start(self.launcher.command(self.plan, node), node, log)
        if self.driver is None and isinstance(self.launcher, Driven):
            self.driver = self._start(self.launcher.driver(self.plan), processes.OUTSIDE, self._driver_log)
        return begun_s

    @property
    def _driver_log(self) -> Path:
        return self.plan.folder / "driver.log"

    def _start(self, command: list[str], node: int, log: Path) -> subprocess.Popen[bytes]:
        env = processes.clean_environment(
            {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": str(REPOSITORY),
                **self.launcher.environment(self.plan, node),
                **self.variables,
                **processes.marks(self.run, node),
            }
        )
        folder = self.plan.working_folder(node)
        folder.mkdir(exist_ok=True)
        return processes.start(command, env, log, folder)

    def wait(self, look: Callable[[], T | None], what: str, within_s: float | None = None) -> T:
        """Poll the step logs until ``look`` returns a result. Raises ``NotReached``."""
        limit_s = within_s or self.launcher.deadline_s * self.patience
        deadline_s = time.monotonic() + limit_s
        while True:
            ended = self._ended()
            self.steps.poll()
            result = look()
            if result is not None:
                return result
            if ended:
                raise NotReached(f"{what}: {ended}; {self._last_words()}")
            if time.monotonic() > deadline_s:
                raise NotReached(f"{what}: not within {limit_s:g} s")
            time.sleep(POLL_S)

    def _ended(self) -> str:
        """Whether nothing can come any more, since every launcher or the driver has ended; empty if not."""
        launchers = [process.poll() for process in self.nodes.values()]
        if None not in launchers:
            return f"every launcher has ended ({', '.join(map(str, launchers))})"
        status = None if self.driver is None else self.driver.poll()
        return "" if status is None else f"the driver has ended ({status})"

    def _last_words(self) -> str:
        """The last line of the driver's or the first launcher's log, for the note under the table."""
        log = self.plan.folder / f"launcher{min(self.nodes)}.log" if self.driver is None else self._driver_log
        text = log.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"the first one's last line: {lines[-1][:200]}" if lines else "the first one said nothing"

    def wait_running(self, size: int, steps: int = 15) -> World:
        """Wait until the newest world has ``size`` ranks that have all completed ``steps`` steps. Raises
        ``NotReached``."""

        def running() -> World | None:
            world = self.steps.newest()
            return world if world is not None and world.size == size and world.every_rank(steps) else None

        return self.wait(running, f"a running world of {size}")

    def wait_next(self, after_s: float, size: int, least: int = 0) -> World:
        """Wait for the first world of ``size`` ranks (or of ``least`` to ``size``) formed after a given time, in which
        all ranks have completed a step. Raises ``NotReached``."""
        return self.wait(lambda: self.steps.formed_after(after_s, size, least), f"a new world of {least or size}")

    def kill_node(self, node: int) -> float:
        """SIGKILL launcher, workers and helpers of a node; returns the monotonic time just before."""
        return processes.send_all(self.run, signal.SIGKILL, node)

    def freeze_node(self, node: int) -> float:
        """SIGSTOP all processes of a node: its connections stay open, but it no longer answers."""
        return processes.send_all(self.run, signal.SIGSTOP, node)

    def drain_node(self, node: int) -> float:
        """SIGTERM to a node's launcher, which then leaves gracefully; returns the monotonic time just before."""
        begun_s = time.monotonic()
        self.nodes[node].terminate()
        return begun_s

    def kill_worker(self, pid: int) -> float:
        """SIGKILL one worker by the pid that it logged, if that process belongs to this run."""
        for found in processes.find(self.run):
            if found.pid == pid:
                begun_s = time.monotonic()
                processes.send(found, signal.SIGKILL)
                return begun_s
        raise NotReached(f"worker {pid} is not running")

    def kill_outside(self) -> float:
        """SIGKILL the service that runs outside the nodes; returns the monotonic time just before."""
        return processes.send_all(self.run, signal.SIGKILL, processes.OUTSIDE)

    def close(self) -> None:
        """SIGKILL everything of this run and reap the launchers."""
        left = processes.end_run(self.run)
        for process in (*self.nodes.values(), *([self.driver] if self.driver else [])):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)
        if left:
            raise RuntimeError(f"processes that SIGKILL did not end: {left}")


@contextlib.contextmanager
def launch(
    launcher: Launcher,
    script: str,
    nodes: tuple[int, int],
    *,
    workers_per_node: int = 1,
    alone: bool = False,
    etcd_members: int = 1,
    arguments: tuple[str, ...] = (),
    keep: Path | None = None,
    first_nodes: int = 1,
    patience: float = 1.0,
    own_folders: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """A job whose nodes can be started, in a fresh folder and with a private store if it needs one. ``arguments``: more
    of them for the script. ``keep``: a folder for the logs of the run; without it they are deleted. ``first_nodes``:
    see ``JobPlan``. ``patience``: a factor for the launcher's deadline, above 1 on a busy machine.
    ``own_folders``: see ``JobPlan``. ``variables``: more of the environment. In ``arguments`` and ``variables``,
    ``{folder}`` is the folder of the run."""
    folder = Path(tempfile.mkdtemp(prefix=f"edl-bench-{launcher.name}-", dir=keep))
    try:
        with contextlib.ExitStack() as stack:
            endpoint, run = "", uuid.uuid4().hex
            if launcher.meeting in NEEDED_EVEN_ALONE or not alone:
                outside = service(launcher, run, etcd_members)
                own_store = own_store_endpoint(launcher, nodes[1])
                endpoint = stack.enter_context(outside).address if outside else own_store
            filled = [word.replace("{folder}", str(folder)) for word in arguments]
            plan = JobPlan(
                job_id=f"bench-{uuid.uuid4().hex[:8]}",
                nodes=nodes,
                workers_per_node=workers_per_node,
                endpoint=endpoint,
                script=SCRIPTS / script,
                script_arguments=("--workdir", str(folder), "--steps", str(STEPS), *filled),
                folder=folder,
                first_nodes=first_nodes,
                own_folders=own_folders,
            )
            more = {name: value.replace("{folder}", str(folder)) for name, value in (variables or {}).items()}
            yield stack.enter_context(Job(launcher, plan, run, patience, more))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def own_store_endpoint(launcher: Launcher, most_nodes: int) -> str:
    """Free addresses for a store that the launchers run: three for edl's embedded etcd if there are enough nodes to
    host them, else one."""
    count = 3 if launcher.name in ("edl-embedded", "edl-secret") and most_nodes >= 3 else 1
    return ",".join(f"{processes.LOOPBACK}:{port}" for port in processes.free_store_ports(count))
