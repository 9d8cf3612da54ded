"""Decides from two successive scans of a directory which files count as written, and in which order.

A scan takes a while, so it shows no single moment: a file that it reads early may change before it reads another one.
Hence a file counts as written when it is the same in two scans and no process has it open for writing; and it counts
only with all files that were finished before it. What two scans yield is then a moment of the directory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What ``stat`` says of a file."""

    inode: int
    size: int
    mtime_ns: int
    mode: int
    """Permission bits."""
    ctime_ns: int = 0
    """When it was last written, renamed or touched, by this host's clock."""

    def same_file(self, other: FileStamp | None) -> bool:
        """Whether both are the same file with the same content. A rename changes only ``ctime_ns``."""
        if other is None:
            return False
        return (self.inode, self.size, self.mtime_ns, self.mode) == (
            other.inode,
            other.size,
            other.mtime_ns,
            other.mode,
        )


@dataclass(frozen=True, slots=True)
class TreeScan:
    """The files of a directory, read one after another."""

    files: Mapping[str, FileStamp] = field(default_factory=dict)
    ended_ns: int = 0
    """End of the scan, by the clock of ``ctime_ns``."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A file that counts as written, or as removed (``stamp`` is None)."""

    path: str
    stamp: FileStamp | None


def changed_files(known: Mapping[str, FileStamp], scan: TreeScan) -> list[str]:
    """Paths of files that differ from what is known."""
    return [path for path, stamp in scan.files.items() if not stamp.same_file(known.get(path))]


def settle(
    known: Mapping[str, FileStamp], before: TreeScan, now: TreeScan, in_use: Collection[str]
) -> tuple[list[Settled], bool]:
    """The changes to ``known`` that count, in the order in which they were made, and whether others are about to count.

    ``in_use``: changed files that some process has open for writing after the scan ``now``. They are not finished:
    their place in the order comes when they are closed.
    """
    changes: list[tuple[int, bool, Settled, bool]] = []
    for path in changed_files(known, now):
        if path not in in_use:
            stamp = now.files[path]
            changes.append((stamp.ctime_ns, False, Settled(path, stamp), before.files.get(path) == stamp))
    for path in known:
        if path not in now.files:
            # When it was removed is not known, but not later than the end of the first scan without it.
            gone = path not in before.files
            changes.append((before.ended_ns if gone else now.ended_ns, True, Settled(path, None), gone))
    changes.sort(key=lambda change: (change[0], change[1], change[2].path))
    certain: list[Settled] = []
    for _, _, change, settled in changes:
        if not settled:
            return certain, True
        certain.append(change)
    return certain, False
