"""Decides from two successive scans of a directory which files count as written, and in which order.

A scan takes a while, so it shows no single moment: a file that it reads early may change before it reads another one.
Hence a file counts as written when it is the same in two scans and no process has it open for writing; and it counts
only with all files that were finished before it. What two scans yield is then a moment of the directory.
"""

from __future__ import annotations

import math
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
    begun_ns: int = 0
    """Begin and end of the scan, by the clock of ``ctime_ns``."""
    ended_ns: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """A file that counts as written, or as removed (``stamp`` is None)."""

    path: str
    stamp: FileStamp | None


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a directory."""

    changes: list[Settled]
    """What counts by then, in the order in which it was done."""
    more: bool
    """Whether other changes are about to count."""
    until_ns: int
    """All that was finished until then counts."""


def changed_files(known: Mapping[str, FileStamp], scan: TreeScan) -> list[str]:
    """Paths of files that differ from what is known."""
    return [path for path, stamp in scan.files.items() if not stamp.same_file(known.get(path))]


def settle(known: Mapping[str, FileStamp], before: TreeScan, now: TreeScan, in_use: Collection[str]) -> Moment:
    """The changes to ``known`` that count.

    ``in_use``: changed files that some process has open for writing after the scan ``now``. They are not finished:
    their place in the order comes when they are closed.
    """
    changes: list[_Change] = []
    for path in changed_files(known, now):
        if path not in in_use:
            stamp = now.files[path]
            settled = before.files.get(path) == stamp
            changes.append(_Change(Settled(path, stamp), stamp.ctime_ns, stamp.ctime_ns, settled))
    for path in known:
        if path not in now.files:
            gone = path not in before.files
            span = (0, before.ended_ns) if gone else (before.begun_ns, now.ended_ns)
            changes.append(_Change(Settled(path, None), *span, gone))
    limit = _first_uncertain(changes)
    certain = sorted(
        (one for one in changes if one.settled and one.latest_ns < limit),
        key=lambda one: (one.latest_ns, one.what.stamp is None, one.what.path),
    )
    until_ns = now.begun_ns if math.isinf(limit) else min(int(limit), now.begun_ns)
    return Moment([one.what for one in certain], len(certain) < len(changes), until_ns)


@dataclass(frozen=True, slots=True)
class _Change:
    """A difference between what is known and a scan."""

    what: Settled
    earliest_ns: int
    """When it was made: a file says it itself, a removal only says between which scans."""
    latest_ns: int
    settled: bool


def _first_uncertain(changes: Collection[_Change]) -> float:
    """The time before which all changes can count: each that does not count was certainly made later."""
    limit = math.inf
    while True:
        waiting = [one.earliest_ns for one in changes if not one.settled or one.latest_ns >= limit]
        earlier = min(waiting, default=math.inf)
        if earlier >= limit:
            return limit
        limit = earlier
