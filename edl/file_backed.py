"""A value made of files, such as the certificates of TLS, and made anew when the files change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from edl.errors import EdlError

T = TypeVar("T")


class FileBacked(Generic[T]):
    """The newest value that could be made of some files. Thread-safe."""

    def __init__(self, what: str, files: Sequence[str], make: Callable[[], T], log: Callable[[str], None]) -> None:
        """``what``: a plural, for the log. ``make`` reads the files. Raises what ``make`` raises."""
        self._what, self._files, self._make, self._log = what, tuple(files), make, log
        self._stamps = self._stat()
        """Taken before the files are read: what changes meanwhile is read again."""
        self._problem = ""
        """The last logged error."""
        self._lock = threading.Lock()
        self.newest = make()
        self.loads = 1
        """How often the value has been made."""

    def refresh(self) -> None:
        """Make the value anew if the files have changed. Blocks on the file system. Files that cannot be used are
        logged once, and the value stays."""
        if not self._lock.acquire(blocking=False):
            return  # another thread does it; a file system that hangs must not hold up all of them
        try:
            stamps = self._stat()
            if stamps != self._stamps:
                self.newest = self._make()
                self._stamps, self._problem = stamps, ""
                self.loads += 1
                self._log(f"{self._what} have changed; new connections use them")
        except (OSError, EdlError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._log(f"cannot read {self._what} again: {error}. The previous ones stay in use")
        finally:
            self._lock.release()

    def _stat(self) -> tuple[tuple[int, int], ...]:
        """Modification time and inode of each file; zeros for one that is not there."""
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino
