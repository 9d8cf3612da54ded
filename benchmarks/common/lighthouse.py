"""torchft's lighthouse for a single run, outside the simulated nodes."""

from __future__ import annotations

import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from benchmarks.common import processes

TUNED = ("--min_replicas=1", "--quorum_tick_ms=100", "--heartbeat_timeout_ms=1000", "--join_timeout_ms=1000")
"""Shorter waits than the defaults of 5 s for a silent replica and 60 s for others to join. Heartbeats come every
0.1 s."""


class Lighthouse:
    """``with Lighthouse(python) as lighthouse: lighthouse.address`` gives ``"127.0.0.1:port"``."""

    def __init__(self, python: str) -> None:
        """``python``: of the environment that has torchft; see ``peer_venv.py``."""
        self._program = Path(python).parent / "torchft_lighthouse"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"{processes.LOOPBACK}:{processes.free_ports(1)[0]}"

    def __enter__(self) -> Lighthouse:
        if not self._program.exists():
            raise RuntimeError(f"{self._program} is missing: give --peer-python an environment with torchft")
        folder = Path(tempfile.gettempdir())
        command = [str(self._program), f"--bind={self.address}", *TUNED]
        self._process = processes.start(command, processes.clean_environment({}), Path("/dev/null"), folder)
        deadline_s = time.monotonic() + 20.0
        while not self._answers():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                self.close()
                raise RuntimeError(f"{self._program} did not answer at {self.address} within 20 s")
            time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/", timeout=1.0):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10.0)
