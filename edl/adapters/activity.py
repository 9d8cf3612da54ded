"""Resource use of workers: evidence of progress for scripts that do not report their steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import psutil

from edl.ports import Activity


def activity(leaders: Collection[int]) -> dict[int, Activity]:
    """CPU time and I/O of each worker so far, together with all processes in its session. Blocks for some milliseconds;
    workers that are gone are left out, and so are all if this process has no descriptor left to look at them: a part
    of a sum would look like a worker that does nothing."""
    sessions: dict[int, list[psutil.Process]] = {leader: [] for leader in leaders}
    try:
        for pid in psutil.pids() if sessions else ():
            session = _session(pid)
            if session in sessions:
                with contextlib.suppress(psutil.Error):
                    sessions[session].append(psutil.Process(pid))
        return {leader: _sum(processes) for leader, processes in sessions.items() if processes}
    except OSError:
        return {}


def _session(pid: int) -> int:
    """A process's session; -1 if it is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _sum(processes: list[psutil.Process]) -> Activity:
    cpu_s, io_bytes = 0.0, 0
    for process in processes:
        # Zombies and other users' processes report only part of their use.
        with contextlib.suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            counters = process.io_counters()
            io_bytes += counters.read_chars + counters.write_chars
    return Activity(cpu_s, io_bytes)
