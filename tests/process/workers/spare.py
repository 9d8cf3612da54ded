"""Processes that a forked launcher starts without an interpreter of their own: its fork server, which would import a
framework for longer than most tests take, and helpers such as pservers.

The launcher's process forks spare ones before it becomes a launcher, while it has one thread and the forker's imports.
When the launcher starts such a command, a spare process, which is its child, becomes what the command's interpreter
would be. Commands for which none is left, and those whose interpreter would read other variables, are executed.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any

AT_START = ("PYTHON", "LANG", "LC_", "LD_", "HOME", "MALLOC_", "GLIBC_", "GRPC_", "OMP_", "OPENSSL_", "SSL_", "TZ")
"""How names of variables begin that are read before a program's first own line, or when it imports."""
LIBRARIES = ("MKL_", "OPENBLAS_", "KMP_", "FLAGS_", "TORCH_", "PADDLE_", "CUDA_", "GLOO_", "NUMBA_", "EDL_PS_KERNELS")
"""The same of frameworks, and of libraries that only workers and helpers import."""
ORDER_BYTES = 1 << 20
MOST_DESCRIPTORS = 16
FREE_FROM = 200
"""Above all descriptors that a command may name."""
FORK_SERVER = "edl.worker.fork_server"
HELPERS = ("ps", "data_service")
"""Modules of helper processes."""
WITH_PARENT = "with_parent.py"


class Child:
    """The part of ``subprocess.Popen`` that a launcher and ``asyncio`` use."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.args = command
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # asyncio has been told
                return None
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises ``TimeoutExpired``."""
        if self.poll() is None:
            process = os.pidfd_open(self.pid)
            try:
                poller = select.poll()
                poller.register(process, select.POLLIN)
                poller.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(process)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Spares:
    """The launcher's end of its spare processes."""

    def __init__(self, imported_under: Mapping[str, str]) -> None:
        self._imported_under = read(imported_under, (*AT_START, *LIBRARIES))
        self._left: dict[str, list[tuple[int, socket.socket]]] = {}
        """By what they are for: number of the process, and where its order goes."""

    def fork(self, purpose: str) -> bool:
        """Make one. True in that process, which has then run a command and is to end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid:
            theirs.close()
            self._left.setdefault(purpose, []).append((pid, ours))
            return False
        ours.close()
        for _, other in (one for several in self._left.values() for one in several):
            other.close()
        with theirs:
            message, descriptors, _, _ = socket.recv_fds(theirs, ORDER_BYTES, MOST_DESCRIPTORS)
        if not message:  # the launcher has ended and did not need it
            os._exit(0)
        _become(json.loads(message), descriptors)
        return True

    def install(self) -> None:
        """Replace ``subprocess.Popen`` in this process."""
        real, spares = subprocess.Popen, self

        class Popen(real):  # type: ignore[valid-type, misc]
            def __new__(cls, command: Any, **more: Any) -> Any:
                child = spares._start(command, **more)
                return super().__new__(cls) if child is None else child

        subprocess.Popen = Popen  # type: ignore[misc, assignment]

    def _start(self, command: Any, **more: Any) -> Child | None:
        words = [] if isinstance(command, str) else list(command)
        environment = more.get("env")
        left = self._left.get(_purpose(words))
        if not left or environment is None or read(environment, (*AT_START, *LIBRARIES)) != self._imported_under:
            return None
        assert more["start_new_session"] and more.get("cwd") is None
        pid, orders = left.pop()
        child = Child(pid, words)
        named = more.get("pass_fds", ())
        with contextlib.ExitStack() as stack:
            stack.enter_context(orders)
            streams = [_stream(number, more, child, stack) for number in range(3)]
            told = {
                "words": words,
                "environment": dict(environment),
                "places": [0, 1, 2, *named],
                "folder": os.getcwd(),
            }
            socket.send_fds(orders, [json.dumps(told).encode()], [*streams, *named])
        return child


def read(environment: Mapping[str, str], beginnings: tuple[str, ...] = AT_START) -> dict[str, str]:
    """The variables whose names begin so."""
    return {name: value for name, value in environment.items() if name.startswith(beginnings)}


def _purpose(words: Sequence[str]) -> str:
    """What kind of spare process may run a command, if any."""
    if words[:3] == [sys.executable, "-u", "-c"] and FORK_SERVER in words[:6]:
        return FORK_SERVER
    wrapped = words[:3] == [sys.executable, "-I", "-S"] and words[3].endswith(WITH_PARENT)
    return "helper" if wrapped and words[5:7] == [sys.executable, "-m"] and words[7] in HELPERS else ""


def _stream(number: int, more: Mapping[str, Any], child: Child, stack: contextlib.ExitStack) -> int:
    """The descriptor that a standard stream of the child is to be."""
    given = more.get(("stdin", "stdout", "stderr")[number])
    if given is None:
        return number
    if given == subprocess.DEVNULL:
        nothing = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, nothing)
        return nothing
    if given == subprocess.PIPE:
        assert number != 2
        reading, writing = os.pipe()
        if number == 0:
            child.stdin, theirs = open(writing, "wb", buffering=0), reading  # noqa: SIM115 - the owner closes it
        else:
            child.stdout, theirs = open(reading, "rb", buffering=0), writing  # noqa: SIM115
        stack.callback(os.close, theirs)
        return theirs
    descriptor: int = given if isinstance(given, int) else given.fileno()
    return descriptor


# --- in a spare process ----------------------------------------------------------------------------------------------


def _become(order: Mapping[str, Any], descriptors: list[int]) -> None:
    """Take over what a new program would get and nothing else, and run the command."""
    os.setsid()
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE_FROM) for descriptor in descriptors]
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)
    for descriptor, place in zip(kept, order["places"], strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    words: list[str] = order["words"]
    if words[1] == "-u":
        _run_code(words[3], words[4:])
    else:
        _run_helper(int(words[4]), words[5:])


def _run_code(code: str, arguments: list[str]) -> None:
    """As ``python -u -c CODE ARGUMENT…``."""
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = _unbuffered(sys.stdout), _unbuffered(sys.stderr)  # type: ignore[misc]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(code, vars(main))  # noqa: S102 - it is the command


def _unbuffered(stream: Any) -> io.TextIOWrapper:
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    # In two steps, or the file would have a buffer.
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)


def _run_helper(parent: int, words: list[str]) -> None:
    """As ``with_parent.py PARENT python -m MODULE ARGUMENT…``."""
    from edl.worker import linux

    linux.die_with_parent(parent)
    linux.set_title(words)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), sys.stdin.encoding, sys.stdin.errors)
    sys.argv, sys.path[0] = ["-m", *words[3:]], os.getcwd()
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)
