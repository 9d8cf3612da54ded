"""Which of a launcher's log files go when there are too many, or when they take too much. Pure.

Oldest first: folders of earlier launches of the same job on the same node, folders of rounds, and the full parts of a
long file. What is written into stays, and so does the first round, which tells how the job began.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

PARTS_SHARE = 8
"""A file is parted once it has this part of its worker's share, so what is written into stays well below the whole."""
LEAST_PART_BYTES = 64 * 1024


def part_bytes(most_bytes: int, workers: int) -> int:
    """Size at which a file is parted; 0 for never."""
    return max(LEAST_PART_BYTES, most_bytes // (PARTS_SHARE * max(1, workers))) if most_bytes else 0


@dataclass(slots=True)
class _Piece:
    size: int
    within: str = ""
    """Folder of the round that a part lies in; empty for a folder."""


class LogPieces:
    """``rounds``: launches, and rounds of this launch, that are kept. ``most_bytes``: of all pieces together. 0 means
    any number."""

    def __init__(self, rounds: int, most_bytes: int) -> None:
        self._most_rounds = rounds
        self._most_bytes = most_bytes
        self._earlier: dict[str, int] = {}
        self._pieces: dict[str, _Piece] = {}
        self._total = 0

    def found(self, launches: dict[str, int]) -> None:
        """Folders of earlier launches and their sizes, oldest first."""
        self._earlier = dict(launches)
        self._total += sum(launches.values())

    def begin(self, folder: str) -> None:
        """A round; one that is known already goes on."""
        self._pieces.setdefault(folder, _Piece(0))

    def grow(self, folder: str, size: int) -> bool:
        """So much has been written into a round's files; whether that is too much now."""
        self.begin(folder)
        self._pieces[folder].size += size
        self._total += size
        return 0 < self._most_bytes < self._total

    def part(self, folder: str, path: str, size: int) -> None:
        """So much of what a round has is a file of its own from now on, which nothing is added to."""
        self.begin(folder)
        self._pieces[folder].size -= size
        self._pieces[path] = _Piece(size, folder)

    def surplus(self, busy: Collection[str]) -> list[str]:
        """What is to be removed now. ``busy``: rounds that living workers write into."""
        rounds = [path for path, piece in self._pieces.items() if not piece.within]
        kept = {*busy, *rounds[:1], *rounds[-1:]}
        gone: list[str] = []
        if self._most_rounds:
            for path in list(self._earlier)[: max(0, len(self._earlier) - self._most_rounds)]:
                self._drop(path, gone)
            for path in [path for path in rounds if path not in kept][: max(0, len(rounds) - self._most_rounds)]:
                self._drop(path, gone)
        while self._most_bytes and self._total > self._most_bytes:
            oldest = next((path for path in (*self._earlier, *self._pieces) if path not in kept), None)
            if oldest is None:
                break
            self._drop(oldest, gone)
        return gone

    def _drop(self, path: str, gone: list[str]) -> None:
        gone.append(path)
        if path in self._earlier:
            self._total -= self._earlier.pop(path)
            return
        for name in [name for name, piece in self._pieces.items() if path in (name, piece.within)]:
            self._total -= self._pieces.pop(name).size
