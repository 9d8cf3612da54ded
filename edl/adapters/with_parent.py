"""Become another program that the kernel kills when the parent process dies.

Run by path, ``python -I -S with_parent.py PARENT_PID PROGRAM ARGUMENT...``: isolated and without ``site`` it starts
in about 15 ms and does not depend on where edl is installed. A module of its own because code between fork and exec
(``preexec_fn``) may deadlock in a process with threads, and ``setpriv`` is not on every host.

The kernel ties the wish to the parent's *thread*: the parent must start this from a thread that lives as long as
the program should, in practice its main thread (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """``[parent_pid, program, *arguments]``; returns only when the parent is gone already."""
    parent, program = int(arguments[0]), arguments[1]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the wish was made; then nobody will send the signal.
    if os.getppid() != parent:
        return 1
    os.execv(program, [program, *arguments[2:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
