"""Tracks ``save()``: the newest commit that workers asked to be written, and whether it has been.

Of saves that come during a write, only the newest counts. Bookkeeping only; ``MemoryCheckpoints`` writes.
"""

from __future__ import annotations

from edl.wire.records import NO_STATE, Version


class PendingSave:
    """The outstanding save of one node. Every node that holds the commit tracks it, because the writer may be lost."""

    def __init__(self) -> None:
        self._requested = NO_STATE
        self._whole = True
        self._stored = NO_STATE
        self._why = ""

    def take(self, version: Version, *, whole: bool = True) -> None:
        """Note that workers have saved this commit. ``whole``: this node alone can write it."""
        if version > self._requested:
            self._requested, self._whole, self._why = version, whole, ""

    def written(self, version: Version) -> None:
        """Note that this commit, or a newer one, is complete in the checkpoint directory."""
        self._stored = max(self._stored, version)

    def failed(self, version: Version, why: str) -> None:
        """Note that this commit could not be written."""
        if version >= self._requested:
            self._why = why

    def begin(self, restore: Version) -> None:
        """Enter a world that begins from this commit: later saves are void, since those steps will be repeated."""
        if self._requested > restore:
            self._requested = NO_STATE

    @property
    def due(self) -> bool:
        """Whether the newest saved commit is not in the directory yet."""
        return self._requested > self._stored

    @property
    def awaited(self) -> Version | None:
        """The newest saved commit if it is not in the directory yet, else None."""
        return self._requested if self.due else None

    @property
    def to_write(self) -> Version | None:
        """The commit that this node could write now; None if there is none."""
        return self._requested if self.due and self._whole else None

    @property
    def text(self) -> str:
        """What is missing and why, for messages; empty if nothing is."""
        if not self.due:
            return ""
        what = f"commit {self._requested.commit}, the newest saved one, is not in the checkpoint directory"
        return f"{what}: {self._why or 'it has not been written yet'}"
