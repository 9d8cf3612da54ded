"""What programs of users and of schedulers need that a launcher runs to their end: streams, and what may pass.

The streams are memory files. A pipe would stay open for as long as background processes that a program leaves behind. A
file on a disk would be cut off, without an error, when the disk is full; and that may be what a program is to report.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from typing import IO

MOST_OUTPUT = 4 << 20
"""Bytes of output after which a program is killed."""
TOO_MUCH = f"printed more than {MOST_OUTPUT >> 20} MiB"
LOOK_S = 0.1
"""Seconds between two looks at how much a program has printed."""
LACKING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ETXTBSY)
"""Errors of a host that has no process, memory, descriptor or space left, perhaps only for a moment."""


def stream(content: bytes = b"") -> IO[bytes]:
    """An open file for a standard stream of a program, at its beginning. Raises ``OSError``."""
    if sys.platform == "linux":
        file: IO[bytes] = open(os.memfd_create("edl-program"), "w+b")  # noqa: SIM115 - the caller closes it
    else:
        file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as above
    file.write(content)
    file.seek(0)
    return file


def path_of(file: IO[bytes]) -> str:
    """A path by which this process can open the file of ``stream`` once more."""
    return f"/proc/self/fd/{file.fileno()}" if sys.platform == "linux" else file.name


def is_too_much(*streams: IO[bytes]) -> bool:
    """Whether a program has printed more than any sensible one."""
    return sum(os.fstat(one.fileno()).st_size for one in streams) > MOST_OUTPUT
