"""Turns a process into a worker: by fork and exec, or by giving an order to a warm process."""

from __future__ import annotations

import importlib
import io
import os
import random
import signal
import sys
import time
from collections.abc import Collection, Mapping

from edl.wire.fork_server import PROBE, WorkerOrder, helper_command
from edl.worker import exiting, linux

CANNOT_EXECUTE = 127
"""Exit status of a process whose program cannot be executed, as in a shell."""
Streams = tuple[int, int, int]
"""Descriptors of a process's stdin, stdout and stderr."""
_GONE_S = 30.0
"""Seconds that a new worker waits until those before it have given back their memory."""


def command_line(order: WorkerOrder) -> list[str]:
    """The command that starts a cold worker."""
    if order.kind == "program":
        return [order.target, *order.arguments]
    return helper_command(sys.executable, "edl.worker.bootstrap", order.kind, order.target, *order.arguments)


def shown_command(order: WorkerOrder) -> list[str]:
    """The command line that a worker shows in ``ps``: what a person would have typed."""
    if order.kind == "call":
        return [sys.executable, "-u", order.target]
    middle = ["-m", order.target] if order.kind in ("module", PROBE) else [order.target]
    return [sys.executable, "-u", *middle, *order.arguments]


def start(
    command: list[str],
    environment: Mapping[str, str],
    directory: str = "",
    streams: Streams = (0, 1, 2),
    keep: Collection[int] = (),
    cores: Collection[int] = (),
    after: Collection[int] = (),
) -> int:
    """Fork and exec; returns the pid once the program runs. Raises ``OSError`` when it cannot be executed.

    ``after``: the program is executed when these exiting processes are gone, and the pid is returned before. If it
    cannot be executed then, the process writes why to its stderr and ends with status ``CANNOT_EXECUTE``.
    """
    reading, writing = os.pipe()
    try:
        pid = linux.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if pid == 0:
        _exec(command, environment, directory, streams, keep, cores, after, writing)
    os.close(writing)
    if after:
        os.close(reading)
        return pid
    with open(reading, "rb") as pipe:
        complaint = pipe.read()
    if complaint:
        os.waitpid(pid, 0)
        raise OSError(int(complaint), os.strerror(int(complaint)), command[0])
    return pid


def _exec(
    command: list[str],
    environment: Mapping[str, str],
    directory: str,
    streams: Streams,
    keep: Collection[int],
    cores: Collection[int],
    after: Collection[int],
    writing: int,
) -> None:
    """In the child. The pipe closes itself if exec succeeds, and carries the error number otherwise."""
    try:
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        take_streams(*streams)
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        linux.close_all_but({writing, *keep})
        linux.bind_to(cores)
        if directory:
            os.chdir(directory)
        _wait_until_gone(after)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        if after:  # nobody reads the pipe
            os.write(2, f"edl: cannot execute {command[0]}: {error.strerror}\n".encode())
        else:
            os.write(writing, str(error.errno).encode())
    finally:
        os._exit(CANNOT_EXECUTE)


def _wait_until_gone(after: Collection[int]) -> None:
    left = exiting.wait_until_gone(after, _GONE_S)
    if left:
        pids = ", ".join(map(str, sorted(left)))
        late = f"edl: process {pids} ended {_GONE_S:g} s ago and still holds memory or devices"
        os.write(2, f"{late}: starting without waiting\n".encode())


def take_streams(stdin: int, stdout: int, stderr: int) -> None:
    """Make these descriptors stdin, stdout and stderr."""
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


def _renew_stdin() -> None:
    """Replace the stdin object, which remembers that its file, the null device until now, can seek."""
    old = sys.stdin
    if not isinstance(old, io.TextIOWrapper) or old is not sys.__stdin__:
        return  # an imported module has replaced it
    raw = open(0, "rb", 0, closefd=False)  # noqa: SIM115 - stays open as long as the process
    raw.name = old.name
    new = io.TextIOWrapper(io.BufferedReader(raw), old.encoding, old.errors, newline="\n")
    for holder, name, value in ((new, "mode", old.mode), (sys, "stdin", new), (sys, "__stdin__", new)):
        setattr(holder, name, value)


def become(order: WorkerOrder, streams: Streams, keep: Collection[int] = ()) -> None:
    """Give this warm process the streams, environment and directory of its order, as if by exec.

    ``keep``: descriptors that imported libraries have opened. Returns when the processes ``order.after`` are gone.
    """
    take_streams(*streams)
    _renew_stdin()
    linux.close_all_but(keep)
    linux.bind_to(order.cores)
    linux.set_title(shown_command(order))
    if order.directory:
        os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    time.tzset()
    # Otherwise all forked processes would draw the same "random" numbers.
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    importlib.invalidate_caches()
    _wait_until_gone(order.after)
