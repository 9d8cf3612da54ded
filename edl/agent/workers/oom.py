"""Whether the kernel has killed a process for lack of memory: a worker that it has killed says nothing any more."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
COUNTERS = Path("/proc/vmstat")


@dataclass(frozen=True, slots=True)
class Group:
    """Files of a control group, of either version."""

    events: Path
    limit: Path


class OutOfMemory:
    """The kernel's two counters: that of the control group this process lives in, and that of the host."""

    def __init__(self, group: Group | None = None, host: Path = COUNTERS) -> None:
        self._group = group or own_group()
        self._host = host
        self._seen = self._counts()

    def look(self) -> str:
        """What has happened since the last look, and what to do; empty: nothing, or nobody tells."""
        before, self._seen = self._seen, self._counts()
        group, host = (now - then for then, now in zip(before, self._seen, strict=True))
        if group > 0:
            limit = _read(self._group.limit).strip()
            size = f" of {int(limit) / 2**30:.1f} GiB" if limit.isdecimal() else ""
            return (
                f"out of memory: the kernel has killed {_count(group)} in this container, whose limit{size} was "
                "reached. Raise the limit, or have workers hold less (batch size, loader processes)"
            )
        if host > 0:
            return (
                f"maybe out of memory: the kernel has killed {_count(host)} on this host for lack of it (dmesg names "
                "them). Have workers hold less (batch size, loader processes), or fewer of them"
            )
        return ""

    def _counts(self) -> tuple[int, int]:
        return _counter(self._group.events), _counter(self._host)


def own_group(listed: str | None = None, root: Path = CGROUPS) -> Group:
    """The control group that bounds this process's memory. ``listed``: as /proc/self/cgroup."""
    listed = _read(Path("/proc/self/cgroup")) if listed is None else listed
    old = re.search(r"^\d+:(?:\w+,)*memory(?:,\w+)*:(.*)$", listed, re.MULTILINE)
    if old is not None:
        folder = root / "memory" / old[1].lstrip("/")
        return Group(folder / "memory.oom_control", folder / "memory.limit_in_bytes")
    new = re.search(r"^0::(.*)$", listed, re.MULTILINE)
    folder = root / (new[1].lstrip("/") if new is not None else "")
    return Group(folder / "memory.events", folder / "memory.max")


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
