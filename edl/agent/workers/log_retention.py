"""Selects a launcher's log files for deletion when there are too many, or they are too large or too old. Pure.

Oldest first: folders of earlier launches of the same job on the same node, folders of rounds, and split-off parts of
long files. Files being written are kept, and so is the first round, which shows how the job began.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

PARTS_SHARE = 8
"""A file is split when it reaches 1/8 of its worker's share, so that files being written stay well below the limit."""
LEAST_PART_BYTES = 64 * 1024


def part_bytes(most_bytes: int, workers: int) -> int:
    """Size in bytes at which a file is split; 0 for never."""
    return max(LEAST_PART_BYTES, most_bytes // (PARTS_SHARE * max(1, workers))) if most_bytes else 0


@dataclass(slots=True)
class _Piece:
    size: int
    within: str = ""
    """Folder of the round that contains a part; empty for a folder."""
    written_s: float = 0.0
    """When it was last written to."""


class LogPieces:
    """``rounds``: number of earlier launches, and of this launch's rounds, to keep. ``most_bytes``: limit on all pieces
    together. ``most_age_s``: seconds since a piece was last written to. 0 means no limit. All times are wall clock,
    because earlier launches are known by the times of their files."""

    def __init__(self, rounds: int, most_bytes: int, most_age_s: float = 0.0) -> None:
        self._most_rounds = rounds
        self._most_bytes = most_bytes
        self._most_age_s = most_age_s
        self._earlier: dict[str, int] = {}
        self._earlier_s: dict[str, float] = {}
        self._pieces: dict[str, _Piece] = {}
        self._total = 0

    def found(self, launches: dict[str, int], written_s: Mapping[str, float] | None = None) -> None:
        """Add the folders of earlier launches with their sizes, oldest first. ``written_s``: when each was last
        written to."""
        self._earlier = dict(launches)
        self._earlier_s = dict(written_s or {})
        self._total += sum(launches.values())

    def begin(self, folder: str, now_s: float = 0.0) -> None:
        """Add a round; no effect if it is already known."""
        self._pieces.setdefault(folder, _Piece(0, written_s=now_s))

    def grow(self, folder: str, size: int, now_s: float = 0.0) -> bool:
        """Add ``size`` bytes to a round; returns whether the limit is exceeded now."""
        self.begin(folder)
        self._pieces[folder].size += size
        self._pieces[folder].written_s = now_s
        self._total += size
        return 0 < self._most_bytes < self._total

    def part(self, folder: str, path: str, size: int) -> None:
        """Make ``size`` bytes of a round a separate piece, which no longer grows."""
        self.begin(folder)
        self._pieces[folder].size -= size
        self._pieces[path] = _Piece(size, folder, self._pieces[folder].written_s)

    def surplus(self, busy: Collection[str], now_s: float = 0.0) -> list[str]:
        """The pieces to delete now. ``busy``: rounds that living workers write to."""
        rounds = [path for path, piece in self._pieces.items() if not piece.within]
        kept = {*busy, *rounds[:1], *rounds[-1:]}
        gone: list[str] = []
        if self._most_rounds:
            for path in list(self._earlier)[: max(0, len(self._earlier) - self._most_rounds)]:
                self._drop(path, gone)
            for path in [path for path in rounds if path not in kept][: max(0, len(rounds) - self._most_rounds)]:
                self._drop(path, gone)
        if self._most_age_s:
            for path in self._outdated(kept, now_s - self._most_age_s):
                self._drop(path, gone)
        while self._most_bytes and self._total > self._most_bytes:
            oldest = next((path for path in (*self._earlier, *self._pieces) if path not in kept), None)
            if oldest is None:
                break
            self._drop(oldest, gone)
        return gone

    def _outdated(self, kept: Collection[str], since_s: float) -> list[str]:
        """The pieces that were last written to before ``since_s``, without parts of folders that are among them."""
        launches = [path for path in self._earlier if self._earlier_s.get(path, since_s) < since_s]
        old = [path for path, piece in self._pieces.items() if path not in kept and piece.written_s < since_s]
        return launches + [path for path in old if self._pieces[path].within not in old]

    def _drop(self, path: str, gone: list[str]) -> None:
        gone.append(path)
        if path in self._earlier:
            self._total -= self._earlier.pop(path)
            return
        for name in [name for name, piece in self._pieces.items() if path in (name, piece.within)]:
            self._total -= self._pieces.pop(name).size
