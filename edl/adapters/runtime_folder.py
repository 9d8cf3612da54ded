"""A user's private folder on this host, which that user's jobs share."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from edl.adapters.etcd_plan import SocketPlan
from edl.errors import SettingError

SHORT_FOLDER = Path("/tmp")  # noqa: S108 -- what is made in it belongs to the user, which is checked
"""Folder for unix sockets whose paths would be too long in the temporary directory."""


def runtime_folder(parent: Path | None = None) -> Path:
    """This user's private folder (mode 0700) for what lives as long as a job: the store's data, sockets,
    files of local jobs.

    ``parent``: by default the temporary directory. The folder's name is predictable, so another user may have created
    it first; raises ``SettingError`` then.
    """
    folder = (parent or Path(tempfile.gettempdir())) / f"edl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        what = f"{folder} belongs to another user, who could read and change what this user's jobs keep there"
        raise SettingError(
            "TMPDIR", folder.parent, what, "Set TMPDIR to a folder of your own, or have that one removed"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def socket_folder() -> Path:
    """A new folder for the sockets of a store that only this user's processes may reach.

    Raises ``SettingError`` if no folder has a path short enough for the kernel.
    """
    tried = []
    for parent in (None, SHORT_FOLDER):
        folder = Path(tempfile.mkdtemp(prefix="store-", dir=runtime_folder(parent)))
        if SocketPlan(folder).fits():
            return folder
        folder.rmdir()
        tried.append(str(folder))
    raise SettingError("TMPDIR", ", ".join(tried), "paths too long for a socket", "Set TMPDIR to a shorter one")
