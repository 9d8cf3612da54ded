"""The synchronised directories on this node's disk: scans, open files, and replacing files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import signal
import stat
from collections.abc import Callable, Collection, Iterator, Sequence

from edl.errors import CheckpointError
from edl.programs import LACKING
from edl.sync_dir.index import FileRecord, folders_above
from edl.sync_dir.settling import FileStamp, TreeScan
from edl.types import NodeId

PRIVATE = ".edl-sync"
"""Folder for edl's own files in each directory; it is not copied."""
BEFORE = ".edl-before"
"""Ending of files that were there before the job and had to make way for others, and of folders that may lack files of
a lost node; they are not copied."""
MOST_FILES = 20_000
"""Most files in all directories together: each scan looks at all of them."""
QUIET_S = 3.0
"""Seconds without a change after which a file counts as closed, where the file system has no leases."""
TICK_NS = 20_000_000
"""Most nanoseconds by which the kernel's times of files are behind its clock."""
READABLE = 0o400


class LocalChange(Exception):
    """A file has changed here and must not be replaced before that change is known."""


class SyncedTree:
    """The directories of ``--sync-dir`` on this node. Methods block; call them from one thread at a time, except
    ``locate``, ``stage`` and ``shared_with``."""

    def __init__(
        self, roots: Sequence[str], node: NodeId, life: str, now_ns: Callable[[], int], log: Callable[[str], None]
    ) -> None:
        """``roots``: absolute paths. ``life``: identifies this launcher. ``now_ns``: the clock of the file system."""
        self._roots = tuple(roots)
        self._node = node
        self._life = life
        self.now_ns = now_ns
        """The clock of the times of the files."""
        self._log = log
        self._skipped: set[str] = set()
        self._unreadable: set[str] = set()
        """Folders that this user may not read, since before the first scan."""
        self._leases = True
        self._devices: dict[str, int] = {}
        """The file system of each directory when it was opened."""

    def open(self) -> None:
        """Prepare the private folders. Raises ``CheckpointError`` if a directory cannot be written."""
        for root in self._roots:
            try:
                os.makedirs(self._staging(root), exist_ok=True)
                for name in os.listdir(self._staging(root)):  # left by an earlier launcher of this node
                    os.unlink(os.path.join(self._staging(root), name))
                with open(self._sign(root, self._node), "w") as file:
                    file.write(self._life)
                self._devices[root] = device_of(root)
            except OSError as error:
                raise CheckpointError(
                    f"--sync-dir={root}: cannot write there: {error.strerror}. Give this user a folder to write to"
                ) from error

    def close(self) -> None:
        """Remove the private folders of this node."""
        for root in self._roots:
            with contextlib.suppress(OSError):
                for name in os.listdir(self._staging(root)):
                    os.unlink(os.path.join(self._staging(root), name))
            for remove, path in (
                (os.unlink, self._sign(root, self._node)),
                (os.rmdir, self._staging(root)),
                (os.rmdir, os.path.join(root, PRIVATE)),
            ):
                with contextlib.suppress(OSError):
                    remove(path)

    def shared_with(self, node: NodeId, life: str) -> frozenset[int]:
        """Numbers of the directories that are the same ones on another node: its own file is here too."""
        return frozenset(number for number, root in enumerate(self._roots) if self._signed(root, node) == life)

    def names(self, numbers: Collection[int]) -> list[str]:
        """Paths of these directories."""
        return [self._roots[number] for number in sorted(numbers)]

    def check_space(self, records: Collection[FileRecord]) -> None:
        """Raise ``CheckpointError`` if the disk has no space for these files besides what it holds."""
        for number, root in enumerate(self._roots):
            needed = sum(record.size for record in records if record.path.startswith(f"{number}/"))
            found = os.statvfs(root)
            free = found.f_bavail * found.f_frsize
            if needed > free:
                raise CheckpointError(
                    f"no space for {needed} bytes in {root}: {free} are free. Training continues, but this node has no "
                    "copy of the newest files; make space"
                )

    def _signed(self, root: str, node: NodeId) -> str:
        with contextlib.suppress(OSError), open(self._sign(root, node)) as file:
            return file.read(100)
        return ""

    def _sign(self, root: str, node: NodeId) -> str:
        return os.path.join(root, PRIVATE, f"node-{node}")

    def _staging(self, root: str) -> str:
        return os.path.join(root, PRIVATE, f"arriving-{self._node}")

    def _refuse_lost_mount(self, root: str) -> None:
        """Raise ``OSError`` if the directory is gone, or is the mount point of a file system that is not mounted any
        more: its files would count as removed, and others would be put on the disk below. A file system that has been
        mounted again may have another number, but has the file of this node."""
        found = device_of(root)
        if found != self._devices.get(root, found) and self._signed(root, self._node) != self._life:
            raise OSError(errno.ESTALE, "another file system is there now. Mount the one of the start again", root)

    # --- looking -----------------------------------------------------------------------------------------------------

    def scan(self, *, first: bool = False) -> TreeScan:
        """Look at every file. Raises ``CheckpointError`` if there are too many, ``OSError`` if a directory is gone or
        cannot be read.

        ``first``: folders that this user may not read are skipped, now and later. One that becomes unreadable later is
        an error: without it, its files would count as removed, and be removed on all nodes."""
        files: dict[str, FileStamp] = {}
        begun_ns = self.now_ns() - TICK_NS
        for number, root in enumerate(self._roots):
            for path, entry in self._walk(root, str(number), first=first):
                with contextlib.suppress(FileNotFoundError):
                    files[path] = stamp_of(entry.stat(follow_symlinks=False))
                if len(files) > MOST_FILES:
                    raise CheckpointError(
                        f"--sync-dir={root}: more than {MOST_FILES} files. Name the folder of the checkpoints only"
                    )
            self._refuse_lost_mount(root)  # only now: it may be lost during the scan
        return TreeScan(files, begun_ns, self.now_ns())

    def _walk(self, folder: str, name: str, *, first: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
        top = "/" not in name
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            if top:
                raise
            return
        except PermissionError:
            if top or not (first or name in self._unreadable):
                raise
            self._unreadable.add(name)
            self._skip(name, folder, "a folder that this user may not read")
            return
        self._unreadable.discard(name)
        for entry in entries:
            path = f"{name}/{entry.name}"
            if (top and entry.name == PRIVATE) or BEFORE in entry.name:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(entry.path, path, first=first)
            elif entry.is_file(follow_symlinks=False) and _is_text(entry.name):
                yield path, entry
            else:
                kind = "a symbolic link" if entry.is_symlink() else "no regular file, or has a name that is not UTF-8"
                self._skip(path, entry.path, kind)

    def _skip(self, path: str, shown: str, kind: str) -> None:
        """Log once that something is not copied."""
        if path not in self._skipped:
            self._skipped.add(path)
            self._log(f"--sync-dir: {shown!a} is not copied: it is {kind}")

    def stamp(self, path: str) -> FileStamp | None:
        """The stamp of one file; None if there is none. Raises ``OSError``."""
        try:
            found = os.lstat(self.locate(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return stamp_of(found) if stat.S_ISREG(found.st_mode) else FileStamp(found.st_ino, -1, 0, 0)

    def in_use(self, path: str, stamp: FileStamp) -> bool:
        """Whether any process on this host has the file open for writing. Where the file system cannot tell: whether it
        has changed in the last ``QUIET_S`` seconds.

        The kernel grants a read lease only on a file that nobody writes. It is given back at once. A process that opens
        the file for writing meanwhile waits for that, and the signal about it is one that is ignored by default.
        """
        if not self._leases:
            return self.now_ns() - stamp.ctime_ns < QUIET_S * 1e9
        try:
            descriptor = os.open(self.locate(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return error.errno in LACKING  # it may well be open; the next look shows it
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return True
            self._leases = error.errno == errno.EACCES  # another user's file; else the file system has no leases
            return self.now_ns() - stamp.ctime_ns < QUIET_S * 1e9
        finally:
            os.close(descriptor)
        return False

    def _root_of(self, path: str) -> str:
        return self._roots[int(path.partition("/")[0])]

    def locate(self, path: str) -> str:
        """The path on this host. Raises ``CheckpointError`` for one that leads out of the directories."""
        number, _, name = path.partition("/")
        parts = name.split("/")
        known = number.isdecimal() and int(number) < len(self._roots)
        if not known or "\0" in name or {"", ".", ".."} & set(parts) or parts[0] == PRIVATE:
            raise CheckpointError(f"--sync-dir: {path[:200]!a} is not a path in a synchronised directory")
        root = self._roots[int(number)]
        folder = os.path.join(root, *parts[:-1])
        if os.path.realpath(folder) != os.path.join(os.path.realpath(root), *parts[:-1]):
            raise CheckpointError(f"--sync-dir: {folder} leads out of {root} through a symbolic link")
        return os.path.join(folder, parts[-1])

    # --- replacing ---------------------------------------------------------------------------------------------------

    def stage(self, path: str) -> str:
        """A path for a file's content until it is put in its place, on the same file system. Raises ``OSError``, and
        ``CheckpointError`` for a path in a folder that scans skip: the file would count as removed."""
        self.locate(path)
        for above in self._unreadable.intersection(folders_above(path)):
            raise CheckpointError(
                f"--sync-dir: the job has files in {self.locate(above)}, which this user may not read. Let it read "
                "that folder, or move the folder away"
            )
        root = self._root_of(path)
        self._refuse_lost_mount(root)
        folder = self._staging(root)
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, secrets.token_hex(8))

    def check(self, path: str, known: FileStamp | None) -> None:
        """Raise ``LocalChange`` if the file here is not the known one, ``OSError`` if its directory is not there."""
        self._refuse_lost_mount(self._root_of(path))
        found = self.stamp(path)
        same = found is None if known is None else known.same_file(found)
        if not same or (found is not None and self.in_use(path, found)):
            raise LocalChange(path)

    def put(self, record: FileRecord, staged: str) -> FileStamp:
        """Give a staged file its name, with the record's time and mode."""
        os.chmod(staged, record.mode | READABLE)
        os.utime(staged, ns=(record.mtime_ns, record.mtime_ns))
        target = self.locate(record.path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        stamp = stamp_of(os.lstat(staged))
        os.replace(staged, target)
        return stamp

    def set_mode(self, record: FileRecord) -> FileStamp:
        """Give a file that is here already the record's mode. Another user's file keeps its own."""
        target = self.locate(record.path)
        with contextlib.suppress(PermissionError):
            os.chmod(target, record.mode | READABLE)
        return stamp_of(os.lstat(target))

    def remove(self, path: str) -> None:
        """Remove a file, and the folders that become empty."""
        target = self.locate(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)
        root, folder = self._root_of(path), os.path.dirname(target)
        while folder != root:
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    def move_aside(self, path: str, why: str) -> None:
        """Rename a file or folder, so that it is neither replaced nor copied. ``why`` follows its name in the log. If
        it is gone, a node that shares the directory was first."""
        target = self.locate(path)
        for number in range(1, MOST_FILES):
            aside = f"{target}{BEFORE}" + (f".{number}" if number > 1 else "")
            if not os.path.lexists(aside):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(target, aside)
                    self._log(f"--sync-dir: {target} {why}: moved to {aside}")
                return


def device_of(root: str) -> int:
    """The number of the file system that a directory is on. Raises ``OSError``."""
    return os.stat(root).st_dev


def stamp_of(found: os.stat_result) -> FileStamp:
    """The stamp of a regular file."""
    return FileStamp(
        found.st_ino, found.st_size, found.st_mtime_ns, stat.S_IMODE(found.st_mode) & 0o777, found.st_ctime_ns
    )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
