"""Reports when there is no memory for workers' commits, and when there is again."""

from __future__ import annotations

from collections.abc import Callable

from edl.checkpoint.memory.buffer_table import SnapshotStream


class MemoryShortages:
    """Calls ``tell(why)`` when the first of the current reasons changes; ``why`` is empty when none is left."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._why: dict[SnapshotStream, str] = {}

    def note(self, stream: SnapshotStream, why: str) -> None:
        """Note the outcome of a stream's request for a buffer; empty: it got one, or no longer needs one."""
        before = self._first()
        if why:
            self._why[stream] = why
        else:
            self._why.pop(stream, None)
        if self._first() != before:
            self._tell(self._first())

    def _first(self) -> str:
        return next(iter(self._why.values()), "")
