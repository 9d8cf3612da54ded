"""``Files`` in a folder of a local or shared file system."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from edl.ports import FileEntry

TEMPORARY = ".tmp"
"""Suffix of a file that is still being written."""


class PlainFiles:
    """``Files`` below a path. Each file is written under a temporary name, synced, and then renamed."""

    remote = False

    def __init__(self, folder: str | Path) -> None:
        self.where = str(folder)
        self._root = os.path.abspath(folder)

    def path(self, name: str) -> str:
        """The full path of a name."""
        return os.path.join(self._root, name) if name else self._root

    def entries(self, folder: str = "") -> list[FileEntry]:
        """The direct content of a folder, sorted by name; empty when there is no such folder."""
        try:
            with os.scandir(self.path(folder)) as listing:
                found = [_entry(entry) for entry in listing]
        except FileNotFoundError:
            return []
        return sorted(filter(None, found), key=lambda entry: entry.name)

    def stamp(self, name: str) -> str:
        """Empty when there is no such file, else a text that changes when the file is rewritten or touched."""
        try:
            return _stamp(os.stat(self.path(name)))
        except FileNotFoundError:
            return ""

    def read(self, name: str) -> bytes:
        """The content of a small file. Raises ``FileNotFoundError``."""
        with open(self.path(name), "rb") as file:
            return file.read()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from ``offset`` on; returns the bytes read, fewer only at the end of the file."""
        done = 0
        descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
        finally:
            os.close(descriptor)
        return done

    def write(self, name: str, pieces: Iterable[bytes | memoryview], *, new: bool = False) -> str:
        """Write a whole file, creating its folders: it appears complete, or not at all. Returns its stamp."""
        with new_file(self.path(name), replace=not new) as descriptor:
            for piece in pieces:
                write_all(descriptor, piece)
            os.fsync(descriptor)
            return _stamp(os.fstat(descriptor))

    def forget(self, name: str) -> None:
        """Drop the file from the page cache."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def sync(self, folder: str) -> None:
        """Sync everything in this folder to disk, as far as this host can."""
        for entry in self.entries(folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.link:
                continue  # what it leads to is not of this folder
            if entry.folder:
                self.sync(name)
            else:
                _sync(self.path(name), os.O_RDONLY)
        _sync_folder(self.path(folder))

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder, durably; no error if it does not exist."""
        path = self.path(name)
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.rmdir(path)
            else:
                os.unlink(path)
            _sync_folder(os.path.dirname(path))
        except FileNotFoundError:
            return

    def free_bytes(self) -> int | None:
        """Free bytes for this user on the folder's file system, also before the folder exists; None if unknown."""
        path = self._root
        while True:
            try:
                status = os.statvfs(path)
            except FileNotFoundError:
                path = os.path.dirname(path)
            except OSError:
                return None
            else:
                return status.f_bavail * status.f_frsize


def _entry(entry: os.DirEntry[str]) -> FileEntry | None:
    """None for one that was removed since it was listed."""
    link = entry.is_symlink()
    try:
        folder = entry.is_dir()
        return FileEntry(entry.name, 0 if folder else entry.stat().st_size, folder, link)
    except FileNotFoundError:
        return FileEntry(entry.name, 0, link=True) if link else None  # it leads nowhere, and can be removed


@contextlib.contextmanager
def new_file(target: str, *, replace: bool = False) -> Iterator[int]:
    """A descriptor for writing a file, which the block has to sync. After the block the file gets its name, durably; if
    the block raises, nothing is left of it. Creates its folders. ``replace``: replace a file that has the name by then,
    instead of raising ``FileExistsError``."""
    folder = os.path.dirname(target)
    _make_folder(folder)
    temporary = f"{target}.{secrets.token_hex(4)}{TEMPORARY}"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        (os.replace if replace else _publish)(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_ino}:{status.st_mtime_ns}:{status.st_size}"


def write_all(descriptor: int, piece: bytes | memoryview) -> None:
    """Write all of it. Raises ``OSError``."""
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _make_folder(path: str) -> None:
    """Create a folder and its parents, each synced in its parent."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    except FileNotFoundError:
        pass
    _make_folder(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):  # another node was faster; the path may still not be a folder
        os.mkdir(path)
    _sync_folder(os.path.dirname(path))
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def _sync_folder(path: str) -> None:
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise


def _sync(path: str, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(temporary: str, target: str) -> None:
    """Give a file its name unless another has it. Raises ``FileExistsError``."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.replace(temporary, target)
    else:
        os.unlink(temporary)
