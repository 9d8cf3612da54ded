"""Processes that run no more code while the kernel still frees their memory and closes their devices.

That takes up to a second for each gigabyte of small pages, and longer for the memory of an accelerator. Only then does
a parent learn of the end (``waitpid``), and are sockets closed. ``/proc`` shows it from the start: fields and flags are
those of proc_pid_stat(5), and ``PF_EXITING`` of ``include/linux/sched.h``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

from edl.adapters import family

_PF_EXITING = 0x4
_FLAGS, _EXIT_CODE = 6, 49
"""Positions among the fields after the process name: fields 9 and 52."""
_PAUSE_S = 0.01


def exit_code(pid: int) -> int | None:
    """Minus the number of the signal that has killed a process, or its exit status, once it runs no more code.

    None if it still runs, or has ended with status 0: then nobody is in a hurry, and 0 is also what the kernel shows to
    those who may not know.
    """
    fields = _fields(f"/proc/{pid}/stat")
    if not _exits(fields) or not int(fields[_EXIT_CODE]):
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])) if has_stopped_running(pid) else None


def has_stopped_running(pid: int) -> bool:
    """Whether no thread of a process runs code any more; true for one that is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    found = (_fields(f"/proc/{pid}/task/{thread}/stat") for thread in threads)
    return all(_exits(fields) for fields in found if fields)


def group_has_stopped(group: int) -> bool:
    """Whether no process of a process group runs code any more."""
    return all(map(has_stopped_running, family.members(group)))


def wait_until_gone(
    pids: Collection[int],
    limit_s: float,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> set[int]:
    """Wait until these exiting processes are gone, with all that they held; returns those that are left after
    ``limit_s`` seconds. A pid that has been given to another process counts as gone."""
    left, until_s = set(pids), clock_s() + limit_s
    while left := {pid for pid in left if _exits(_fields(f"/proc/{pid}/stat"))}:
        if clock_s() >= until_s:
            break
        sleep(_PAUSE_S)
    return left


def _fields(path: str) -> list[str]:
    """See ``family.stat_fields``; empty if the process is gone."""
    try:
        return family.stat_fields(path)
    except OSError:
        return []


def _exits(fields: list[str]) -> bool:
    return bool(fields) and bool(int(fields[_FLAGS]) & _PF_EXITING)
