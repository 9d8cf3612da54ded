"""Deletes old checkpoints, as far as they can be deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edl.checkpoint.directory.failures import why
from edl.ports import Files


class Deletions:
    """Deletes folders one after another. One that cannot be deleted does not keep the others, and is logged once for
    each reason; it is tried again the next time. All calls block."""

    def __init__(self, files: Files, delete: Callable[[str], None], say: Callable[[str], None]) -> None:
        """``delete`` deletes one folder and raises ``OSError``."""
        self._files = files
        self._delete = delete
        self._say = say
        self._reasons: dict[str, str] = {}
        """By folder, why it could not be deleted the last time."""

    def delete(self, folders: Iterable[str]) -> list[str]:
        """Delete these folders; returns those that are deleted."""
        deleted: list[str] = []
        for folder in folders:
            try:
                self._delete(folder)
            except OSError as error:
                self._failed(folder, why(error))
            else:
                self._reasons.pop(folder, None)
                deleted.append(folder)
        return deleted

    def _failed(self, folder: str, reason: str) -> None:
        if self._reasons.get(folder) == reason:
            return
        self._reasons[folder] = reason
        self._say(
            f"cannot delete the checkpoint {self._files.path(folder)}: {reason}. It takes space until you delete it, "
            "or let the user of this job do so"
        )
