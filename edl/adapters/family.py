"""Process ancestry: by parent pid, and by environment variables inherited at start."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection


def stat_fields(path: str) -> list[str]:
    """The fields of a ``stat`` file below ``/proc`` that follow the name in parentheses, which may contain any
    character: the first is field 3 of proc_pid_stat(5). Raises ``OSError`` if the process is gone."""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].decode().split()


def families() -> dict[int, list[int]]:
    """The children of every visible process, by parent pid."""
    found: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError):
            found.setdefault(int(stat_fields(f"/proc/{pid}/stat")[1]), []).append(pid)
    return found


def descendants(pid: int, families: dict[int, list[int]]) -> list[int]:
    """Children of a process, their children, and so on."""
    found = list(families.get(pid, ()))
    for one in found:
        found += families.get(one, ())
    return found


def members(group: int) -> list[int]:
    """Pids of the processes of a process group."""
    found = []
    for pid in _processes():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group:
                found.append(pid)
    return found


def started_with(variable: str, value: str) -> list[int]:
    """Pids of this user's processes that were started with this variable in their environment."""
    wanted, found = f"{variable}={value}".encode(), []
    for pid in _processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(pid)
    return found


def kill(pids: Collection[int]) -> None:
    """Send SIGKILL to each process; no error if one is gone or its pid now belongs to another user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
