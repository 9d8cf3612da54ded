"""Exit statuses of a launcher. Documented in docs/exit-codes.md; a test compares the two."""

from __future__ import annotations

import enum

START_OVER = 75
"""A worker of a job with parameter servers exits with this status (EX_TEMPFAIL) when its in-memory state is no longer
valid. It is started again; this does not count as a failure. No launcher exits with this status."""


class ExitCode(enum.IntEnum):
    """Exit status of ``python -m edl.launch`` and of the ``edl`` commands."""

    OK = 0
    """All workers of the last world exited with status 0."""
    WORKER_FAILED = 1
    """A worker failed and the restart budget was used up."""
    USAGE = 2
    """The command line, the environment or the script is wrong; nothing was started."""
    NOT_ENOUGH_NODES = 3
    """Fewer nodes than the job needs for longer than ``--recover-timeout``."""
    STORE_UNREACHABLE = 4
    """etcd was unreachable or refused the credentials."""
    JOB_CONFLICT = 5
    """Another launcher runs this job id with other settings, or holds the requested node rank or node id."""
    PORT_IN_USE = 6
    """Another program listens on an address that this launcher needs."""
    CANNOT_START_WORKER = 7
    """A worker process could not be created (program missing, not executable, no resources)."""
    CHECKPOINT_UNUSABLE = 8
    """``--checkpoint-dir`` contains checkpoints but none is usable, or the directory is not writable."""
    KILLED = 9
    """Kill switch: the job wrote a checkpoint and stopped, or it may not start while the switch is set."""
    INCOMPLETE = 10
    """All workers exited with status 0, but something was left out, such as unreadable data; the report names it."""
    STATE_DIFFERS = 11
    """Ranks hold different parameters or optimizer values, and ``--on-state-mismatch=stop`` is set; the report names
    ranks and tensors."""
    FOREIGN_JOB = 12
    """The job with this id has another owner, runs another script, or has other versions of edl, Python or the
    framework, and ``--allow-differences`` does not name the difference; it cannot allow another edl."""
    INTERNAL = 70
    """A bug in edl; the message asks for a report."""
    INTERRUPTED = 130
    """Ended by SIGINT, after an orderly shutdown."""
    TERMINATED = 143
    """Ended by SIGTERM or a preemption notice while the job is unfinished: it waits for another node, or this node
    was the last one or too slow to leave in time. A node that the job continues without exits with
    ``--drained-exit-code``."""
