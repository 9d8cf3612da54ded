"""Keeps what a running job needs from programs that clean up temporary folders.

systemd-tmpfiles, tmpwatch and their like delete what nobody has read or changed for about ten days. A job runs for
longer, and reads some of its files only when something happens: etcd its certificates at each new connection, a worker
the function that it calls at its start.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from edl.adapters.clock import wall_clock_ns

CLEANED = ("/tmp", "/var/tmp")  # noqa: S108 -- nothing is made there
"""Folders that are cleaned on many hosts, besides the temporary directory."""


def is_temporary(path: Path) -> bool:
    """Whether a cleaner may delete this file or folder."""
    return any(path.is_relative_to(folder) for folder in (tempfile.gettempdir(), *CLEANED))


def touch(path: Path) -> None:
    """Make a file, or a folder with all that is in it, look as if it had just been read. The times of changes stay.
    What belongs to another user is left alone. Blocks."""
    _touch(path)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            _touch(Path(folder, name))


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is gone, or another user's
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode):
            os.utime(path, ns=(wall_clock_ns(), found.st_mtime_ns))
