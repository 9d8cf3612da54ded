"""A spawned process that has imported the framework and waits for one order (``Standby.SPAWN``)."""

from __future__ import annotations

import contextlib
import socket
import sys

from edl.wire.datagrams import receive
from edl.wire.fork_server import LogLine, ToAgent, WarmFailed, encode, read_order
from edl.worker import bootstrap
from edl.worker.linux import set_title
from edl.worker.spawn import become
from edl.worker.warm import ImportFailed, warm


def main() -> None:
    """``sys.argv``: descriptor of a socket to the fork server, requested modules, kind, target, arguments (for
    ``ps``)."""
    descriptor, preload, kind, target = sys.argv[1:5]
    fork_server = socket.socket(fileno=int(descriptor))
    set_title([sys.executable, "-m", "edl.worker.standby"])
    try:
        image = warm(kind, target, tuple(filter(None, preload.split(","))))
    except ImportFailed as failure:
        _tell(fork_server, failed(failure))
        sys.exit(1)
    _tell(fork_server, LogLine(image.text))
    _, descriptors = receive(fork_server, 4)
    if len(descriptors) != 4:
        # The fork server is gone or no longer needs this process.
        sys.exit(0)
    memory, stdin, stdout, stderr = descriptors
    order = read_order(memory)
    fork_server.close()
    become(order, (stdin, stdout, stderr), image.descriptors)
    bootstrap.run(order, image.environment)


def _tell(fork_server: socket.socket, message: ToAgent) -> None:
    # A fork server that needs a worker at once sends the order before the imports are done, and no longer reads then.
    with contextlib.suppress(OSError):
        fork_server.send(encode(message))


def failed(failure: ImportFailed) -> WarmFailed:
    """The failure as a message, with a traceback short enough for one datagram."""
    return WarmFailed(failure.module[-1000:], failure.error[-2000:], failure.trace[-6000:])
