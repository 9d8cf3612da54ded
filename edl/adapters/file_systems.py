"""Space and inodes of local file systems."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Size and free space of one file system. Free is what this user may use."""

    size_bytes: int
    free_bytes: int
    inodes: int
    """0: it does not count them."""
    free_inodes: int


def local_path(where: str) -> str:
    """The path of a directory that is given as a path or a URL; empty: it is not on a file system."""
    protocol, separator, rest = where.partition("://")
    if not separator:
        return where
    return rest if protocol == "file" else ""


def file_system(path: str) -> FileSystem:
    """The file system of a path that exists. Blocks, possibly for long. Raises ``OSError``."""
    found = os.statvfs(path)
    return FileSystem(
        size_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        inodes=found.f_files,
        free_inodes=found.f_favail,
    )


def look_at(path: str) -> FileSystem:
    """As ``file_system``, also before the path exists."""
    while True:
        try:
            return file_system(path)
        except FileNotFoundError:
            path, before = os.path.dirname(os.path.abspath(path)), path
            if path == before:
                raise
