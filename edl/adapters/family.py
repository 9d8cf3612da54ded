"""Which processes come from which: as the kernel tells, and by what they were started with."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection


def families() -> dict[int, list[int]]:
    """The children of every process that can be seen."""
    found: dict[int, list[int]] = {}
    for pid in _processes():
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The second field is a name in parentheses that may hold anything.
                parent = int(file.read().rpartition(b")")[2].split()[1])
            found.setdefault(parent, []).append(pid)
    return found


def descendants(pid: int, families: dict[int, list[int]]) -> list[int]:
    """Children of a process, their children, and so on."""
    found = list(families.get(pid, ()))
    for one in found:
        found += families.get(one, ())
    return found


def started_with(variable: str, value: str) -> list[int]:
    """Processes of this user that have begun their program with this in their environment."""
    wanted, found = f"{variable}={value}".encode(), []
    for pid in _processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(pid)
    return found


def kill(pids: Collection[int]) -> None:
    """SIGKILL each of them; one that is gone, or somebody else's by now, is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
