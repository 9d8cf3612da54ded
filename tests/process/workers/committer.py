"""Forks workers that do nothing but commit, until they are killed. Argument: descriptor of the socket to hear from.

Each message brings the descriptor of one worker's own socket; the answer is its pid. A worker is granted buffers as
``[buffer, size, commit]``, with a descriptor when the buffer is new, fills one with the commit's number from its start
to its end in small steps, and answers ``[buffer, size]``.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys

from edl.testing.snapshots import make_snapshot
from edl.wire.records import Holding, Version

STEP_BYTES = 16 * 1024


def commit_for_ever(agent: socket.socket) -> None:
    buffers: dict[int, mmap.mmap] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(agent, 1024, 1)
        if not data:
            return
        number, size, commit = json.loads(data)
        for descriptor in descriptors:
            buffers[number] = mmap.mmap(descriptor, size)
            os.close(descriptor)
        snapshot = make_snapshot(Holding(Version(1, commit)), commit % 251, size * 3 // 4)
        for start in range(0, len(snapshot), STEP_BYTES):
            part = snapshot[start : start + STEP_BYTES]
            buffers[number][start : start + len(part)] = part
        agent.send(json.dumps([number, len(snapshot)]).encode())


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            try:
                commit_for_ever(socket.socket(fileno=descriptors[0]))
            finally:
                os._exit(0)
        os.close(descriptors[0])
        control.send(str(pid).encode())


if __name__ == "__main__":
    main()
