"""The exceptions that edl raises::

    EdlError
    ├── UsageError          the user: fix the value named in the message
    │   ├── SettingError    a setting is out of range or contradicts another
    │   ├── ScriptError     the training script is missing or does not compile
    │   ├── StateError      the script's state cannot be saved, or its workers commit out of step
    │   ├── UnsupportedData     the data has a type that cannot be served
    │   └── DataFunctionError   a user function that reads or decodes data raised an exception
    ├── JobConflict         the job's id, rank or node id is in use with other settings
    │   └── ForeignJob      the job's id is in use by another owner, script or software version
    ├── StoreError          a call to the store failed
    │   ├── StoreUnavailable    no answer; the call may or may not have taken effect; retrying helps
    │   │   └── StoreFull       no writes until space is freed
    │   ├── StoreRefused        the store rejected the call (credentials, TLS); retrying does not help
    │   ├── LeaseLost           the lease is gone for good; a new one is needed
    │   └── FencedOut           another Master holds the election key; this one must step down
    ├── PortInUse           an address this process must serve is taken
    ├── StateDiffers        ranks that should hold the same parameters do not
    ├── CheckpointError     a checkpoint cannot be used, or the checkpoint directory cannot be written
    ├── DataError           a data set changed, is damaged or missing, or a saved position does not fit it
    │   └── UnreachableData     a data file cannot be reached at the moment; retrying may help
    ├── PsError             a parameter server refused, is unreachable, or lost rows that a trainer needs
    ├── SchedulerError      a scheduler is unreachable or refused
    ├── NotificationError   a notification could not be delivered
    ├── DenylistError     the directory of the denylist cannot be read or written
    ├── Killed              the kill switch is set
    ├── JobFailed           a job started from Python has failed; names the root cause
    ├── WorkerStartError    a worker process could not be created
    │   └── StarterLost     the fork server has died
    └── ProtocolError       a peer violated the protocol; its stream is closed, this process continues

Each class carries the launcher's exit status for the case that the error is not handled. ``definite`` says whether the
failed action is known not to have happened, ``job_over`` whether it means that the job has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edl.exit_codes import ExitCode


class EdlError(Exception):
    """Base class of all edl errors. Instantiating it directly raises ``TypeError``."""

    exit_code: int = ExitCode.INTERNAL
    definite: ClassVar[bool] = True
    job_over: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        if type(self) is EdlError:
            raise TypeError("EdlError is a base class; raise one of its kinds")
        super().__init__(message)


class UsageError(EdlError):
    """The command line or the environment requests something impossible."""

    exit_code = ExitCode.USAGE


class SettingError(UsageError):
    """One setting is wrong: names it, its value (None if it must not be shown), what is allowed, and what to do."""

    def __init__(self, setting: str, value: object, allowed: str, advice: str = "") -> None:
        self.setting = setting
        self.value = value
        self._allowed, self._advice = allowed, advice
        text = f"{setting}: {allowed}" if value is None else f"{setting}={value}: {allowed}"
        super().__init__(f"{text}. {advice}" if advice else text)

    def renamed(self, setting: str) -> SettingError:
        """The same error with the name that the caller uses for this setting."""
        return SettingError(setting, self.value, self._allowed, self._advice)


class ScriptError(UsageError):
    """The training script is missing, unreadable or not valid Python."""


class StateError(UsageError):
    """A script's state cannot be saved, or its workers commit out of step."""


class JobConflict(EdlError):
    """This launcher does not match the running job with the same id."""

    exit_code = ExitCode.JOB_CONFLICT


class ForeignJob(JobConflict):
    """The running job with this id has another owner, or runs another script or other versions."""

    exit_code = ExitCode.FOREIGN_JOB


class StoreError(EdlError):
    """A call to the store failed."""

    exit_code = ExitCode.STORE_UNREACHABLE


class StoreUnavailable(StoreError):
    """No endpoint answered in time. A write may have taken effect."""

    definite = False


class StoreFull(StoreUnavailable):
    """The store serves reads, but refuses writes until space is freed. Nothing was written."""

    definite = True


class StoreRefused(StoreError):
    """The store rejected the call: wrong user, password or certificate."""


class LeaseLost(StoreError):
    """The lease has expired or was revoked; all keys attached to it are gone."""


class FencedOut(StoreError):
    """A guarded write was refused because another Master has been elected since."""


class PortInUse(EdlError):
    """Another program listens on an address that this process needs."""

    exit_code = ExitCode.PORT_IN_USE


class StateDiffers(EdlError):
    """Ranks hold different values where all must be equal; names the ranks and tensors."""

    exit_code = ExitCode.STATE_DIFFERS


class CheckpointError(EdlError):
    """A checkpoint is damaged, incomplete or from another job, or the checkpoint directory cannot be used."""

    exit_code = ExitCode.CHECKPOINT_UNUSABLE


class DataError(EdlError):
    """A data set is missing, damaged, or not the one that a saved position belongs to; names the file or the
    difference."""

    exit_code = ExitCode.USAGE


class UnreachableData(DataError):
    """A data file cannot be reached at the moment: no free file descriptors, a lost mount, a network failure. The file
    itself may be intact."""


class UnsupportedData(UsageError):
    """The data is intact but has a type that cannot be served; names file, column and type, and what to do."""


class DataFunctionError(UsageError):
    """A user function that reads or decodes data raised an exception."""


class PsError(EdlError):
    """A parameter server refused or is unreachable; names table, key or server, and what to do."""


class SchedulerError(EdlError):
    """A scheduler is unreachable or refused. ``retry``: whether trying again later may succeed."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class NotificationError(EdlError):
    """A notification could not be delivered. ``retry``: whether trying again later may succeed. The text contains no
    part of the channel's address that may be secret."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class DenylistError(EdlError):
    """The directory of the denylist cannot be read or written."""

    exit_code = ExitCode.USAGE


class Killed(EdlError):
    """The kill switch is set, so the job may not start."""

    exit_code = ExitCode.KILLED


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How one worker failed."""

    rank: int
    local_rank: int
    node: str
    round: int
    exit_code: int
    """Exit status (0 … 255), or the negative signal number."""
    what: str
    """As text: ``exit status 1``, ``was killed by SIGKILL``."""
    message: str = ""
    """Last line of its traceback; empty without one."""
    traceback: str = ""
    """The whole traceback; without one, the last lines of the worker's stderr."""


class JobFailed(EdlError):
    """A job started from Python has failed. ``exit_code``: its launcher's exit status. ``failures``: failed workers,
    root cause first; empty when the job failed for another reason."""

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
    """The fork server has died, and the workers with it. A problem of the node, not of the script."""


class ProtocolError(EdlError):
    """A peer violated the wire protocol."""
