"""What a launcher's exit status means. Documented in docs/exit-codes.md; a test keeps the two in step."""

from __future__ import annotations

import enum

BEGIN_ANEW = 75
"""With this status (EX_TEMPFAIL) a worker of a job with parameter servers asks to be started again: what it has in its
memory is of no use any more. It is no failure, and no launcher ends with it."""


class ExitCode(enum.IntEnum):
    """Exit status of ``python -m edl.launch`` and of the ``edl`` commands."""

    OK = 0
    """Every worker of the last world ended with status 0."""
    WORKER_FAILED = 1
    """A worker failed and the restart budget was spent."""
    USAGE = 2
    """The command line, the environment or the script is wrong; nothing was started."""
    NOT_ENOUGH_NODES = 3
    """Fewer nodes than the job needs for longer than ``--recover-timeout``."""
    STORE_UNREACHABLE = 4
    """The etcd endpoint could not be reached, or refused the credentials."""
    JOB_CONFLICT = 5
    """Another launcher runs this job id with other settings, or holds the node rank or node id asked for."""
    PORT_IN_USE = 6
    """An address that this launcher must serve is taken by another program."""
    CANNOT_START_WORKER = 7
    """A worker process could not be created (program missing, not executable, no resources)."""
    CHECKPOINT_UNUSABLE = 8
    """Checkpoints lie in ``--checkpoint-dir`` and none of them can be used, or the directory cannot be written."""
    KILLED = 9
    """The kill switch: the job wrote a checkpoint and stopped, or may not start while the switch is set."""
    INCOMPLETE = 10
    """Every worker ended with status 0, but something was left out, such as data that nobody could read; the report
    names it."""
    STATE_DIFFERS = 11
    """Ranks hold different parameters or optimizer values, and ``--on-state-mismatch=stop``; the report names ranks and
    tensors."""
    FOREIGN_JOB = 12
    """The job of this id has another owner, runs another script, or has other versions of edl, Python or the framework,
    and ``--allow-differences`` does not name that."""
    INTERNAL = 70
    """A defect in edl; the message asks for a report."""
    INTERRUPTED = 130
    """Ended by SIGINT, in good order."""
    TERMINATED = 143
    """Ended by SIGTERM or a notice, and the job is not done: it waits for another node, or this one was the last, or
    too slow. A node that the job goes on without ends with ``--drained-exit-code``."""
