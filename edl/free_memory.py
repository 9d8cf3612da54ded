"""How much memory a process can still allocate, whatever limits it. Loads nothing, since every worker imports it."""

from __future__ import annotations

import os
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that this process can allocate without swapping, limited by the machine and by its cgroups."""
    kilobytes = _field(_MACHINE, "MemAvailable:")
    if kilobytes is None:  # before Linux 3.14: what nobody uses, without the caches that could be freed
        kilobytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
    return min([kilobytes * 1024, *_left_in_cgroups(_CGROUPS, _cgroup_paths(_MEMBERSHIP))])


def _cgroup_paths(table: Path) -> dict[str, str]:
    """The process's cgroup path for each controller; version 2 has the empty name."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split(":", 2) for line in lines]
    return {name: path for _, names, path in (one for one in fields if len(one) == 3) for name in names.split(",")}


def _left_in_cgroups(root: Path, paths: dict[str, str]) -> list[int]:
    """Bytes left in each cgroup from the process's own up to the root."""
    kinds = [("", root, "memory.max", "memory.current", "inactive_file")]
    kinds += [("memory", root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")]
    left = []
    for controller, top, most, used, reclaimable in kinds:
        if controller not in paths:
            continue
        folder = top / paths[controller].lstrip("/")
        while True:
            limit, now = _number(folder / most), _number(folder / used)
            if limit is not None and now is not None:
                left.append(max(0, limit - now + (_field(folder / "memory.stat", reclaimable) or 0)))
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return left


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
