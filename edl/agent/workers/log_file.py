"""One log file: written by a thread, split when it is long, and paused while its disk is nearly full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Protocol

from edl.agent.workers.writer_thread import Scribe, said_by_loop
from edl.checkpoint.directory.failures import is_full
from edl.rendezvous.phrases import amount

MIB = 1 << 20
RESERVE_SHARE = 0.05
MOST_RESERVE = 1 << 30
"""Default space that logs leave free: this share of the disk, at most ``MOST_RESERVE`` bytes."""
AGAIN = 1.25
"""Factor on the reserve that must be free before logging resumes."""
LOOK_BYTES = MIB
"""Bytes written between two checks; a quarter of the reserve if that is less."""
LOOK_S = 10.0
"""Seconds between two looks at whether a file is still in its place, and between two attempts to open it."""
NO_SPACE, NOT_WRITABLE = "the disk had no space for them", "the file could not be written"
"""Why lines are missing in a file."""


class LogAdmission(Protocol):
    """Decides whether a disk has room for logs."""

    shut: bool

    def admits(self, size: int) -> bool:
        """Whether ``size`` bytes may be written now."""


class LogRoom:
    """The low-water mark of a disk: below it no logs are written, so that store and checkpoints still have room.

    ``reserve``: bytes to leave free, 0 for none, negative for the default of the disk. Only called by the writer
    thread, since a disk may hang; it also calls ``say`` and ``warn``. ``warn`` gets the problem, and later an empty
    text.
    """

    def __init__(self, folder: str, reserve: int, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._reserve = reserve
        self._say = say
        self._warn = warn
        self._step = 0
        """Bytes until the next check."""
        self.shut = False

    def admits(self, size: int) -> bool:
        """Whether ``size`` bytes may be written now."""
        if not self._reserve:
            return True
        self._step -= size
        if self.shut or self._step < 0:
            self._look()
        return not self.shut

    def _look(self) -> None:
        try:
            found = os.statvfs(self._folder)
        except OSError:
            self._step = LOOK_BYTES
            return  # the write itself reports what is wrong
        free = found.f_bavail * found.f_frsize
        usual = min(MOST_RESERVE, int(RESERVE_SHARE * found.f_blocks * found.f_frsize))
        mark = self._reserve if self._reserve > 0 else usual
        self._step = min(LOOK_BYTES, mark // 4)
        shut = free < (AGAIN * mark if self.shut else mark)
        if shut is self.shut:
            return
        self.shut = shut
        if shut:
            why = f"the disk of {self._folder} has {amount(free)} left, less than the {amount(mark)} that logs"
            why += " leave free (--log-reserve): workers' output is not written to files until there is more space"
            self._say(f"{why}. Training continues; free some space or choose another --log-dir")
            self._warn(why)
        else:
            self._say(f"the disk of {self._folder} has space again ({amount(free)}): logging resumes")
            self._warn("")


class Roomy:
    """Admission that checks nothing."""

    shut = False

    def admits(self, size: int) -> bool:
        """Returns true for any size."""
        return True


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a file. Called on the event loop, except ``room``."""

    room: LogAdmission
    part_bytes: int = 0
    """A file of this size in bytes is split off, and another is begun; 0: never."""
    took: Callable[[int], None] = lambda size: None
    """Called with the number of bytes written."""
    parted: Callable[[Path, int], Path] = lambda path, size: path
    """Called when a file is full, with its size; returns its new name."""
    wall_clock_s: Callable[[], float] = lambda: 0.0
    """Called by the writer thread, too."""


UNBOUNDED = Bounds(Roomy())


class LogFile:
    """A log file. If writing fails or the writer thread falls behind, output is dropped, which is reported once. A file
    that another program has moved or deleted is begun anew."""

    def __init__(
        self, path: Path | None, scribe: Scribe, warn: Callable[[str], None], bounds: Bounds = UNBOUNDED
    ) -> None:
        self._path = path
        self._scribe = scribe
        self._warn = warn
        self._warn_from_scribe = said_by_loop(warn)
        self._bounds = bounds
        self._lost = 0
        self._unfinished = False
        """What was written last ends within a line."""
        self._size = 0
        """Bytes since the file was begun."""
        self._file: RawIOBase | None = None
        self._left_out = 0
        """Lines that could not be written since the last one that was."""
        self._why = NO_SPACE
        """Why that was so last."""
        self._failed = self._torn = False
        """The last write has failed; the file ends within a line."""
        self._looked_s = 0.0
        """When the file was last looked after. These attributes are for the writer thread only."""
        if path is not None:
            scribe.do(self._open)

    def write(self, output: bytes, lines: int) -> None:
        """Write output of so many lines. If the writer thread's queue is full they are dropped, and their number is
        later written in their place."""
        if self._path is None or not output:
            return
        text = self._missing() + output
        if self._bounds.part_bytes and self._size and self._size + len(text) > self._bounds.part_bytes:
            self._part(self._path)
        if self._scribe.do(lambda: self._write(text, lines), len(text)):
            self._lost, self._unfinished = 0, not text.endswith(b"\n")
            self._count(len(text))
            return
        if not self._lost:
            self._warn(f"the disk of {self._path} is too slow: training continues, lines are dropped from that file")
        self._lost += lines

    def _count(self, size: int) -> None:
        if not self._bounds.room.shut:
            self._size += size
            self._bounds.took(size)

    def _part(self, path: Path) -> None:
        target = self._bounds.parted(path, self._size)
        self._size = 0
        self._scribe.do(lambda: self._rotate(path, target))

    def _missing(self) -> bytes:
        if not self._lost:
            return b""
        return b"\n" * self._unfinished + b"[edl: %d lines are missing here, the disk was too slow]\n" % self._lost

    def close(self) -> None:
        """Close the file once everything before is written."""
        if self._path is None:
            return
        if self._lost:
            missing = self._missing()
            self._scribe.do(lambda: self._write(missing, 0))
        self._scribe.do(self._close)

    # --- on the writer thread ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        assert self._path is not None  # noqa: S101 - only called with a file
        self._looked_s = self._bounds.wall_clock_s()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", 0)  # noqa: SIM115 - stays open as long as the stream
        except OSError as error:
            self._complain(error)

    def _look_after(self) -> None:
        """Open the file anew from time to time if it is not in its place, or could not be opened or written."""
        now_s = self._bounds.wall_clock_s()
        if 0 <= now_s - self._looked_s < LOOK_S:  # less than 0: the clock was put back
            return
        self._looked_s = now_s
        if self._file is not None and not self._in_place(self._file):
            self._close()
        if self._file is None:
            self._open()

    def _in_place(self, file: RawIOBase) -> bool:
        assert self._path is not None  # noqa: S101 - only called with a file
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the write itself reports what is wrong

    def _rotate(self, path: Path, target: Path) -> None:
        if self._file is None:
            return
        self._close()
        with contextlib.suppress(OSError):  # it has been removed
            path.rename(target)
        self._open()
        self._write(f"[edl: older lines are in {target.name}]\n".encode(), 0)

    def _write(self, text: bytes, lines: int) -> None:
        self._look_after()
        if self._file is None:
            self._leave_out(lines, NOT_WRITABLE)
            return
        if not self._bounds.room.admits(len(text)):
            self._leave_out(lines, NO_SPACE)
            return
        if self._left_out:
            missing = f"[edl: {self._left_out} lines are missing here, {self._why}]\n".encode()
            text = b"\n" * self._torn + missing + text
        try:
            self._put(self._file, text)
        except OSError as error:
            self._leave_out(lines, NO_SPACE if is_full(error) else NOT_WRITABLE)
            self._complain(error)
            if not is_full(error):
                self._close()
            return
        self._left_out, self._failed, self._torn = 0, False, not text.endswith(b"\n")

    def _leave_out(self, lines: int, why: str) -> None:
        self._left_out += lines
        self._why = why

    def _put(self, file: RawIOBase, text: bytes) -> None:
        left = memoryview(text)
        while left:
            try:
                left = left[file.write(left) or 0 :]
            except OSError:
                self._torn |= 0 < len(left) < len(text)
                raise

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # closing flushes, and flushing may be what failed
                self._file.close()
            self._file = None

    def _complain(self, error: OSError) -> None:
        until = "there is space. Free some space" if is_full(error) else "it can be written. Look at its disk"
        if not self._failed:
            self._warn_from_scribe(
                f"cannot write the log file {self._path} ({error.strerror}): training continues, this worker's lines "
                f"are lost until {until}, or choose another --log-dir"
            )
        self._failed = True
