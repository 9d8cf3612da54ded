"""The demo's nodes: launcher processes on this host, started, killed with SIGKILL and cleaned up by process id."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "DEMO_NODE"
"""Environment variable that all processes of a node inherit; by it the demo finds what a node left behind."""


class DemoError(Exception):
    """Something did not go as promised; the text says what."""


def now_s() -> float:
    """Monotonic seconds of this host: the clock that the training scripts write into their step logs."""
    return time.monotonic()  # noqa: TID251 (a demo watches real time)


def pause(seconds: float) -> None:
    """Let time pass."""
    time.sleep(seconds)  # noqa: TID251 (a demo watches real time)


def free_store_addresses(count: int) -> list[str]:
    """Loopback addresses whose port and the nine after it are free: a store member may need one for its peers."""
    found: list[str] = []
    for _ in range(500):
        # Below the range from which Linux takes the ports of outgoing connections.
        first = 20_000 + 10 * secrets.randbelow(1_200)
        address = f"127.0.0.1:{first}"
        if address not in found and all(_is_free(port) for port in range(first, first + 10)):
            found.append(address)
            if len(found) == count:
                return found
    raise DemoError(f"no {count} free port ranges on 127.0.0.1 between 20000 and 32000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def member_is_healthy(address: str) -> bool:
    """Whether a store member at this address says that it takes part (etcd's `/health`), or at least listens."""
    host, _, port = address.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=2.0)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status != http.client.SERVICE_UNAVAILABLE and b"false" not in answer.read()
    except http.client.HTTPException:
        return True  # listens, but speaks something else, such as TLS
    except OSError:
        return False
    finally:
        connection.close()


@dataclass(frozen=True)
class Training:
    """What each node runs."""

    script: Path
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    """For the launcher."""


@dataclass
class Node:
    """One simulated node: a launcher with everything it has started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    expected_to_live: bool = True

    def family(self) -> list[psutil.Process]:
        """The processes below the launcher at this moment, without the launcher."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


class Nodes:
    """All nodes of one job on this host. `workdir` gets the logs of launchers and workers and the store's data."""

    def __init__(self, job: str, workdir: Path, training: Training) -> None:
        self.job = job
        self.workdir = workdir
        self.addresses = free_store_addresses(3)
        self._training = training
        self._nodes: dict[str, Node] = {}
        (workdir / "logs").mkdir()
        (workdir / "tmp").mkdir()

    @property
    def names(self) -> list[str]:
        """Names of the nodes that are meant to be alive."""
        return [node.name for node in self._nodes.values() if node.expected_to_live]

    def launch_command(self, name: str) -> list[str]:
        """What one would type on node `name`."""
        return [
            sys.executable, "-m", "edl.launch", "--nnodes=1:4", "--nproc-per-node=1", "--node-id", name,
            f"--rdzv-id={self.job}", "--rdzv-backend=etcd-embedded", f"--rdzv-endpoint={','.join(self.addresses)}",
            "--max-restarts=20", "--log-dir", str(self.workdir / "logs" / name), *self._training.options,
            str(self._training.script), *self._training.arguments,
        ]  # fmt: skip

    def start(self, name: str) -> None:
        """Start the launcher of a node, for the first time or again."""
        log = self.workdir / "logs" / f"launcher-{name}.log"
        environment = dict(os.environ)  # noqa: TID251 (passed on to the launcher)
        environment |= {MARK: self._mark(name), "TMPDIR": str(self.workdir / "tmp"), "PYTHONUNBUFFERED": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.launch_command(name), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=ROOT, env=environment, start_new_session=True,
            )  # fmt: skip
        self._nodes[name] = Node(name, process, log)

    def kill(self, name: str) -> tuple[float, Callable[[], list[psutil.Process]]]:
        """SIGKILL a node's launcher: the time of it, and a function that lists what still lives of the node."""
        node = self._nodes[name]
        node.expected_to_live = False
        family = node.family()
        happened_s = now_s()
        node.process.kill()
        node.process.wait()
        return happened_s, lambda: _living(_merged(family, self._marked(self._mark(name))))

    def kill_worker(self, pid: int) -> float:
        """SIGKILL one worker process; the time of it."""
        happened_s = now_s()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
        return happened_s

    def store_is_whole(self) -> bool:
        """Whether every member of the store takes part."""
        return all(member_is_healthy(address) for address in self.addresses)

    def owner(self, pid: int) -> str | None:
        """The living node to which a worker process belongs."""
        for name in self.names:
            if pid in {process.pid for process in self._nodes[name].family()}:
                return name
        with contextlib.suppress(psutil.Error):
            mark = psutil.Process(pid).environ().get(MARK, "")
            return next((name for name in self.names if self._mark(name) == mark), None)
        return None

    def check(self) -> None:
        """Raise `DemoError` when a launcher has ended that should not have, or has failed."""
        for node in self._nodes.values():
            status = node.process.poll()
            if node.expected_to_live and status not in (None, 0):
                raise DemoError(f"the launcher of {node.name} ended with status {status}")

    def finished(self) -> bool:
        """Whether all launchers that were not killed have ended with status 0."""
        return all(node.process.poll() == 0 for node in self._nodes.values() if node.expected_to_live)

    def status(self) -> dict[str, object]:
        """What `edl status --json` says. Raises `DemoError` when it does not answer."""
        command = [
            sys.executable, "-m", "edl.cli", "status", "--json",
            "--rdzv-endpoint", ",".join(self.addresses), "--rdzv-id", self.job,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=20, check=False, text=True)
        except subprocess.TimeoutExpired:
            raise DemoError("`edl status` did not answer within 20 s") from None
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            said = (done.stderr or done.stdout).strip()[-500:]
            raise DemoError(f"`edl status` ended with status {done.returncode}: {said}") from None
        return answer if isinstance(answer, dict) else {}

    def master(self) -> str:
        """Node of the Master. Raises `DemoError` while one is being elected."""
        answer = self.status()
        master = answer.get("master")
        name = master.get("node") if isinstance(master, dict) else master
        if name not in self.names:
            raise DemoError(f"`edl status` says that the Master is on {name!r}, not on one of {', '.join(self.names)}")
        return str(name)

    def ways(self) -> str:
        """By which way the workers of each node came into the running world, as `edl status` tells it."""
        nodes = self.status().get("nodes")
        listed = [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
        return ", ".join(f"{node.get('node')}: {node.get('how') or 'unknown'}" for node in listed)

    def log_tails(self, lines: int) -> list[tuple[Path, str]]:
        """The last lines of each launcher's log."""
        return [
            (node.log, "\n".join(node.log.read_text(errors="replace").splitlines()[-lines:]))
            for node in self._nodes.values()
        ]

    def close(self) -> None:
        """End every process of every node: SIGTERM to the launchers, after ten seconds SIGKILL to what is left."""
        families = [process for node in self._nodes.values() for process in node.family()]
        launchers = [node.process for node in self._nodes.values() if node.process.poll() is None]
        for launcher in launchers:
            launcher.terminate()
        limit_s = now_s() + 10.0
        while now_s() < limit_s and any(launcher.poll() is None for launcher in launchers):
            pause(0.05)
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
        left = _merged(families, [process for name in self._nodes for process in self._marked(self._mark(name))])
        end(_living(left))

    def _mark(self, name: str) -> str:
        return f"{self.workdir}/{name}"

    @staticmethod
    def _marked(mark: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark:
                    found.append(process)
        return found


def end(processes: list[psutil.Process]) -> None:
    """SIGKILL these processes."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _merged(one: list[psutil.Process], other: list[psutil.Process]) -> list[psutil.Process]:
    return list({process.pid: process for process in [*one, *other]}.values())


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living
