"""Removes the folders of launchers that were killed, such as private stores of up to a hundred megabytes.

Each folder names its owner process. Only folders whose owner is certainly gone are removed: a process of another
container or host that shares the temporary directory is not visible from here, so its folder is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.adapters.family import stat_fields

OWNER = "owner.json"


def own(folder: Path) -> None:
    """Mark the folder as owned by this process. A folder that cannot be marked is never swept."""
    with contextlib.suppress(OSError):
        (folder / OWNER).write_text(json.dumps(this_process()))


def disown(folder: Path) -> None:
    """Remove the mark, so that the folder is never swept."""
    (folder / OWNER).unlink(missing_ok=True)


def this_process() -> dict[str, Any]:
    """What tells this process from all others, for ``is_gone`` and ``is_near``."""
    return {"pid": os.getpid(), "began": _began(os.getpid()), "where": _where(), "host": _host()}


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether a process has certainly ended. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for what is no
    ``this_process``."""
    pid, began, where = int(owner["pid"]), str(owner["began"]), list(owner["where"])
    boot, namespace = _where()
    if where[:1] == [boot]:
        return where == [boot, namespace] and _began(pid) != began
    # Another host, or this one before its last boot? The first namespace has the same number on all hosts.
    return bool(where) and where[1:] == [namespace] and boot != "" and owner.get("host") == _host()


def is_near(owner: Mapping[str, Any]) -> bool:
    """Whether a pid in this host's ``/proc`` is that of the process: it is one of this boot and of this pid
    namespace."""
    return list(owner["where"]) == _where()


def here() -> str:
    """Eight hex digits that tell this host and pid namespace from others, for names of files about processes: those
    that share a temporary directory may have processes with the same pid."""
    return hashlib.sha256(f"{_host()} {_where()[1]}".encode()).hexdigest()[:8]


def sweep(parent: Path, names: str = "*", keep: int = 0) -> list[Path]:
    """Remove the folders of this user's processes that are gone, except the newest ``keep``; returns the removed
    folders. ``names``: glob pattern of the folders to consider."""
    left = sorted(
        (marked for marked in parent.glob(f"{names}/{OWNER}") if _is_ours(marked) and _is_left(marked)), key=_age
    )
    removed = [marked.parent for marked in left[: len(left) - keep]] if len(left) > keep else []
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _is_ours(marked: Path) -> bool:
    """Whether folder and mark belong to this user; other users could create both in the temporary directory."""
    with contextlib.suppress(OSError):
        return marked.parent.lstat().st_uid == os.getuid() and marked.lstat().st_uid == os.getuid()
    return False


def _age(marked: Path) -> float:
    with contextlib.suppress(OSError):
        return marked.lstat().st_mtime
    return 0.0


def _is_left(marked: Path) -> bool:
    try:
        return is_gone(json.loads(marked.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # half written


def boot_id() -> str:
    """Tells the run of this host's kernel from all others; empty if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _where() -> list[str]:
    """Boot id of this host and the pid namespace; empty if unknown."""
    with contextlib.suppress(OSError):
        return [boot_id(), os.readlink("/proc/self/ns/pid")]
    return [boot_id(), ""]


def _host() -> str:
    """Name and machine id of this host, which stay when it is booted."""
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip()
    return f"{os.uname().nodename} {machine}"


def _began(pid: int) -> str:
    """Start time of a process in clock ticks since boot, as text; empty if it is gone. Distinguishes processes that
    reuse a pid."""
    try:
        return stat_fields(f"/proc/{pid}/stat")[19]
    except (OSError, IndexError):
        return ""
