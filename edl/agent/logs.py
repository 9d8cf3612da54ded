"""What workers write: to the console, to files, and the last lines kept for error reports.

Workers write into pipes that the launcher reads. So a full disk costs log lines, never a training step, and the last
words of a dead worker are at hand without any decorator in the script.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 60
TAIL_BYTES = 8192
"""The last lines travel to the Master and lie in its record, so they have to be small."""
CHUNK_BYTES = 65536
DRAIN_CHUNKS = 17
"""Most that ``close`` and ``tail`` read: as much as fits into the largest pipe. A grandchild may write for ever."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Where one stream of one worker goes."""

    console: BinaryIO | None
    prefix: bytes
    """Put before each console line."""
    file: Path | None


class OutputStream:
    """One pipe from a worker. The worker holds ``write_fd``; close that here once the worker has started."""

    def __init__(self, plan: StreamPlan, warn: Callable[[str], None]) -> None:
        self._plan = plan
        self._warn = warn
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._partial = b""
        self.received = 0
        """Bytes taken from the worker so far."""
        self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._file = self._open_file()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._read, 1)
        self._open = True

    def close_write_end(self) -> None:
        """The worker has its own copy now."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def tail(self) -> str:
        """The last lines written so far, including what still sits in the pipe."""
        self._read(DRAIN_CHUNKS)
        lines = [*self._tail, self._partial] if self._partial else list(self._tail)
        return b"\n".join(lines)[-TAIL_BYTES:].decode(errors="replace")

    def close(self) -> None:
        """Take what is left in the pipe and let go. A grandchild that still holds it writes into the void."""
        self._read(DRAIN_CHUNKS)
        self._shut()

    def _shut(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        self.close_write_end()
        if self._partial:
            self._tail.append(self._partial)
            self._emit([self._partial])
            self._partial = b""
        if self._file is not None:
            self._file.close()

    def _read(self, chunks: int) -> None:
        """Take what is there, but no more than this: a worker that never stops writing must not stop the launcher."""
        for _ in range(chunks if self._open else 0):
            try:
                data = os.read(self._read_fd, CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._shut()
                return
            self._take(data)
            if len(data) < CHUNK_BYTES:
                return

    def _take(self, data: bytes) -> None:
        self.received += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > CHUNK_BYTES:  # a line without end, such as a progress bar drawn with \r
            lines.append(self._partial)
            self._partial = b""
        if lines:
            self._tail.extend(lines)
            self._emit(lines)

    def _emit(self, lines: list[bytes]) -> None:
        if self._plan.console is not None:
            text = b"".join(self._plan.prefix + line + b"\n" for line in lines)
            try:
                self._plan.console.write(text)
                self._plan.console.flush()
            except (BlockingIOError, OSError, ValueError) as error:
                self._plan = StreamPlan(None, b"", self._plan.file)
                self._warn(f"cannot write worker output to the console any more ({error})")
        if self._file is not None:
            try:
                self._file.write(b"".join(line + b"\n" for line in lines))
                self._file.flush()
            except OSError as error:
                self._drop_file(error)

    def _open_file(self) -> BinaryIO | None:
        if self._plan.file is None:
            return None
        try:
            self._plan.file.parent.mkdir(parents=True, exist_ok=True)
            return open(self._plan.file, "ab")
        except OSError as error:
            self._complain(error)
            return None

    def _drop_file(self, error: OSError) -> None:
        self._complain(error)
        if self._file is not None:
            with contextlib.suppress(OSError):  # closing flushes, and flushing is what failed
                self._file.close()
            self._file = None

    def _complain(self, error: OSError) -> None:
        self._warn(
            f"cannot write the log file {self._plan.file} ({error.strerror}): training goes on, "
            "this worker's output is not kept until the next round. Free some space or choose another --log-dir"
        )
