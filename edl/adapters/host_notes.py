"""Small files by which ``edl status`` finds the jobs on this host without an endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edl.adapters.etcd_plan import SocketPlan
from edl.errors import SettingError
from edl.types import JobId, NodeId

SHORT_FOLDER = Path("/tmp")  # noqa: S108 -- what is made in it belongs to the user, which is checked
"""Folder for unix sockets whose paths would be too long in the temporary directory."""


def runtime_folder(parent: Path | None = None) -> Path:
    """This user's private folder (mode 0700) for files that live as long as a job: store data, notes.

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


@dataclass(frozen=True, slots=True)
class HostNote:
    """Endpoints of the store of one launcher's job."""

    job: JobId
    node: NodeId
    endpoints: tuple[str, ...]
    pid: int = 0
    """The launcher's pid, in notes returned by ``notes``."""
    secret_file: str = ""
    """Path of the file with the job's secret, if there is one."""

    def _path(self) -> Path:
        return runtime_folder() / f"{self.job}@{os.getpid()}.json"

    def write(self) -> None:
        """Write the note. Without space on the disk there is none, and ``edl status`` needs an endpoint."""
        notes()  # removes those of launchers that were killed
        with contextlib.suppress(OSError):
            fields = {"job": self.job, "node": self.node, "endpoints": self.endpoints, "secret_file": self.secret_file}
            self._path().write_text(json.dumps({**fields, "pid": os.getpid()}))

    def remove(self) -> None:
        """Delete the note, if it exists and can be deleted."""
        with contextlib.suppress(OSError):
            self._path().unlink()


def notes() -> list[HostNote]:
    """Notes of the running launchers on this host; those of dead ones are deleted."""
    found = []
    for path in sorted(runtime_folder().glob("*@*.json")):
        try:
            note = json.loads(path.read_text())
            if not Path(f"/proc/{note['pid']}").exists():
                path.unlink()
                continue
            who = JobId(note["job"]), NodeId(note["node"]), tuple(note["endpoints"]), note["pid"]
            found.append(HostNote(*who, note.get("secret_file", "")))
        except (OSError, ValueError, KeyError):
            continue  # half written or just removed: its launcher is starting or ending
    return found
