"""Files without a name, in memory: what is written there is on no disk, and no disk that is full cuts it off."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import IO


def anonymous_file(content: bytes = b"") -> IO[bytes]:
    """An open file with this content, at its beginning. Where there are none in memory, a temporary file that goes when
    it is closed. Raises ``OSError``."""
    if sys.platform == "linux":
        file: IO[bytes] = open(os.memfd_create("edl"), "w+b")  # noqa: SIM115 - the caller closes it
    else:
        file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as above
    file.write(content)
    file.seek(0)
    return file


def path_of(file: IO[bytes]) -> str:
    """A path by which this process can open the anonymous file once more."""
    return f"/proc/self/fd/{file.fileno()}" if sys.platform == "linux" else file.name
