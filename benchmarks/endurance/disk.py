"""A file system of a given size, and its usage."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MB = 1_000_000
LOGS, TEMPORARY, CHECKPOINTS = "logs", "tmp", "checkpoints"
PARTS = (LOGS, TEMPORARY, CHECKPOINTS)
"""Folders on the disk. The members of the store keep their data in the temporary directory, which is ``tmp`` here."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of the disk. Sizes in bytes, counted in allocated blocks."""

    parts: dict[str, int]
    free: int
    used: int
    files: int


@dataclass(frozen=True, slots=True)
class Disk:
    """``bounded``: whether the kernel enforces its size. ``kind``: the kind of file system."""

    folder: Path
    kind: str
    size_bytes: int
    bounded: bool

    def usage(self) -> Usage:
        """The current usage. Files may appear and disappear during the scan."""
        parts, files = dict.fromkeys(PARTS, 0), 0
        for part in PARTS:
            for folder, _, names in os.walk(self.folder / part):
                files += len(names)
                parts[part] += sum(_blocks(os.path.join(folder, name)) for name in names)
        if not self.bounded:
            used = sum(parts.values())
            return Usage(parts, max(0, self.size_bytes - used), used, files)
        found = os.statvfs(self.folder)
        return Usage(parts, found.f_bavail * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize, files)


def _blocks(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


@contextlib.contextmanager
def small_disk(size_mb: int) -> Iterator[Disk]:
    """A new file system with the folders ``PARTS``: ext4 in a file, else in memory, else a plain folder, which is only
    watched. It is deleted afterwards."""
    parent = Path(tempfile.mkdtemp(prefix="edl-endurance-"))
    folder = parent / "disk"
    folder.mkdir()
    size = size_mb * MB
    try:
        kind = _mount(parent / "image", folder, size)
        for part in PARTS:
            (folder / part).mkdir()
        try:
            yield Disk(folder, kind or "a plain folder, since none may be mounted here", size, bool(kind))
        finally:
            if kind:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _mount(image: Path, folder: Path, size: int) -> str:
    with image.open("wb") as file:
        file.truncate(size)
    # No space reserved for root, who may run this.
    if _done("mkfs.ext4", "-q", "-m", "0", str(image)) and _done("mount", "-o", "loop", str(image), str(folder)):
        return "ext4 in a file"
    image.unlink()
    return "tmpfs" if _done("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)) else ""


def _done(*command: str) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False
