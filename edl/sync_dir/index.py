"""The versions of the files that one node knows, in the order in which it got them.

Each node numbers its changes. Another node asks for the changes after the last one that it has, fetches the files, and
shows all of them at once: so it always shows an earlier moment of that node. By path, the highest version wins,
whatever the order of arrival. Clocks of different hosts are compared only for files that are older than the job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from edl.types import NodeId


@dataclass(frozen=True, slots=True, order=True)
class FileVersion:
    """A version of one path; a larger one replaces a smaller one."""

    counter: int
    """Higher than that of every version that the writing node knew, and of all that were written before its round. 0:
    the file is older than its node's launcher; 1: the first workers have started with it."""
    mtime_ns: int
    """Of these old files the time of the last change by the clock of its host, else 0."""
    node: NodeId
    """The node that wrote it; decides between versions of a round that did not know each other."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file in one version."""

    path: str
    """Number of its directory, then the path in it, with ``/`` between the parts. With a ``/`` at its end: a folder
    that has been set aside, with all that was in it before this version."""
    version: FileVersion
    size: int
    mtime_ns: int
    mode: int
    """Permission bits."""
    removed: bool = False
    """In this version there is no file; size and time are those of the last one that its node knew."""
    appeared_ns: int = 0
    """When the node of this version noticed the first file of that name, by its clock. 0: another node had one before,
    or it is older than the node's launcher."""

    @property
    def writer(self) -> NodeId | None:
        """The node that made this version; None if that is not known, as of files that are older than the launchers."""
        return self.version.node if self.version.counter > 1 else None

    @property
    def folder(self) -> str:
        """The folder that has been set aside; empty if the record is about a file."""
        return self.path[:-1] if self.path.endswith("/") else ""

    def same_content(self, other: FileRecord) -> bool:
        """Whether both describe the same bytes: copies keep the time of the last change."""
        return (self.size, self.mtime_ns, self.removed) == (other.size, other.mtime_ns, other.removed)


_IN_A_ROUND = 2**32
"""More versions than a round can have."""


class FileIndex:
    """What one node has. Changes are numbered from 1 in the order in which the node made or got them."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._counter = 1
        self._records: dict[str, tuple[int, FileRecord]] = {}
        """By path, in the order of their numbers."""
        self.head = 0
        """Number of the newest change."""

    def begin(self, number: int) -> None:
        """Round ``number`` begins: versions from now on win over all of earlier rounds, also over those of a node that
        was cut off from this one, and comes back with them."""
        self._counter = max(self._counter, number * _IN_A_ROUND)

    def get(self, path: str) -> FileRecord | None:
        """The newest version of a path here, which may be its removal; None if the path was never there."""
        found = self._records.get(path)
        return None if found is None else found[1]

    def found(self, path: str, size: int, mtime_ns: int, mode: int) -> FileRecord:
        """Enter a file that was here before the launcher."""
        return self._enter(FileRecord(path, FileVersion(0, mtime_ns, self._node), size, mtime_ns, mode))

    def wrote(self, path: str, size: int, mtime_ns: int, mode: int, now_ns: int) -> FileRecord:
        """Enter a file that was written on this node."""
        here = self.get(path)
        appeared_ns = now_ns if here is None else self._appeared_ns(here)
        return self._enter(FileRecord(path, self._next(), size, mtime_ns, mode, appeared_ns=appeared_ns))

    def removed(self, path: str) -> FileRecord:
        """Enter the removal of a known file on this node. Raises ``KeyError``."""
        here = self._records[path][1]
        appeared_ns = self._appeared_ns(here)
        return self._enter(dataclasses.replace(here, version=self._next(), removed=True, appeared_ns=appeared_ns))

    def _appeared_ns(self, here: FileRecord) -> int:
        """When what has another version now appeared. A time by another node's clock would be taken for one of ours."""
        return here.appeared_ns if here.version.node == self._node else 0

    def set_aside(self, folder: str) -> FileRecord:
        """Enter that the files in a folder belong to the job no longer."""
        return self._enter(FileRecord(f"{folder}/", self._next(), 0, 0, 0, removed=True))

    def adopt(self) -> None:
        """The workers start: what is here are the job's files, and win over what newcomers bring. All members hold the
        same records, so they all get the same versions again."""
        for record in self.records():
            version = record.version
            if version.counter == 0:
                self._enter(dataclasses.replace(record, version=dataclasses.replace(version, counter=1)))

    def wants(self, record: FileRecord) -> bool:
        """Whether another node's record is newer than what is here."""
        over = (self.get(f"{folder}/") for folder in folders_above(record.path))
        return all(one is None or record.version > one.version for one in (self.get(record.path), *over))

    def learn(self, record: FileRecord) -> None:
        """Enter a version that has been fetched from another node. An older one is ignored."""
        self._counter = max(self._counter, record.version.counter)
        if self.wants(record):
            self._enter(record)

    def since(self, number: int) -> list[FileRecord]:
        """The changes after this number, in order; of each path only the newest."""
        newer: list[FileRecord] = []
        for at, record in reversed(self._records.values()):
            if at <= number:
                break
            newer.append(record)
        return newer[::-1]

    def older_in(self, aside: FileRecord) -> list[FileRecord]:
        """What is in a folder, in versions before the one that sets it aside."""
        inside = (record for record in self.records() if record.path.startswith(aside.path))
        return [record for record in inside if record.version < aside.version]

    def records(self) -> list[FileRecord]:
        """The newest version of each path."""
        return [record for _, record in self._records.values()]

    def total(self) -> tuple[int, int]:
        """Number of files, and their size in bytes."""
        sizes = [record.size for record in self.records() if not record.removed]
        return len(sizes), sum(sizes)

    def _next(self) -> FileVersion:
        self._counter += 1
        return FileVersion(self._counter, 0, self._node)

    def _enter(self, record: FileRecord) -> FileRecord:
        for older in self.older_in(record) if record.folder else ():
            del self._records[older.path]
        self._records.pop(record.path, None)
        self.head += 1
        self._records[record.path] = (self.head, record)
        return record


def parent_of(path: str) -> str:
    """The folder, or directory, that contains a path."""
    return path.rpartition("/")[0]


def folders_above(path: str) -> Iterator[str]:
    """The folders that contain a path, from the innermost; without the directory itself."""
    while "/" in (path := parent_of(path)):
        yield path
