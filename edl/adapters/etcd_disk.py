"""Disk space for etcd members: checks, reservations, and a limit on the log."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from edl.errors import StoreError

SEGMENT_BYTES = 64_000_000
"""etcd preallocates this much for each file of its write-ahead log, and always one file in advance."""
ROOM_BYTES = 8_000_000
"""Space kept free beside the write-ahead log for the growth of a member's data."""
NEEDED_BYTES = 2 * SEGMENT_BYTES + ROOM_BYTES
MB = 1_000_000
OTHERS = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm")))  # noqa: S108 -- what is made there belongs to the user
"""Fallback folders for a private store when the temporary directory has no room."""
MOST_LOG_BYTES = 8 << 20
KEPT_LOG_BYTES = 64 << 10
"""Bytes kept of the end of a member's log file."""


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user may still write there; None if unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def refuse_small(folder: Path) -> None:
    """Raise ``StoreError`` if the disk is so full that a new member would exit at once."""
    free = free_bytes(folder)
    if free is not None and free < SEGMENT_BYTES:
        raise StoreError(
            f"the embedded etcd needs {NEEDED_BYTES // MB} MB in {folder}, whose disk has {free / MB:.1f} MB left. "
            "Free some space, name a folder on another disk with TMPDIR or --rdzv-conf=data_dir=…, or use an etcd that "
            "runs elsewhere"
        )


def hold_back_spare(data_dir: Path) -> None:
    """Call before a member starts: keeps it from using the last free space for its next write-ahead log file.

    etcd allocates that file in advance. If there is no room for all of it, etcd keeps the part it got, then exits
    because its data cannot grow, at this and every later start. A folder in place of the file makes etcd continue
    without it. etcd tries again when it needs the file, or at the next start with enough room.
    """
    log = data_dir / "member" / "wal"
    spare = log / "0.tmp"
    with contextlib.suppress(OSError):
        for stale in log.glob("[1-9]*.tmp"):  # a starting member uses the first name
            stale.unlink()
        taken = spare.stat().st_blocks * 512 if spare.is_file() else 0
        free = free_bytes(log)
        if taken >= SEGMENT_BYTES or free is None:
            return
        if free + taken >= SEGMENT_BYTES + ROOM_BYTES:
            if spare.is_dir():
                spare.rmdir()
        elif not spare.is_dir():
            spare.unlink(missing_ok=True)
            spare.mkdir(mode=0o700)


def roomy_parent() -> Path:
    """The parent folder for a private store: the temporary directory, or a fallback with room if that has none."""
    usual = Path(tempfile.gettempdir())
    for parent in (usual, *OTHERS):
        free = free_bytes(parent)
        if (free is None or free >= NEEDED_BYTES) and os.access(parent, os.W_OK | os.X_OK):
            return parent
    return usual


def trim_log(path: Path) -> None:
    """Truncate a long log to its end; its writer appends, and continues at the new end."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MOST_LOG_BYTES:
            return
        with path.open("r+b") as file:
            file.seek(-KEPT_LOG_BYTES, os.SEEK_END)
            end = file.read()
            file.seek(0)
            file.truncate()
            file.write(end)
