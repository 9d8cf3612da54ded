"""Files of lines in one folder: appended to whole or not at all, as far as the disk allows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 256 * 1024
"""Bytes that are read at once."""


class LineFolder:
    """Appends to files of a folder. All methods block on the disk and raise ``OSError``."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._torn: set[str] = set()
        """Files that end with a part of a line, because the disk was full and could not be asked to take it back."""

    def create(self, *, parents: bool) -> None:
        """Create the folder, unless it exists. ``parents``: also those above it. Without them, the folder of a disk
        that is not mounted any more is not created on another disk."""
        self._folder.mkdir(parents=parents, exist_ok=True)

    def files(self) -> dict[str, tuple[int, float]]:
        """Size in bytes and last modification, in seconds since 1970, of each file by name."""
        found = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        found[entry.name] = (stat.st_size, stat.st_mtime)
        return found

    def append(self, name: str, data: bytes) -> int:
        """Append to a file, which is created if necessary; returns its size in bytes. If that fails, the file stays as
        it was, or ends with a part of the data, which the next call completes to a line."""
        file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            before = os.fstat(file).st_size
            left = memoryview(b"\n" + data if name in self._torn else data)
            try:
                while left:
                    left = left[os.write(file, left) :]
            except OSError:
                try:
                    os.ftruncate(file, before)
                except OSError:
                    self._torn.add(name)
                raise
            self._torn.discard(name)
            return os.fstat(file).st_size
        finally:
            os.close(file)

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        (self._folder / name).unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """The whole content of a file."""
        return (self._folder / name).read_bytes()


def lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, the last one first, without their ends. Raises ``OSError``."""
    with path.open("rb") as file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            first, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from reversed([line for line in lines if line])
            end, rest = begin, first
        if rest:
            yield rest


def first_line(path: Path) -> bytes:
    """The first line of a file, without its end. Raises ``OSError``."""
    with path.open("rb") as file:
        return file.readline().rstrip(b"\n")
