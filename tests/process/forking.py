"""Processes that start with a framework imported already: importing torch takes seconds, and tests need several."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.process.harness import ROOT, WORKERS, alive, until

MODULES = {"torch": ("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel"), "paddle": ("paddle",)}
"""DistributedDataParallel would import ``torch._dynamo`` otherwise."""


class Forked:
    """A process that a forker has made, as ``subprocess.Popen`` shows one."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        until(lambda: not alive(self.pid), f"the end of process {self.pid}")
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


class Forker:
    """Imports a framework once and forks."""

    def __init__(self, framework: str) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKERS / "forker.py"), str(theirs.fileno()), *MODULES[framework]],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
            )

    def start(self, script: Path, *arguments: str) -> Forked:
        """Run a script, which says by itself when it is ready."""
        stdin, ours = os.pipe()
        from_it, stdout = os.pipe()
        try:
            socket.send_fds(self._orders, [json.dumps([str(script), *arguments]).encode()], [stdin, stdout])
        finally:
            os.close(stdin)
            os.close(stdout)
        answer = self._orders.recv(64)
        assert answer, f"the forker has ended with status {self._process.wait()}"
        return Forked(int(answer), ours, from_it)

    def end(self) -> None:
        """Those that it has forked must have ended before."""
        self._orders.close()
        self._process.wait()
