"""The child processes of a fork server: detects their ends and stops, and kills whole process groups.

Every change of a child raises SIGCHLD, after which ``watch`` is called. Besides, it is called every ``POLL_S`` seconds
while there are workers: the end of a large one is visible long before SIGCHLD (``edl.worker.exiting``), and the other
workers should not wait for that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from edl.adapters import family
from edl.wire.process_events import WorkerExited, WorkerResumed, WorkerSuspended
from edl.worker import exiting, linux

GROUP_TIMEOUT_S = 5.0
"""Seconds for which a worker's end is held back until the rest of its killed group runs no more code."""
POLL_S = 0.05
"""Seconds between two looks for workers that run no more code but cannot be reaped yet."""
_DESTROY_TIMEOUT_S = 10.0
"""Seconds that ``destroy`` waits until all killed processes are reaped."""
_WAKES_THE_STOPPED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}

WorkerChange = WorkerExited | WorkerSuspended | WorkerResumed


@dataclass(slots=True)
class _Ending:
    """A worker that runs no more code, while members of its group may still do."""

    code: int
    deadline_s: float


class ChildProcesses:
    """Workers, and helpers that are not (yet) workers, by pid. All are children and session leaders."""

    def __init__(self) -> None:
        self._suspended: dict[int, bool] = {}
        self._helpers: set[int] = set()
        self._ending: dict[int, _Ending] = {}
        self._killed: set[int] = set()
        self._unreaped: set[int] = set()
        """Workers that run no more code but still hold memory and devices."""

    def add(self, pid: int) -> None:
        """Add a new worker, or a helper that becomes one."""
        self._helpers.discard(pid)
        self._suspended[pid] = False

    def add_helper(self, pid: int) -> None:
        """Add a process that is reaped without a report."""
        self._helpers.add(pid)

    def kill_helper(self, pid: int) -> None:
        """Send SIGKILL to a helper; no effect if it has ended."""
        if pid in self._helpers:
            _kill_group(pid, signal.SIGKILL)

    def timeout_s(self) -> float | None:
        """Seconds after which ``watch`` must be called even without an event; None for never."""
        if self._suspended or self._unreaped:
            return POLL_S
        if not self._ending:
            return None
        return max(0.0, min(ending.deadline_s for ending in self._ending.values()) - time.monotonic())

    @property
    def has_workers(self) -> bool:
        """Whether there is a worker that ``kill_workers`` has not killed."""
        return bool(self._suspended.keys() - self._killed)

    def not_gone(self) -> tuple[int, ...]:
        """The processes of ended workers that still hold memory and devices."""
        return tuple(sorted({pid for group in self._unreaped for pid in (group, *family.members(group))}))

    def kill_workers(self) -> None:
        """Send SIGKILL to all workers and all their descendants, in any session. Standbys survive."""
        for pid in self._suspended:
            _kill_group(pid, signal.SIGSTOP)  # stop them while we look for their descendants
        families = family.families()
        for pid in self._suspended:
            _kill_group(pid, signal.SIGKILL)
            family.kill((pid, *family.descendants(pid, families)))
        self._killed = set(self._suspended)

    def watch(self) -> list[WorkerChange]:
        """Events of workers since the last call. Never blocks."""
        changes: list[WorkerChange] = []
        for pid in self._suspended:
            changes += self._stops(pid)
        while True:
            try:
                # Inspected without reaping: until then neither pid nor group can be reused.
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if info is None:
                break
            self._reap(info.si_pid, info.si_status if info.si_code == os.CLD_EXITED else -info.si_status)
        for pid in tuple(self._suspended):
            code = exiting.exit_code(pid)
            if code is not None:
                _kill_group(pid, signal.SIGKILL)
                self._unreaped.add(pid)
                self._end(pid, code)
        return changes + self._ended()

    def _stops(self, pid: int) -> list[WorkerChange]:
        with contextlib.suppress(ChildProcessError):
            info = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            if info is not None:
                suspended = info.si_code != os.CLD_CONTINUED
                changed = suspended != self._suspended[pid]
                self._suspended[pid] = suspended
                if changed:
                    return [WorkerSuspended(pid) if suspended else WorkerResumed(pid)]
        return []

    def _reap(self, pid: int, code: int) -> None:
        """Kill the rest of a dead child's group and reap the child."""
        known = pid in self._suspended or pid in self._helpers or pid in self._unreaped
        if known:
            _kill_group(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self._helpers.discard(pid)
        self._unreaped.discard(pid)
        if pid in self._suspended:
            self._end(pid, code)

    def _end(self, pid: int, code: int) -> None:
        """Hold back a worker's end until its killed group runs no more code either."""
        del self._suspended[pid]
        self._killed.discard(pid)
        self._ending[pid] = _Ending(code, time.monotonic() + GROUP_TIMEOUT_S)

    def _ended(self) -> list[WorkerChange]:
        ended: list[WorkerChange] = []
        for pid, ending in list(self._ending.items()):
            stopped = exiting.group_has_stopped(pid) if pid in self._unreaped else not _group_is_left(pid)
            if stopped or time.monotonic() >= ending.deadline_s:
                del self._ending[pid]
                ended.append(WorkerExited(pid, ending.code))
        return ended

    def signal(self, pid: int, number: int) -> None:
        """Signal a worker's group; no effect if it has ended. A stopped worker is continued so that it can react."""
        if pid not in self._suspended:
            return
        if not _kill_group(pid, number):
            # It has just been forked and does not lead its group yet; being unreaped, the pid is still ours.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if self._suspended[pid] and number in _WAKES_THE_STOPPED:
            _kill_group(pid, signal.SIGCONT)

    def dump(self, pid: int, number: int) -> str:
        """Make a worker write its stacks. Returns why it was not possible; "" on success or if the worker has ended."""
        if self.forward(pid, number):
            return ""
        return f"no stacks of process {pid}: it has not reached its script yet, or now runs another program"

    def forward(self, pid: int, number: int) -> bool:
        """Signal a single worker if it has a handler for the signal, which would kill it otherwise. Returns whether it
        has a handler or has ended."""
        if pid not in self._suspended:
            return True
        if not _catches(pid, number):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def destroy(self) -> None:
        """Send SIGKILL to all workers, helpers and adopted orphans, and reap them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        for pid in (*self._suspended, *self._helpers):
            _kill_group(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _DESTROY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            # Orphans of orphans are adopted one generation at a time, so each pass looks again.
            for pid in linux.children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                return
            signal.sigtimedwait({signal.SIGCHLD}, 0.2)


def _kill_group(pid: int, number: int) -> bool:
    """Signal a group; returns whether it exists."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        # A member runs as another user; the others have received the signal.
        return True
    return True


def _group_is_left(group: int) -> bool:
    """Whether a child of this process, including adopted orphans, belongs to the group."""
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _catches(pid: int, number: int) -> bool:
    """Whether the process has its own handler for a signal; False when it is gone."""
    try:
        # As bytes: the kernel cuts a process's name after 15 of them, also in the middle of a character.
        with open(f"/proc/{pid}/status", "rb") as file:
            mask = next((line.split()[1] for line in file if line.startswith(b"SigCgt:")), b"0")
    except OSError:
        return False
    return bool(int(mask, 16) >> (number - 1) & 1)
