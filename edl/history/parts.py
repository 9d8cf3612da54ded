"""Names of the history files, and which ones are deleted when there are too many. Pure.

``<history directory>/<job>/<run>.<term>.<part>.jsonl``: each Master writes files of its own, so that no two processes
ever write to the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

FOLDER = ".edl-history"
"""Default folder of the history, in the checkpoint directory."""
PARTS_SHARE = 8
"""A file is full at 1/8 of the limit."""
LEAST_BYTES = 1 << 20
"""Lower bound of the limit."""
MOST_PART_BYTES = 8 << 20
MOST_FILES = 1000
"""Limit on the files of one job: a Master that was elected and soon replaced leaves a small one."""
_NAME = re.compile(r"([0-9a-f]{12})\.(\d{1,20})\.(\d{1,9})\.jsonl")


class HistoryPart(NamedTuple):
    """One file. Parts of one run are in the order of their lines."""

    run: str
    term: int
    """Fencing token of the Master that writes it."""
    number: int
    """Counts the files of this Master from 1."""

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.run}.{self.term}.{self.number}.jsonl"


def part_of(name: str) -> HistoryPart | None:
    """The part with this file name; None for a file that edl has not written."""
    match = _NAME.fullmatch(name)
    part = HistoryPart(match[1], int(match[2]), int(match[3])) if match else None
    return part if part is not None and part.name == name else None


def part_bytes(most_bytes: int) -> int:
    """Size in bytes at which a file is full. ``most_bytes``: limit for all files; 0: none."""
    return min(MOST_PART_BYTES, most_bytes // PARTS_SHARE) if most_bytes else MOST_PART_BYTES


class PartFile(NamedTuple):
    """A file's size, and when it was last written in seconds since 1970."""

    size: int
    at_s: float


def surplus(files: Mapping[str, PartFile], run: str, most_bytes: int, room: int) -> list[str]:
    """The files to delete before another one is begun, oldest first.

    Earlier runs go first, in the order in which they were last written. ``files``: all files of the job; those that edl
    has not written are kept and do not count. ``run``: the current one. ``most_bytes``: limit for all files; 0: none.
    ``room``: bytes that the new file may take.
    """
    parts = {part: files[name] for name in files if (part := part_of(name)) is not None}
    ages = _last_written(parts.items())
    order = sorted(parts, key=lambda part: (part.run == run, ages[part.run], part))
    total, number, gone = sum(one.size for one in parts.values()), len(parts), []
    for part in order:
        if number < MOST_FILES and not (most_bytes and total + room > most_bytes):
            break
        total, number = total - parts[part].size, number - 1
        gone.append(part.name)
    return gone


def _last_written(parts: Iterable[tuple[HistoryPart, PartFile]]) -> dict[str, float]:
    """When a file of each run was last written."""
    ages: dict[str, float] = {}
    for part, found in parts:
        ages[part.run] = max(found.at_s, ages.get(part.run, found.at_s))
    return ages
