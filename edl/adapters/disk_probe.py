"""Asks file systems for their free space, and tries to write to them: with a quota, or on a file system that went
read-only, the free space says nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from edl.adapters.clock import SystemClock
from edl.adapters.file_systems import file_system
from edl.threads import ThreadHandle, Threads

PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A file system at one moment."""

    error: str = ""
    """Why it could not be asked; empty: it could."""
    free_bytes: int = 0
    total_bytes: int = 0
    free_inodes: int = 0
    total_inodes: int = 0
    write_error: str = ""
    write_s: float = 0.0
    size_bytes: int = 0
    """Size of the folder that was to be measured."""


class DiskProbe:
    """Probes one directory. A file system that hangs blocks a thread, not the caller. ``name``: of the file that is
    written and removed."""

    def __init__(self, path: str, name: str, threads: Threads) -> None:
        self._path = path
        self._name = name
        self._threads = threads
        self._now_s = SystemClock().now_s
        self._thread: ThreadHandle | None = None
        self._began_s = 0.0
        self._found: ProbeResult | None = None
        self._written: tuple[str, float] = "", 0.0
        """Error and duration of the last write."""

    def begin(self, done: Callable[[], None], *, write: bool, measure: str = "") -> None:
        """Begin to look in a thread, unless the last one still does. ``done`` is called in that thread. ``write``:
        write a file; otherwise the result is that of the last write. ``measure``: a folder to measure as well."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._found, self._began_s = None, self._now_s()

        def look() -> None:
            self._found = self._look(write, measure)
            done()

        try:
            self._thread = self._threads.start(look, name="edl-disk-probe")
        except RuntimeError:  # the system allows no more at present; the next look tries again
            error, write_s = self._written
            why = "no further thread can be started to ask it"
            self._found = ProbeResult(why, write_error=error, write_s=write_s)
            done()

    def result(self) -> ProbeResult:
        """What was found; while the thread has not ended, how long that has taken."""
        if self._found is not None:
            return self._found
        waited_s = self._now_s() - self._began_s
        return ProbeResult(f"the file system has not answered for {waited_s:.0f} s", write_s=waited_s)

    def _look(self, write: bool, measure: str) -> ProbeResult:
        if write:
            error = self._write()
            self._written = error, self._now_s() - self._began_s
        write_error, write_s = self._written
        try:
            found = file_system(self._path)
        except OSError as failure:
            return ProbeResult(failure.strerror or type(failure).__name__, write_error=write_error, write_s=write_s)
        return ProbeResult(
            "",
            found.free_bytes,
            found.size_bytes,
            found.free_inodes,
            found.inodes,
            write_error,
            write_s,
            _size(measure) if measure else 0,
        )

    def _write(self) -> str:
        """Write a small file, make it durable, and remove it; returns why that failed."""
        path = os.path.join(self._path, self._name)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, bytes(PROBE_BYTES))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    os.unlink(path)
        except OSError as error:
            return error.strerror or type(error).__name__
        return ""


def _size(folder: str) -> int:
    """Bytes of the files in a folder and below; those that disappear meanwhile do not count."""
    total = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(inner, name)).st_size
    return total
