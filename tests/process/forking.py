"""Processes that start with their modules imported already: the imports of a framework take seconds, those of a
launcher a good part of one, and tests need hundreds of them.

A forked program is what ``python -m`` makes of it, with four differences that are accepted in tests: the interpreter's
seed of hashes is the same for all, ``/proc/PID/cmdline`` shows the forker's words, more is imported than it has asked
for, and one that ends in good order does not take its modules apart. The first fork server of a forked launcher, its
pservers and readers are forked too (``workers/spare.py``). What an interpreter or a library reads at its start must be
the same for forker and program (``spare.AT_START``). ``TEST_REAL_STARTS=1``, which ``--soak`` sets, has every program
started by itself; without it ``test_both_ends_of_a_pipe_that_nobody_reads`` (test_bad_input.py) and those of
test_partition.py start launchers for real, as the tests of schedulers do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from edl.worker.warm import ImportFailed, find_plan
from tests.process.workers import spare

WORKERS = Path(__file__).resolve().parent / "workers"
ROOT = WORKERS.parents[2]
MARK = "TEST_JOB_MARK"
"""Environment variable by which every process of a job is found again, whoever its parent is by then."""
MARK_LENGTH = 32
MODULES = {"torch": ("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel"), "paddle": ("paddle",)}
"""DistributedDataParallel would import ``torch._dynamo`` otherwise."""
MODULES_OF_OPTIONS = {
    "--run-mode=ps": ("ps.server.process", "ps.client.client", "tests.process.workers.ps_kernels"),
    "--readers=": ("data_service.remote.serve",),
}
"""By the beginning of a launcher's option: what its helper processes import."""
KERNELS = "EDL_PS_KERNELS"
"""The variable by which pservers choose what they import."""
TITLE = " " * 300
"""Room for what ``ps`` is to show of a forked program."""
PROGRAMS = {
    "edl.launch": ("edl.launch.__main__", "edl.launch.compose", "edl.worker.fork_server"),
    "edl.cli": ("edl.cli.__main__", "edl.cli.ask", "edl.cli.find", "edl.cli.show"),
}
"""Programs that are forked, and what is imported for them: what each of their processes imports, or nearly each."""
NEVER_ENDS_S = 60.0


class Process(Protocol):
    """The subset of ``subprocess.Popen`` that tests use."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class Forked:
    """A process that a forker has made, as ``subprocess.Popen`` shows one."""

    def __init__(self, status: int) -> None:
        self.returncode: int | None = None
        """A negative number is that of the signal that has ended it."""
        self._lock = threading.Lock()
        self._status = status
        self._said = b""
        self._read()
        number, _, self._said = self._said.partition(b"\n")
        self.pid = int(number)

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        with self._lock:
            if self.returncode is None and (self._said or self._speaks(0)):
                self._read()
                self.returncode = int(self._said)
                os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises ``TimeoutExpired``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self._speaks(left_s)
        return status

    def send_signal(self, sig: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def _speaks(self, limit_s: float | None) -> bool:
        poller = select.poll()
        poller.register(self._status, select.POLLIN)
        return bool(poller.poll(None if limit_s is None else limit_s * 1000))

    def _read(self) -> None:
        """A whole line at least of what its forker says of it."""
        while b"\n" not in self._said:
            said = os.read(self._status, 64)
            assert said, "the forker has ended before its process"
            self._said += said


class Talking:
    """A forked script to which a test talks."""

    def __init__(self, process: Forked, stdin: int, stdout: int) -> None:
        self.process = process
        self.pid = process.pid
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout)

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(NEVER_ENDS_S)
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()


class Forker:
    """Imports modules once and forks. It ends with the process that has made it, however that ends."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.environment = dict(os.environ if environment is None else environment)
        self.environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKERS / "forker.py"), str(theirs.fileno()), MARK, *modules, TITLE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**self.environment, MARK: "0" * MARK_LENGTH},
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def of(cls, framework: str) -> Forker:
        """The one for scripts of torch or paddle, and for launchers of such scripts. It ends with this process."""
        return _forker("edl.launch", MODULES[framework], "")

    def start(self, script: Path, *arguments: str) -> Talking:
        """Run a script, which says by itself when it is ready."""
        stdin, ours = os.pipe()
        from_it, stdout = os.pipe()
        try:
            order = {"module": "", "script": str(script), "arguments": arguments}
            process = self._order(order, [stdin, stdout, 2])
        finally:
            os.close(stdin)
            os.close(stdout)
        return Talking(process, ours, from_it)

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        streams: Sequence[int],
    ) -> Forked:
        """``python -m MODULE ARGUMENTS…`` in a session of its own, with all of this environment, in this folder."""
        order = {"module": module, "script": "", "arguments": list(arguments), "environment": dict(environment)}
        mark = [MARK, environment[MARK]] if MARK in environment else []
        return self._order({**order, "folder": str(folder), "mark": mark}, streams)

    def end(self) -> None:
        """Those that it has forked must have ended before."""
        self._orders.close()
        self._process.wait()

    def _order(self, order: Mapping[str, object], streams: Sequence[int]) -> Forked:
        nothing_special: dict[str, object] = {"environment": None, "folder": None, "mark": []}
        reading, writing = os.pipe()
        try:
            socket.send_fds(self._orders, [json.dumps({**nothing_special, **order}).encode()], [writing, *streams])
        finally:
            os.close(writing)
        return Forked(reading)


def start(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, stdout: IO[bytes], stderr: IO[bytes]
) -> Process:
    """Start a command in a session of its own, without input. Forked, if it is one of ``PROGRAMS`` and nothing in its
    environment asks for an interpreter of its own."""
    program, forker = _forker_for(command, environment)
    if forker is not None:
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
            return forker.run(program, command[3:], environment, folder, streams)
    return subprocess.Popen(
        list(command),
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Start a command as above, wait for its end, and return what it has written."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = start(command, environment, folder, stdout, stderr)
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        for file in (stdout, stderr):
            file.seek(0)
        wrote = stdout.read().decode(), stderr.read().decode()
        assert status is not None, f"{command} has not ended in {limit_s} s. It wrote: {wrote[0]}\n{wrote[1]}"
        return subprocess.CompletedProcess(list(command), status, *wrote)


def _forker_for(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, Forker | None]:
    """The module of a command and who forks it; None if it is to be started by itself."""
    program = command[2] if list(command[:2]) == [sys.executable, "-m"] and len(command) > 2 else ""
    if program not in PROGRAMS or os.environ.get("TEST_REAL_STARTS") or len(environment.get(MARK, "")) != MARK_LENGTH:
        return program, None
    modules = _modules_for(command[3:]) if program == "edl.launch" else ()
    forker = _forker(program, modules, environment.get(KERNELS, ""))
    return program, forker if spare.read(environment) == spare.read(forker.environment) else None


def _modules_for(words: Sequence[str]) -> tuple[str, ...]:
    """What the processes of a launcher with these arguments import for long."""
    script = next((word for word in words if word.endswith(".py") and Path(word).is_file()), "")
    found: set[str] = set()
    with contextlib.suppress(ImportFailed):
        plan = find_plan("script", script, ())
        found = {*plan.required, *plan.optional}
    own = [names for option, names in MODULES_OF_OPTIONS.items() if any(word.startswith(option) for word in words)]
    return tuple(itertools.chain(*(MODULES[name] for name in MODULES if name in found), *own))


def plain_environment() -> dict[str, str]:
    """The part of this process's environment that is passed to programs under test."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}


@functools.cache
def _forker(program: str, more: tuple[str, ...], kernels: str) -> Forker:
    forker = Forker((*PROGRAMS[program], *more), {**plain_environment(), **({KERNELS: kernels} if kernels else {})})
    atexit.register(forker.end)
    return forker
