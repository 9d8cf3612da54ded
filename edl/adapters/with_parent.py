"""Executes another program that the kernel kills when the parent process dies.

Run by path, ``python -I -S with_parent.py PARENT_PID PROGRAM ARGUMENT...``: isolated and without ``site`` it starts in
about 15 ms and does not depend on where edl is installed. It is a separate program because code between fork and exec
(``preexec_fn``) may deadlock in a process with threads, and ``setpriv`` is not on every host.

The kernel watches the parent's *thread*: the parent must start this from a thread that lives as long as the program
should, in practice its main thread (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """``arguments``: ``[parent_pid, program, *arguments]``. Only returns (1) if the parent is already gone."""
    parent, program = int(arguments[0]), arguments[1]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before prctl took effect; then the signal will never come.
    if os.getppid() != parent:
        return 1
    os.execv(program, [program, *arguments[2:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
