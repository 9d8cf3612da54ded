"""A disk in memory that fails on demand, and lines for history files."""

from __future__ import annotations

import errno
import os

from edl.wire.history_lines import HistoryLine
from edl.wire.json_messages import to_plain
from edl.wire.status import HistoryEntry

RUN = "0123456789ab"


def line(term: int, seq: int, number: int, *, copied: bool = False, at_s: float = 0.0) -> HistoryLine:
    """The line of an event."""
    entry = HistoryEntry(number, at_s, "waiting", f"text {number}", "a", 1)
    return HistoryLine("job", RUN, term, seq, number, at_s, float(seq), "event", to_plain(entry), copied)


def other(term: int, seq: int, after: int, kind: str, body: dict[str, object], *, copied: bool = False) -> HistoryLine:
    """The line of something else."""
    return HistoryLine("job", RUN, term, seq, after, 0.0, float(seq), kind, body, copied)


class MemoryDisk:
    """Files of a folder. ``quota``: bytes that fit; an append beyond it fails, and leaves a torn line if ``tears``."""

    def __init__(self, quota: int = 1 << 40) -> None:
        self.where = "/disk"
        self.quota = quota
        self.tears = False
        self.gone = False
        self.content: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.clock_s = 0.0
        self.most = 0
        """The most bytes that were ever in use."""

    @property
    def used(self) -> int:
        return sum(map(len, self.content.values()))

    def _check(self) -> None:
        if self.gone:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def create(self, *, parents: bool) -> None:
        self._check()

    def files(self) -> dict[str, tuple[int, float]]:
        self._check()
        return {name: (len(data), self.times[name]) for name, data in self.content.items()}

    def append(self, name: str, data: bytes) -> int:
        self._check()
        before = self.content.get(name, b"")
        if self.tears and before and not before.endswith(b"\n"):
            data = b"\n" + data
        room = self.quota - self.used
        if len(data) > room:
            if self.tears:
                self.content[name] = before + data[: max(0, room)]
                self.times[name] = self.clock_s
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.clock_s += 1
        self.content[name], self.times[name] = before + data, self.clock_s
        self.most = max(self.most, self.used)
        return len(self.content[name])

    def delete(self, name: str) -> None:
        self._check()
        self.content.pop(name, None)

    def read(self, name: str) -> bytes:
        self._check()
        return self.content[name]
