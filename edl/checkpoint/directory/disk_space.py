"""Frees space for one more checkpoint on a disk that is nearly full."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Collection

from edl.checkpoint.directory.manifest import Retention
from edl.ports import Files
from edl.wire.records import Version

LEAST_KEPT = 2
"""Complete checkpoints that are kept even on a full disk: the newest may turn out to be damaged."""
TRIES = 4
FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskSpace:
    """Deletes older checkpoints before the new one is written, if and only if the disk has no room for both."""

    def __init__(self, files: Files, say: Callable[[str], None]) -> None:
        self._files = files
        self._say = say
        self._tight = False

    def deletable(self, retention: Retention, complete: Collection[Version]) -> list[Version]:
        """The complete checkpoints that may be deleted before the next one is written."""
        found = dataclasses.replace(retention, keep_last=LEAST_KEPT).surplus(complete)
        if found and not self._tight:
            self._say(
                f"{self._files.where} has no room for {retention.keep_last} checkpoints and the next one "
                f"(--checkpoint-keep={retention.keep_last}): older ones are deleted before it is written, down to "
                f"{LEAST_KEPT}"
            )
        return found

    def write(self, size: int, write: Callable[[], None], drop: Callable[[], bool]) -> None:
        """Call ``write``, which writes ``size`` bytes. If the disk is full, call ``drop`` to delete old checkpoints and
        try again, ``TRIES`` times in all. Raises ``OSError``.

        Other writers may use up the space freed here, or free some when there is nothing left to drop.
        """
        free = self._files.free_bytes() if self._tight else None
        if free is not None and free < size:
            drop()  # known from the last time: do not fill the disk first
        for left in reversed(range(TRIES)):
            try:
                write()
                return
            except OSError as error:
                if error.errno not in FULL or not left or not (drop() or self._has(size)):
                    raise
                self._tight = True

    def _has(self, size: int) -> bool:
        free = self._files.free_bytes()
        return free is not None and free >= size
