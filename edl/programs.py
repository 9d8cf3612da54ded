"""Rules for programs of users and of schedulers that a launcher runs to their end.

Their streams are anonymous files. A pipe would stay open for as long as background processes that a program leaves
behind. A file on a disk would be cut off, without an error, when the disk is full; and that may be what a program is to
report.
"""

from __future__ import annotations

import errno
import os
from typing import IO

MOST_OUTPUT = 4 << 20
"""Bytes of output after which a program is killed."""
TOO_MUCH = f"printed more than {MOST_OUTPUT >> 20} MiB"
LOOK_S = 0.1
"""Seconds between two looks at how much a program has printed."""
LACKING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ETXTBSY)
"""Errors of a host that has no process, memory, descriptor or space left, perhaps only for a moment."""


def is_too_much(*streams: IO[bytes]) -> bool:
    """Whether a program has printed more than any sensible one."""
    return sum(os.fstat(one.fileno()).st_size for one in streams) > MOST_OUTPUT


def ending(status: int) -> str:
    """How a program has ended, as text. ``status``: that of ``subprocess``, which is negative for a signal."""
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
