"""What ``save()`` has promised: the newest commit that workers asked to have written, and whether it has been.

Of saves that come while one is being written only the newest counts. Books only; the keeper writes.
"""

from __future__ import annotations

from edl.wire.messages import NO_STATE, Version


class Owed:
    """One node's promises. Every node that holds a commit keeps them, whoever writes: the writer may be lost."""

    def __init__(self) -> None:
        self._taken = NO_STATE
        self._whole = True
        self._stored = NO_STATE
        self._why = ""

    def take(self, version: Version, *, whole: bool = True) -> None:
        """Workers have saved this commit. ``whole``: this node can write it by itself."""
        if version > self._taken:
            self._taken, self._whole, self._why = version, whole, ""

    def written(self, version: Version) -> None:
        """This commit, or a newer one, is complete in the checkpoint directory."""
        self._stored = max(self._stored, version)

    def failed(self, version: Version, why: str) -> None:
        """This commit could not be written."""
        if version >= self._taken:
            self._why = why

    def begin(self, restore: Version) -> None:
        """A world begins from this commit: what was saved after it will be done again, and saved again."""
        if self._taken > restore:
            self._taken = NO_STATE

    @property
    def due(self) -> bool:
        """Whether the newest saved commit is not in the directory yet."""
        return self._taken > self._stored

    @property
    def awaited(self) -> Version | None:
        """The newest saved commit, if it is not in the directory yet."""
        return self._taken if self.due else None

    @property
    def to_write(self) -> Version | None:
        """The commit that this node could write."""
        return self._taken if self.due and self._whole else None

    @property
    def text(self) -> str:
        """What is missing, and why; empty if nothing is."""
        if not self.due:
            return ""
        what = f"commit {self._taken.commit}, the newest that the workers saved, is not in the checkpoint directory"
        return f"{what}: {self._why or 'it has not been written yet'}"
