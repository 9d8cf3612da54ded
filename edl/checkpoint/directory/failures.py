"""What went wrong with the checkpoint directory, in words: where, why, and what to do."""

from __future__ import annotations

import errno
import os

from edl.errors import CheckpointError
from edl.ports import Files

CHOOSE = "choose another --checkpoint-dir"


def cannot_write(files: Files, error: OSError, needed: int) -> CheckpointError:
    """Nothing could be written: names the path, the cause, the room that is needed and free, and what to do."""
    free = files.free_bytes()
    room = f"; it needs {amount(needed)}" if needed else ""
    room += f", {amount(free)} are free" if needed and free is not None else ""
    return CheckpointError(
        f"cannot write to the checkpoint directory {_place(files, error)}: {why(error)}{room}. {_advice(error)}"
    )


def cannot_read(files: Files, error: OSError) -> CheckpointError:
    """The directory could not be looked into."""
    return CheckpointError(
        f"cannot read the checkpoint directory {_place(files, error)}: {why(error)}. {_advice(error)}"
    )


def is_full(error: OSError) -> bool:
    """Whether there may be room later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def why(error: OSError) -> str:
    """The cause of an error without its number and path."""
    if error.errno == errno.EROFS:
        return "the file system is mounted read-only"
    if is_full(error):
        return "no room is left" if error.errno == errno.ENOSPC else "the quota is used up"
    return error.strerror or str(error) or type(error).__name__


def amount(count: int) -> str:
    """Bytes for people."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def _place(files: Files, error: OSError) -> str:
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    return f"{files.where} ({path})" if path and path.rstrip("/") != files.where.rstrip("/") else files.where


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"Free some room, keep fewer checkpoints (--checkpoint-keep), or {CHOOSE}"
        case errno.EFBIG:
            return f"Raise the limit on the size of a file (ulimit -f), or {CHOOSE}"
        case errno.EACCES | errno.EPERM:
            return f"Give the user this launcher runs as the right to write there, or {CHOOSE}"
        case errno.EROFS:
            return f"Mount it for writing, or {CHOOSE}"
        case errno.ENOTDIR | errno.EEXIST:
            return f"A file stands where a folder is needed: move it away, or {CHOOSE}"
        case _:
            return f"Look after that file system, or {CHOOSE}"
