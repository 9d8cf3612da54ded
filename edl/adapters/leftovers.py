"""Folders of launchers that were killed: private stores of up to a hundred megabytes, which nobody reads again.

Each folder says whose it is. Only those are removed whose process is certainly gone: one of another container that
shares the temporary directory is not to be seen from here, and left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

OWNER = "owner.json"


def own(folder: Path) -> None:
    """Note that this folder goes with this process. One that cannot be marked stays for good."""
    with contextlib.suppress(OSError):
        (folder / OWNER).write_text(json.dumps({"pid": os.getpid(), "began": _began(os.getpid()), "where": _where()}))


def disown(folder: Path) -> None:
    """It stays from now on, or goes with what is in it."""
    (folder / OWNER).unlink(missing_ok=True)


def sweep(parent: Path, names: str = "*", keep: int = 0) -> list[Path]:
    """Remove what this user's processes have left that are gone, but for the newest ``keep``; returns the folders.
    ``names``: pattern of those that are looked at."""
    left = sorted(
        (marked for marked in parent.glob(f"{names}/{OWNER}") if _is_ours(marked) and _is_left(marked)), key=_age
    )
    removed = [marked.parent for marked in left[: len(left) - keep]] if len(left) > keep else []
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _is_ours(marked: Path) -> bool:
    """Anybody may make a folder in the temporary directory, and leave a mark in it."""
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
        return bool(where) and where[1:] == [namespace] and boot != ""  # from before this host was started
    return where == [boot, namespace] and _began(pid) != began


def _where() -> list[str]:
    """In which life of which host, and which processes are seen here."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return [boot, namespace]


def _began(pid: int) -> str:
    """When a process was started; empty for one that is gone. Numbers of processes are given again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
