"""Process ancestry: by parent pid, and by environment variables inherited at start."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection


def families() -> dict[int, list[int]]:
    """The children of every visible process, by parent pid."""
    found: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The second field is a name in parentheses that may contain any character.
                parent = int(file.read().rpartition(b")")[2].split()[1])
            found.setdefault(parent, []).append(pid)
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
