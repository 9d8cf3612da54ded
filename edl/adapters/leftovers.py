"""Removes the folders of launchers that were killed, such as private stores of up to a hundred megabytes.

Each folder names its owner process. Only folders whose owner is certainly gone are removed: a process of another
container that shares the temporary directory is not visible from here, so its folder is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from edl.adapters.family import stat_fields

OWNER = "owner.json"


def own(folder: Path) -> None:
    """Mark the folder as owned by this process. A folder that cannot be marked is never swept."""
    with contextlib.suppress(OSError):
        (folder / OWNER).write_text(json.dumps({"pid": os.getpid(), "began": _began(os.getpid()), "where": _where()}))


def disown(folder: Path) -> None:
    """Remove the mark, so that the folder is never swept."""
    (folder / OWNER).unlink(missing_ok=True)


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
        owner = json.loads(marked.read_text())
        pid, began, where = int(owner["pid"]), str(owner["began"]), list(owner["where"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # half written
    boot, namespace = _where()
    if where[:1] != [boot]:
        return bool(where) and where[1:] == [namespace] and boot != ""  # from before the last boot of this host
    return where == [boot, namespace] and _began(pid) != began


def _where() -> list[str]:
    """Boot id of this host and the pid namespace; empty if unknown."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return [boot, namespace]


def _began(pid: int) -> str:
    """Start time of a process in clock ticks since boot, as text; empty if it is gone. Distinguishes processes that
    reuse a pid."""
    try:
        return stat_fields(f"/proc/{pid}/stat")[19]
    except (OSError, IndexError):
        return ""
