"""The last lines of each worker of a node, in memory, for ``edl logs``. Pure.

Readers keep no state here: each names the last line that it has got. So readers cost no memory, however slow they are,
and a reader that is too slow misses lines instead of delaying a worker.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from edl.wire.node_requests import OutputLine, OutputLines, OutputRequest

MOST_LINES = 1000
"""Lines kept of each worker."""
MOST_BYTES = 256 * 1024
"""Bytes kept of each worker."""
LINE_BYTES = 8 * 1024
"""A longer line is cut."""
CUT = b" (cut)"
ANSWER_BYTES = 1024 * 1024
"""Most bytes of text in an answer."""
BEGIN = 1
"""Number before the first line; positive, so that it differs from the ``after`` of a first request."""


@dataclass(frozen=True, slots=True)
class _NumberedLine:
    number: int
    """Counts the lines of all workers of this launcher."""
    rank: int
    round: int
    stderr: bool
    text: bytes


@dataclass(slots=True)
class _Ring:
    lines: collections.deque[_NumberedLine] = field(default_factory=collections.deque)
    size: int = 0
    """Bytes of all lines."""
    lost: dict[int, int] = field(default_factory=dict)
    """By rank, the number of the newest line that is no longer kept."""

    def has_lost(self, after: int, ranks: Collection[int]) -> bool:
        """Whether a line after this one, of one of the ranks (of any, if there are none), is no longer kept."""
        return any(newest > after for rank, newest in self.lost.items() if not ranks or rank in ranks)


class RecentOutput:
    """The newest lines of each local rank: those of its former workers as well, until newer ones displace them."""

    def __init__(self) -> None:
        self._rings: dict[int, _Ring] = {}
        self._last = BEGIN

    @property
    def last(self) -> int:
        """Number of the newest line."""
        return self._last

    def add(self, local_rank: int, rank: int, number_of_round: int, stderr: bool, lines: Sequence[bytes]) -> None:
        """Keep lines, which have no newline at their end."""
        ring = self._rings.setdefault(local_rank, _Ring())
        skipped = max(0, len(lines) - MOST_LINES)
        if skipped:
            self._last += skipped
            ring.lost[rank] = self._last
        for line in lines[skipped:]:
            self._last += 1
            text = line if len(line) <= LINE_BYTES else line[: LINE_BYTES - len(CUT)] + CUT
            ring.lines.append(_NumberedLine(self._last, rank, number_of_round, stderr, text))
            ring.size += len(text)
        while len(ring.lines) > MOST_LINES or ring.size > MOST_BYTES:
            gone = ring.lines.popleft()
            ring.size -= len(gone.text)
            ring.lost[gone.rank] = max(ring.lost.get(gone.rank, 0), gone.number)

    def read(self, request: OutputRequest) -> OutputLines:
        """The answer to a request: the newest lines for a first one, else the oldest ones that the reader lacks."""
        first = request.after == 0
        after = BEGIN if first or request.after > self._last else request.after  # else: of an earlier launcher
        wanted = [self._lines_of(ring, request, after, first) for ring in self._rings.values()]
        merged = list(heapq.merge(*wanted, key=lambda kept: kept.number))
        kept = _newest(merged) if first else _oldest(merged)
        whole = first or len(kept) == len(merged)
        return OutputLines(
            tuple(OutputLine(one.rank, one.round, one.stderr, one.text.decode(errors="replace")) for one in kept),
            next=self._last if whole else kept[-1].number,
            gap=not first and any(ring.has_lost(after, request.ranks) for ring in self._rings.values()),
        )

    def _lines_of(self, ring: _Ring, request: OutputRequest, after: int, first: bool) -> list[_NumberedLine]:
        found: list[_NumberedLine] = []
        for kept in reversed(ring.lines):
            if kept.number <= after or (first and len(found) >= request.lines):
                break
            if not request.ranks or kept.rank in request.ranks:
                found.append(kept)
        return found[::-1]


def _oldest(lines: Sequence[_NumberedLine]) -> Sequence[_NumberedLine]:
    """As many lines from the beginning as fit into an answer, at least one."""
    size = 0
    for index, kept in enumerate(lines):
        size += len(kept.text)
        if size > ANSWER_BYTES and index:
            return lines[:index]
    return lines


def _newest(lines: Sequence[_NumberedLine]) -> Sequence[_NumberedLine]:
    """As many lines from the end as fit into an answer."""
    return list(reversed(_oldest(list(reversed(lines)))))
