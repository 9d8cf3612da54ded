"""What an etcd member needs of its disk, and what it must not take."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from edl.errors import StoreError

SEGMENT_BYTES = 64_000_000
"""etcd reserves that much for each file of the log that it writes ahead, and always has one in advance."""
ROOM_BYTES = 8_000_000
"""What a member's data may grow by; left free beside the files of the log."""
NEEDED_BYTES = 2 * SEGMENT_BYTES + ROOM_BYTES
MB = 1_000_000
OTHERS = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm")))  # noqa: S108 -- what is made there belongs to the user
"""Where a private store may lie when the temporary directory has no room for it."""
MOST_LOG_BYTES = 8 << 20
KEPT_LOG_BYTES = 64 << 10
"""Of what a member says, at its end."""


def free_bytes(folder: Path) -> int | None:
    """What this user may still write there; None where nobody can tell."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def refuse_small(folder: Path) -> None:
    """Raises ``StoreError`` where a new member would end at once because its disk is full."""
    free = free_bytes(folder)
    if free is not None and free < SEGMENT_BYTES:
        raise StoreError(
            f"the embedded etcd needs {NEEDED_BYTES // MB} MB in {folder}, whose disk has {free / MB:.1f} MB left. "
            "Free some space, name a folder on another disk with TMPDIR or --rdzv-conf=data_dir=…, or use an etcd that "
            "runs elsewhere"
        )


def hold_back_spare(data_dir: Path) -> None:
    """Before a member starts: keep it from taking the last of a full disk for the next file of its write-ahead log.

    etcd allocates that file in advance. Where there is no room for all of it, etcd keeps the part it got, then ends
    because its data cannot grow, and so at each further start. A folder in the file's place makes etcd do without. It
    tries again when it needs the file, or at the next start with room.
    """
    log = data_dir / "member" / "wal"
    spare = log / "0.tmp"
    with contextlib.suppress(OSError):
        for stale in log.glob("[1-9]*.tmp"):  # a member that starts uses the first name
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
    """Where a private store goes: the temporary directory, or another one that has room where that has not."""
    usual = Path(tempfile.gettempdir())
    for parent in (usual, *OTHERS):
        free = free_bytes(parent)
        if (free is None or free >= NEEDED_BYTES) and os.access(parent, os.W_OK | os.X_OK):
            return parent
    return usual


def trim_log(path: Path) -> None:
    """Keep no more than the end of a long log; its writer appends, and goes on at the new end."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MOST_LOG_BYTES:
            return
        with path.open("r+b") as file:
            file.seek(-KEPT_LOG_BYTES, os.SEEK_END)
            end = file.read()
            file.seek(0)
            file.truncate()
            file.write(end)
