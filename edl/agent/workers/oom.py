"""Detects processes killed by the kernel for lack of memory, which cannot report it themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
COUNTERS = Path("/proc/vmstat")


_KILLED = (-9, 128 + 9)
"""Exit statuses of a process killed by SIGKILL, and of a shell whose command was."""
_CHILD_KILLED = re.compile(r"\bkilled by signal: Killed\b|\bsignal: 9\b|\bSIGKILL\b")
"""How libraries report a killed child process, such as a worker of a data loader."""


def was_killed(exit_code: int, exception: str) -> bool:
    """Whether a worker, or a child process as its exception says, was killed by SIGKILL, as the kernel does for lack of
    memory."""
    return exit_code in _KILLED or bool(exit_code and _CHILD_KILLED.search(exception))


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Files of a control group, version 1 or 2."""

    events: Path
    limit: Path


class OutOfMemory:
    """Two counters of the kernel: for this process's control group, and for the host."""

    def __init__(self, group: ControlGroup | None = None, host: Path = COUNTERS) -> None:
        self._group = group or own_group()
        self._host = host
        self._seen = self._counts()

    def look(self) -> str:
        """What happened since the last check and what to do; empty for nothing or if unknown."""
        before, self._seen = self._seen, self._counts()
        group, host = (now - then for then, now in zip(before, self._seen, strict=True))
        if group > 0:
            limit = _read(self._group.limit).strip()
            size = f" of {int(limit) / 2**30:.1f} GiB" if limit.isdecimal() else ""
            return (
                f"out of memory: the kernel killed {_count(group)} in this container, whose limit{size} was "
                "reached. Raise the limit, or reduce the workers' memory use (batch size, loader processes)"
            )
        if host > 0:
            return (
                f"maybe out of memory: the kernel killed {_count(host)} on this host for lack of memory (dmesg names "
                "them). Reduce the workers' memory use (batch size, loader processes), or their number"
            )
        return ""

    def _counts(self) -> tuple[int, int]:
        return _counter(self._group.events), _counter(self._host)


def own_group(listed: str | None = None, root: Path = CGROUPS) -> ControlGroup:
    """The control group that limits this process's memory. ``listed``: text like /proc/self/cgroup."""
    listed = _read(Path("/proc/self/cgroup")) if listed is None else listed
    old = re.search(r"^\d+:(?:\w+,)*memory(?:,\w+)*:(.*)$", listed, re.MULTILINE)
    if old is not None:
        folder = root / "memory" / old[1].lstrip("/")
        return ControlGroup(folder / "memory.oom_control", folder / "memory.limit_in_bytes")
    new = re.search(r"^0::(.*)$", listed, re.MULTILINE)
    folder = root / (new[1].lstrip("/") if new is not None else "")
    return ControlGroup(folder / "memory.events", folder / "memory.max")


def _counter(file: Path) -> int:
    found = re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE)
    return int(found[1]) if found is not None else 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _count(number: int) -> str:
    return "a process" if number == 1 else f"{number} processes"
