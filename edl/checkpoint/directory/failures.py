"""Error messages for the checkpoint directory: path, cause and next action."""

from __future__ import annotations

import errno
import os

from edl.errors import CheckpointError
from edl.ports import Files
from edl.rendezvous.phrases import amount

CHOOSE = "choose another --checkpoint-dir"


def cannot_write(files: Files, error: OSError, needed: int) -> CheckpointError:
    """The error for a failed write: names the path, the cause, the needed and the free space (bytes), and what to
    do."""
    free = files.free_bytes()
    room = f"; it needs {amount(needed)}" if needed else ""
    room += f", with {amount(free)} free" if needed and free is not None else ""
    return CheckpointError(
        f"cannot write to the checkpoint directory {_place(files, error)}: {why(error)}{room}. {_advice(error)}"
    )


def cannot_read(files: Files, error: OSError) -> CheckpointError:
    """The error for a directory that cannot be listed or read."""
    return CheckpointError(
        f"cannot read the checkpoint directory {_place(files, error)}: {why(error)}. {_advice(error)}"
    )


def is_full(error: OSError) -> bool:
    """Whether the disk or the quota is full, so that a later try may succeed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def why(error: OSError) -> str:
    """The cause of an error, without its number and path."""
    if error.errno == errno.EROFS:
        return "the file system is mounted read-only"
    if is_full(error):
        return "no space is left" if error.errno == errno.ENOSPC else "the quota is used up"
    return error.strerror or str(error) or type(error).__name__


def _place(files: Files, error: OSError) -> str:
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    return f"{files.where} ({path})" if path and path.rstrip("/") != files.where.rstrip("/") else files.where


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"Free some space, keep fewer checkpoints (--checkpoint-keep), or {CHOOSE}"
        case errno.EFBIG:
            return f"Raise the file size limit (ulimit -f), or {CHOOSE}"
        case errno.EACCES | errno.EPERM:
            return f"Give this launcher's user write permission there, or {CHOOSE}"
        case errno.EROFS:
            return f"Mount it read-write, or {CHOOSE}"
        case errno.ENOTDIR | errno.EEXIST:
            return f"There is a file where a folder is needed: move it away, or {CHOOSE}"
        case _:
            return f"Check that file system, or {CHOOSE}"
