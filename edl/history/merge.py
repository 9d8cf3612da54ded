"""Orders the lines of several history files, and leaves out repetitions. Pure.

The order is that of the events' numbers, which the store guarantees across Masters, then of terms and of each Master's
own count. Wall clocks play no part: they differ between hosts, and jump.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from edl.wire import json_messages
from edl.wire.history_lines import HistoryLine

Order = tuple[int, int, int, int]


def order_of(line: HistoryLine) -> Order:
    """The sort key of a line."""
    return line.after, line.kind != "event", line.term, line.seq


def identity_of(line: HistoryLine) -> Hashable:
    """What a line states: equal for a line and its repetition by a later Master."""
    match line.kind:
        case "event":
            return "event", line.after
        case "round" | "underway":
            return line.kind, line.body.get("round")
        case "settings":
            return line.kind, line.body.get("number")
        case "size":
            return line.kind, line.body.get("generation")
        case "failure":
            return line.kind, json_messages.encode(dict(sorted(line.body.items())))
        case "end":
            return line.kind
        case _:
            return line.kind, line.term, line.seq


class Merger:
    """Collects the lines of one run in any order."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, HistoryLine] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: HistoryLine) -> bool:
        """Add a line; returns whether it is no repetition. Of repetitions the first Master's is kept: it has seen what
        the line reports."""
        identity = identity_of(line)
        known = self._lines.get(identity)
        if known is None or (line.copied, line.term, line.seq) < (known.copied, known.term, known.seq):
            self._lines[identity] = line
        return known is None

    def lines(self) -> list[HistoryLine]:
        """All lines in order, each once."""
        return sorted(self._lines.values(), key=order_of)


def merged(lines: Iterable[HistoryLine]) -> list[HistoryLine]:
    """The lines of one run in order, each once."""
    merger = Merger()
    for line in lines:
        merger.add(line)
    return merger.lines()
