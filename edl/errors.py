"""Every error edl raises, as one tree, split by who has to act.

    EdlError
    ├── UsageError          the person who typed the command: fix the value named in the message
    │   ├── SettingError    one setting is out of range or contradicts another
    │   ├── ScriptError     the training script is missing or does not compile
    │   └── StateError      a script hands over state that cannot be kept, or commits out of step
    ├── JobConflict         the job: its id, rank or node id is in use by somebody with other settings
    ├── StoreError          the store
    │   ├── StoreUnavailable    no answer; it may or may not have happened; a retry helps
    │   │   └── StoreFull       it takes no writes until there is room
    │   ├── StoreRefused        the store answered "no" (credentials, TLS); a retry does not help
    │   ├── LeaseLost           the lease is gone for good; a new one is needed
    │   └── FencedOut           another Master holds the election key; this one must step down
    ├── PortInUse           an address this process must serve is taken
    ├── StateDiffers        ranks that should hold the same parameters do not
    ├── CheckpointError     what lies in the checkpoint directory cannot be used, or nothing can be written there
    ├── DataError           a data set changed, is damaged or missing, or its position does not fit it
    ├── PsError             a parameter server refused, cannot be reached, or has lost what a trainer needs
    ├── Killed              the kill switch is set
    ├── JobFailed           a job started from Python has failed: names who failed first, and how
    ├── WorkerStartError    a worker process could not be created
    │   └── StarterLost     the process that creates them is gone
    └── ProtocolError       a peer sent what it may not send; its stream is closed, ours goes on

Each carries the exit status a launcher ends with when nobody handles it. ``definite`` says whether the
failed action is known not to have happened; ``retry_helps`` whether trying again unchanged can succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edl.exit_codes import ExitCode


class EdlError(Exception):
    """Base of the tree; never raised itself."""

    exit_code: int = ExitCode.INTERNAL
    definite: ClassVar[bool] = True
    retry_helps: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        if type(self) is EdlError:
            raise TypeError("EdlError is a base class; raise one of its kinds")
        super().__init__(message)


class UsageError(EdlError):
    """The command line or the environment asks for something impossible."""

    exit_code = ExitCode.USAGE


class SettingError(UsageError):
    """One setting is wrong: names it, its value (None: is not to be shown), what is allowed, and what to do."""

    def __init__(self, setting: str, value: object, allowed: str, advice: str = "") -> None:
        self.setting = setting
        self.value = value
        self._allowed, self._advice = allowed, advice
        text = f"{setting}: {allowed}" if value is None else f"{setting}={value}: {allowed}"
        super().__init__(f"{text}. {advice}" if advice else text)

    def renamed(self, setting: str) -> SettingError:
        """The same about a setting that goes by another name here."""
        return SettingError(setting, self.value, self._allowed, self._advice)


class ScriptError(UsageError):
    """The training script is missing, unreadable or not valid Python."""


class StateError(UsageError):
    """A script's state holds something that cannot be kept, or its workers commit out of step."""


class JobConflict(EdlError):
    """This launcher does not fit the running job of the same id."""

    exit_code = ExitCode.JOB_CONFLICT


class ForeignJob(JobConflict):
    """The running job of this id is somebody else's, or runs something else."""

    exit_code = ExitCode.FOREIGN_JOB


class StoreError(EdlError):
    """The store did not do what was asked."""

    exit_code = ExitCode.STORE_UNREACHABLE


class StoreUnavailable(StoreError):
    """No endpoint answered in time. The write may have happened."""

    definite = False
    retry_helps = True


class StoreFull(StoreUnavailable):
    """The store answers and reads, and takes no writes until there is room. Nothing was written."""

    definite = True


class StoreRefused(StoreError):
    """The store answered and refused: wrong user, password or certificate."""


class LeaseLost(StoreError):
    """The lease has expired or was revoked; every key on it is gone."""


class FencedOut(StoreError):
    """A guarded write was refused because another Master has been elected since."""


class PortInUse(EdlError):
    """An address this process has to listen on is taken by another program."""

    exit_code = ExitCode.PORT_IN_USE


class StateDiffers(EdlError):
    """Ranks hold different values where all must be equal: names ranks and tensors."""

    exit_code = ExitCode.STATE_DIFFERS


class CheckpointError(EdlError):
    """A checkpoint is damaged, incomplete or another job's, or the checkpoint directory cannot be used."""

    exit_code = ExitCode.CHECKPOINT_UNUSABLE


class DataError(EdlError):
    """A data set is missing, damaged or not the one that a position belongs to: names the file or the difference."""

    exit_code = ExitCode.USAGE


class UnreachableData(DataError):
    """A file of a data set cannot be reached just now: a full table of descriptors, a lost mount, a network. Nothing is
    known against the file."""


class UnsupportedData(UsageError):
    """Sound data that cannot be handed out like this: names file, column and type, and what to do."""


class DataFunctionError(UsageError):
    """A function of the user's that reads or decodes data has raised."""


class PsError(EdlError):
    """A parameter server refused, or could not be reached: names table, key or server, and what to do."""


class SchedulerError(EdlError):
    """A scheduler could not be asked, or refused. ``retry``: whether to try again later."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class Killed(EdlError):
    """The kill switch is set: the job may not start."""

    exit_code = ExitCode.KILLED


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How one worker ended that should not have."""

    rank: int
    local_rank: int
    node: str
    round: int
    exit_code: int
    """Exit status, or minus the signal number."""
    what: str
    """In words: ``exit status 1``, ``was killed by SIGKILL``."""
    message: str = ""
    """Last line of its traceback, when there is one."""
    traceback: str = ""
    """All of it; the worker's last lines of stderr where there is none."""


class JobFailed(EdlError):
    """A job that was started from Python has failed. ``exit_code``: status of its launcher; ``failures``: of workers,
    the root cause first; none when the job failed for another reason."""

    def __init__(self, reason: str, exit_code: int, failures: Sequence[WorkerFailure] = ()) -> None:
        self.reason = reason
        self.exit_code = exit_code
        self.failures = tuple(failures)
        lines = [f"the job has failed: {reason} (exit status {exit_code})"]
        for index, failure in enumerate(self.failures):
            heading = "Root cause" if index == 0 else "then"
            place = f"rank {failure.rank} (local rank {failure.local_rank} on {failure.node}, round {failure.round})"
            lines.append(f"{heading}: {place} {failure.what}" + (f": {failure.message}" if failure.message else ""))
            if index == 0:
                lines += [f"    {line}" for line in failure.traceback.splitlines()]
        super().__init__("\n".join(lines))


class WorkerStartError(EdlError):
    """A worker process could not be created."""

    exit_code = ExitCode.CANNOT_START_WORKER


class StarterLost(WorkerStartError):
    """The process that creates workers has ended, and its workers with it: trouble of the node, not of the script."""


class ProtocolError(EdlError):
    """A peer broke the wire protocol."""
