"""Imports modules once, then forks a process for each script that it is asked to run: ``tests/process/forking.py``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from typing import NoReturn


def become(script: str, arguments: list[str], descriptors: list[int]) -> NoReturn:
    """Run the script as a process of its own would."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor, place in zip(descriptors, (0, 1), strict=True):
            os.dup2(descriptor, place)
            os.close(descriptor)
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may come back into the loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def reap(number: int, frame: object) -> None:
    """Those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """``sys.argv``: descriptor of a socket to the test, modules to import. A message is a JSON list, script and
    arguments, and brings standard input and output along; the answer is the process's number."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, 65536, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            script, *arguments = json.loads(message)
            become(script, arguments, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


if __name__ == "__main__":
    main()
