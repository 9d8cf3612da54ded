"""Events of a node's worker processes: reported by the fork server, and an event of the agent under the same
name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process and its whole process group run no more code. The kernel may still have to free what they hold;
    workers that are started from now on wait for that."""

    pid: int
    code: int
    """Exit status 0..255, or minus the number of the signal that ended it."""


@dataclass(frozen=True, slots=True)
class WorkerSuspended:
    """The process was stopped by a signal (SIGSTOP, SIGTSTP, a debugger)."""

    pid: int


@dataclass(frozen=True, slots=True)
class WorkerResumed:
    """A stopped process has been continued."""

    pid: int


@dataclass(frozen=True, slots=True)
class ForkServerLost:
    """The helper process that creates workers has died, and all its workers with it. It must be started again."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkersStopped:
    """All workers have been killed, or are about to be, for a reason unrelated to them. Their exit events follow."""

    reason: str


ProcessEvent = WorkerExited | WorkerSuspended | WorkerResumed | WorkersStopped | ForkServerLost
