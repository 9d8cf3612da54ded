"""Which workers' commits find no memory, told when that begins and when it is over."""

from __future__ import annotations

from collections.abc import Callable

from edl.checkpoint.memory.buffer_table import Stream


class Refusals:
    """``tell(why)``: the first reason that there is now; empty when there is none any more."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._why: dict[Stream, str] = {}

    def note(self, line: Stream, why: str) -> None:
        """What a stream that asked for room was told; empty: it got some, or does not ask any more."""
        before = self._first()
        if why:
            self._why[line] = why
        else:
            self._why.pop(line, None)
        if self._first() != before:
            self._tell(self._first())

    def _first(self) -> str:
        return next(iter(self._why.values()), "")
