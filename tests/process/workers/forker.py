"""Imports modules once, then forks a process for each script or program that it is asked to run.

``tests/process/forking.py`` tells it what. It has one thread, makes no event loop and no connection of a library, and
waits for its children by descriptors, without handlers of signals; so its forks are as safe as a fork server's. A
forked program ends as any interpreter does: the exception that ends it goes up through this file's last line. Only one
that ends in good order does not take its modules apart, which with a framework takes a process half a second.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.process.workers import spare

MAIN = ".__main__"
ENVIRONMENT_START = 47
"""Of the fields of ``/proc/PID/stat`` after the name: ``env_start`` of proc(5)."""
LAUNCHER = "edl.launch"
"""The program that gets spare processes, one of them for its fork server."""
HELPERS = 3
HELPED = ("ps.server.process", "data_service.remote.serve")
"""Modules that are imported for launchers with helper processes."""
PLACES = (0, 1, 2)
"""Where the descriptors that come with an order go."""


@dataclass(frozen=True, slots=True)
class Order:
    """The program to run: JSON that is sent with descriptors for status, stdin, stdout and stderr."""

    module: str
    """As after ``python -m``; empty for a script."""
    script: str
    arguments: list[str]
    environment: dict[str, str] | None
    """All of it; None leaves the forker's."""
    folder: str | None
    """Where it runs; None for the forker's."""
    mark: list[str]
    """Name of an environment variable of the forker and what the process shows as its value, of the same length."""


class Mark:
    """A variable as others read it in ``/proc/PID/environ``: the memory in which the kernel has put it.

    ``putenv`` changes other memory. A process that is forked while the mark is set shows it from its first moment, and
    so does all that it forks.
    """

    def __init__(self, name: str) -> None:
        self._blank = os.environ[name].encode()
        shown = Path("/proc/self/environ").read_bytes()
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[ENVIRONMENT_START])
        self._address = start + shown.index(name.encode() + b"=" + self._blank + b"\0") + len(name) + 1

    def show(self, value: str) -> None:
        data = value.encode()
        assert len(data) == len(self._blank)
        ctypes.memmove(self._address, data, len(data))

    def hide(self) -> None:
        ctypes.memmove(self._address, self._blank, len(self._blank))


def load(name: str) -> None:
    """Import a module. Of a program, such as ``edl.launch.__main__``, only what it imports stays: it is run later."""
    importlib.import_module(name)
    if name.endswith(MAIN):
        delattr(sys.modules[name.removesuffix(MAIN)], "__main__")
        del sys.modules[name]


def become(order: Order, descriptors: list[int]) -> None:
    """In the child: take the order's streams, environment and folder, and nothing of the forker's but its imports."""
    for descriptor, place in zip(descriptors, PLACES, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    if order.module:
        os.setsid()
    if order.folder is not None:
        os.chdir(order.folder)
    if order.environment is not None:
        os.environ.clear()
        os.environ.update(order.environment)


def run_script(path: str, arguments: list[str]) -> NoReturn:
    """Run the script as a process of its own would, but end without tidying up a framework."""
    status = 1
    try:
        sys.argv = [path, *arguments]
        sys.path[0] = os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001 - its end is the process's
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_module(name: str, arguments: list[str], imported_under: dict[str, str]) -> None:
    """Run a module like ``python -m NAME ARGUMENTS…``."""
    if name == LAUNCHER:
        spares = spare.Spares(imported_under)
        helpers = HELPERS if sys.modules.keys() & HELPED else 0
        if any(spares.fork(purpose) for purpose in (spare.FORK_SERVER, *["helper"] * helpers)):
            return
        spares.install()
    sys.argv = ["-m", *arguments]
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def finish(status: int) -> NoReturn:
    """End this process as ``sys.exit`` would, up to where the interpreter would free its memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class Forker:
    """Orders come in, statuses go out: ``PID\\n`` at the start of a process, its exit status and ``\\n`` at its end."""

    def __init__(self, orders: socket.socket, mark: str) -> None:
        self._orders = orders
        self._mark = Mark(mark) if mark else None
        self._poller = select.poll()
        self._poller.register(orders, select.POLLIN)
        self._running: dict[int, tuple[int, int]] = {}
        """By descriptor of the process: its number, and where its status goes."""

    def serve(self) -> Order | None:
        """Until the test has gone (None), or, in a child, what it is to run."""
        while True:
            for ready, _ in self._poller.poll():
                if ready in self._running:
                    self._reap(ready)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._orders, 1 << 20, len(PLACES) + 1)
                if not message:
                    return None
                words: dict[str, Any] = json.loads(message)
                order = Order(**words)
                if self._fork(order, descriptors):
                    return order

    def _fork(self, order: Order, descriptors: list[int]) -> bool:
        """Fork. Returns True in the child."""
        status, *streams = descriptors
        if order.mark and self._mark is not None:
            self._mark.show(order.mark[1])
        pid = os.fork()
        if pid == 0:
            self._orders.close()
            for descriptor in (status, *(own for pair in self._running.items() for own in (pair[0], pair[1][1]))):
                os.close(descriptor)
            become(order, streams)
            return True
        if self._mark is not None:
            self._mark.hide()
        for descriptor in streams:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        self._running[process] = pid, status
        self._poller.register(process, select.POLLIN)
        os.write(status, f"{pid}\n".encode())
        return False

    def _reap(self, process: int) -> None:
        pid, status = self._running.pop(process)
        self._poller.unregister(process)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(process)
        with contextlib.suppress(BrokenPipeError):  # nobody asks
            os.write(status, f"{code}\n".encode())
        os.close(status)


def main() -> Order | None:
    """``sys.argv``: descriptor of a socket to the test, name of the variable that is the mark, modules to import."""
    descriptor, mark, *names = sys.argv[1:]
    for name in filter(None, map(str.strip, names)):
        load(name)
    gc.collect()
    gc.freeze()
    return Forker(socket.socket(fileno=int(descriptor)), mark).serve()


if __name__ == "__main__":
    started_with = dict(os.environ)
    born = main()
    if born is not None and born.module:
        ended = 0
        try:
            run_module(born.module, born.arguments, started_with)
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise
            ended = end.code or 0
        finish(ended)
    elif born is not None:
        run_script(born.script, born.arguments)
