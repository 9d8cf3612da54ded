"""What a job needs outside its nodes and the benchmark starts for it: an etcd, a lighthouse, a master, a head node."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from benchmarks.common import processes
from benchmarks.common.etcd import PrivateEtcd
from benchmarks.common.launchers import Launcher, Meeting, Torchft
from benchmarks.common.more_launchers import RAY_QUIET, RAY_WAITS, Dlrover, RayTrain, ray_start, service_folder

START_LIMIT_S = 90.0
LIGHTHOUSE_WAITS = (
    *("--min_replicas=1", "--quorum_tick_ms=100", "--heartbeat_timeout_ms=1000", "--join_timeout_ms=1000"),
)
"""Shorter waits than the defaults of 5 s for a silent replica and 60 s for others to join. Heartbeats come every
0.1 s."""


class Service(Protocol):
    """A running service. ``address``: where the nodes find it."""

    @property
    def address(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a service. ``command``: from its port and a folder of its own."""

    command: Callable[[int, Path], Sequence[str]]
    environment: Mapping[str, str]


def master(launcher: Dlrover) -> Recipe:
    """DLRover's local master."""

    def command(port: int, folder: Path) -> list[str]:
        program = [launcher.python, "-m", "dlrover.python.master.main", "--platform=local", f"--port={port}"]
        return [*program, "--node_num=4", "--job_name=bench"]

    return Recipe(command, {})


def head(launcher: RayTrain) -> Recipe:
    """Ray's head: it runs the store, the driver and the controller of Ray Train, but no worker."""

    def command(port: int, folder: Path) -> list[str]:
        options = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={folder}"]
        options += [f"--ray-client-server-port={port + 1}"]  # Ray's default may be taken, and then the head ends
        return [*ray_start(launcher.python), *options]

    return Recipe(command, RAY_WAITS | RAY_QUIET)


def lighthouse(launcher: Torchft) -> Recipe:
    """torchft's lighthouse."""
    program = Path(launcher.python).parent / "torchft_lighthouse"
    if not program.exists():
        raise processes.NotStarted(f"{program} is missing: give --peer-python an environment with torchft")
    return Recipe(lambda port, folder: [str(program), f"--bind={processes.LOOPBACK}:{port}", *LIGHTHOUSE_WAITS], {})


class Started:
    """A service that runs from a recipe. Its folder has a short path, since it may hold sockets."""

    def __init__(self, recipe: Recipe, marks: Mapping[str, str]) -> None:
        self._recipe = recipe
        self._marks = marks
        self._port = processes.free_store_ports(1)[0]
        self._folder = service_folder(self._port)
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"{processes.LOOPBACK}:{self._port}"

    def __enter__(self) -> Started:
        self._folder.mkdir(exist_ok=True)
        env = processes.clean_environment({**self._recipe.environment, **self._marks, "PYTHONUNBUFFERED": "1"})
        log = self._folder / "log"
        self._process = processes.start(self._recipe.command(self._port, self._folder), env, log, self._folder)
        deadline_s = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                words = log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
                self.close()
                raise processes.NotStarted(
                    f"{self._process.args!r} does not listen at {self.address}: {words[0][:200]}"
                )
            time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection((processes.LOOPBACK, self._port), timeout=1.0):
                return True
        except OSError:
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and with it all that it has started, and delete its files."""
        if self._process is not None:
            for found in processes.find(self._marks[processes.RUN_MARK], processes.OUTSIDE):
                processes.send(found, signal.SIGKILL)
            self._process.kill()
            self._process.wait(timeout=10.0)
        shutil.rmtree(self._folder, ignore_errors=True)


def service(launcher: Launcher, run: str, etcd_members: int) -> AbstractContextManager[Service] | None:
    """What the launcher needs outside its nodes, not started yet; ``None`` if it needs nothing."""
    marks = processes.marks(run, processes.OUTSIDE)
    if launcher.meeting is Meeting.ETCD:
        return PrivateEtcd(etcd_members, marks)
    if isinstance(launcher, Torchft):
        return Started(lighthouse(launcher), marks)
    if isinstance(launcher, Dlrover):
        return Started(master(launcher), marks)
    if isinstance(launcher, RayTrain):
        return Started(head(launcher), marks)
    return None
