"""Reads the job's secret from a file, the environment, or a file shared by launchers in one directory."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from edl.errors import SettingError
from edl.wire.secret import LEAST_BYTES, Secret

SHARED = "shared"
"""Value of ``--secret-file`` for a file in the current directory that the first launcher creates."""
FOLDER = Path(".edl")
MAKE_ONE = (
    "On the first node of a new job create one: (umask 077; head -c 32 /dev/urandom | base64 > FILE). "
    "On any other node copy the job's file"
)


def secret_from(file: str, text: str, job: str, *, create: bool = True) -> tuple[Secret | None, str]:
    """The secret and the absolute path of its file; None and "" without a secret. Raises ``SettingError``.

    ``file``: ``--secret-file`` or ``EDL_SECRET_FILE``; ``text``: ``EDL_SECRET``. ``create``: whether a shared file is
    created if there is none.
    """
    if file and text:
        raise SettingError("--secret-file", file, "EDL_SECRET is set as well", "Unset one of them")
    if text:
        return _secret(text.encode(), "EDL_SECRET", None), ""
    if not file:
        return None, ""
    path = Path(file) if file != SHARED else shared_file(job) if create else _existing(job)
    return _secret(private_bytes(path, "--secret-file", MAKE_ONE), "--secret-file", str(path)), str(path.absolute())


def _secret(raw: bytes, setting: str, shown: str | None) -> Secret:
    value = raw.strip()
    if len(value) < LEAST_BYTES:
        raise SettingError(setting, shown, f"holds {len(value)} bytes, at least {LEAST_BYTES} are needed", MAKE_ONE)
    return Secret(value)


def private_bytes(path: Path, setting: str, advice: str, most: int = 4096) -> bytes:
    """The content of a file that no other user can read or could have written, at most its first ``most`` bytes.
    ``advice``: the next action if it cannot be read. Raises ``SettingError``."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            raw = file.read(most)
    except OSError as error:
        raise SettingError(setting, path, error.strerror or "cannot be read", advice) from error
    if not stat.S_ISREG(found.st_mode):
        raise SettingError(setting, path, "is not a regular file", advice)
    if found.st_uid not in (os.getuid(), 0):
        what = "belongs to another user, who may know and change it"
        raise SettingError(setting, path, what, "Copy it to a file of your own with mode 600")
    if stat.S_IMODE(found.st_mode) & 0o077 and not _for_our_group(found):
        mode = f"others may open it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise SettingError(setting, path, mode, f"Run: chmod 600 {path}")
    return raw


def _for_our_group(found: os.stat_result) -> bool:
    """Whether the file is a Kubernetes Secret in a pod with ``fsGroup``: the kubelet leaves it to root, and the pod's
    group may read it. A person's file is still refused, since only root can create such a one. A file is also refused
    if the group may write, if others have any permission, or if its group is root's."""
    ours = found.st_gid != 0 and found.st_gid in (os.getegid(), *os.getgroups())
    return found.st_uid == 0 and os.geteuid() != 0 and ours and not stat.S_IMODE(found.st_mode) & 0o037


def _path(job: str) -> Path:
    """``.edl/JOB.secret`` below the current directory."""
    return FOLDER / f"{job}.secret"


def _existing(job: str) -> Path:
    """That file, as a launcher has created it. Raises ``SettingError``."""
    if not job:
        raise SettingError("--secret-file", SHARED, "it is a file of one job", "Name the job with --rdzv-id")
    path = _path(job)
    if not path.exists():
        where = f"there is no {path.absolute()}"
        raise SettingError("--secret-file", SHARED, where, "Run this in the directory in which the job was started")
    return path


def shared_file(job: str) -> Path:
    """``.edl/JOB.secret`` below the current directory. The first launcher creates it, atomically. Raises
    ``SettingError``."""
    path = _path(job)
    if path.exists():
        return path
    try:
        FOLDER.mkdir(mode=0o700, exist_ok=True)
        draft = FOLDER / f"{job}.{secrets.token_hex(4)}.new"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another launcher was faster: its secret counts
        finally:
            draft.unlink()
    except OSError as error:
        where = f"cannot create {path.absolute()}: {error.strerror}"
        raise SettingError("--secret-file", SHARED, where, "Start in a directory that all nodes share") from error
    return path
