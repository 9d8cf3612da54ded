"""Whether processes run, from ``/proc``."""

from __future__ import annotations

from collections.abc import Collection

from edl.adapters.family import stat_fields
from edl.ports import RunState

_STOPPED = ("T", "t")
"""States of a process that a signal or a debugger has stopped."""


def run_states(pids: Collection[int]) -> dict[int, RunState]:
    """The states of these processes at this moment; those that are gone are left out. Takes some microseconds each."""
    found: dict[int, RunState] = {}
    for pid in pids:
        try:
            state = stat_fields(f"/proc/{pid}/stat")[0]
        except (OSError, IndexError):
            continue
        found[pid] = RunState(state in _STOPPED, _starved_s(pid))
    return found


def _starved_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0  # a kernel without the accounts
