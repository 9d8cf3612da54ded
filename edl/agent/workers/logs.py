"""Workers' output: to the console, to files, and the last lines kept for error reports.

Workers write into pipes that the launcher reads. So a full disk costs log lines, never a training step, and the last
output of a dead worker is available without a decorator in the script.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edl.agent.workers.console_lines import CONSOLES, ConsoleLines, place_of
from edl.agent.workers.line_splitter import LineSplitter, OutputPiece
from edl.agent.workers.log_file import UNBOUNDED, Bounds, LogFile
from edl.agent.workers.log_paths import selected
from edl.agent.workers.writer_thread import Scribe

TAIL_LINES = 60
TAIL_BYTES = 8192
"""The last lines are sent to the Master and stored in its record, so they must be small."""
HOLD_S = 0.2
"""Seconds after which the beginning of a line is passed on without its end."""
CHUNK_BYTES = 65536
DRAIN_CHUNKS = 17
"""Maximum number of chunks that ``close`` and ``tail`` read: the content of the largest pipe. A grandchild may write
forever."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Destinations of one stream of one worker."""

    console: BinaryIO | None
    prefix: bytes
    """Prefix of each console line, also where it is redrawn."""
    file: Path | None
    filtered: Path | None = None
    """File for the lines that contain one of ``filters``, with the prefix; several streams may write to it."""
    filters: tuple[bytes, ...] = ()
    bounds: Bounds = UNBOUNDED
    keep: Callable[[list[bytes]], None] = lambda lines: None
    """Gets all lines, to keep the last ones in memory."""


class OutputStream:
    """One pipe from a worker. The worker gets ``write_fd``; close it here once the worker has started.

    Console and file get exactly what the worker writes; only on the console are lines of several streams kept apart.
    """

    def __init__(
        self,
        plan: StreamPlan,
        scribe: Scribe,
        warn: Callable[[str], None],
        consoles: ConsoleLines = CONSOLES,
        hold_s: float = HOLD_S,
    ) -> None:
        self._plan = plan
        self._place = place_of(plan.console)
        self._consoles = consoles
        self._splitter = LineSplitter(hold_s, CHUNK_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        """Runs while part of a line is held back."""
        self._scribe = scribe
        self._warn = warn
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.received = 0
        """Bytes read from the worker so far."""
        self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._file = LogFile(plan.file, scribe, warn, plan.bounds)
        self._filtered = LogFile(plan.filtered, scribe, warn, plan.bounds)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._read, 1)
        self._open = True

    def close_write_end(self) -> None:
        """Close our copy of the write end once the worker has its own."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def switch(self, plan: StreamPlan) -> None:
        """Switch to the files of a new round that the worker lives to see. Whole lines written before stay in the old
        files. The tail continues."""
        if not self._open:
            return
        self._read(DRAIN_CHUNKS)
        self._close_files()
        self._plan, self._place = plan, place_of(plan.console)
        self._file = LogFile(plan.file, self._scribe, self._warn, plan.bounds)
        self._filtered = LogFile(plan.filtered, self._scribe, self._warn, plan.bounds)

    def tail(self) -> str:
        """The last lines written so far, including what is still in the pipe."""
        self._read(DRAIN_CHUNKS)
        lines = [*self._tail, self._splitter.line] if self._splitter.line else list(self._tail)
        return b"\n".join(lines)[-TAIL_BYTES:].decode(errors="replace")

    def close(self) -> None:
        """Read what is left in the pipe and close it. Further output of a grandchild is lost."""
        self._read(DRAIN_CHUNKS)
        self._shut()

    def _shut(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        self.close_write_end()
        if self._timer is not None:
            self._timer.cancel()
        self._emit(self._splitter.end())
        self._consoles.forget(self)
        self._close_files()

    def _close_files(self) -> None:
        self._file.close()
        self._filtered.close()

    def _read(self, chunks: int) -> None:
        """Read at most ``chunks`` chunks: a worker that never stops writing must not block the launcher."""
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
        self._emit(self._splitter.feed(data, self._loop.time()))
        self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        # A timer that runs already is left alone: to set it anew for each read would cost more than the read.
        if self._splitter.due_s is not None and self._timer is None:
            self._timer = self._loop.call_at(self._splitter.due_s, self._show_rest)

    def _show_rest(self) -> None:
        self._timer = None
        self._emit(self._splitter.flush(self._loop.time()))
        self._wait_for_rest()

    def _emit(self, piece: OutputPiece) -> None:
        if piece.text:
            self._show(piece.text)
            self._file.write(piece.text, max(1, len(piece.lines)))
        if piece.lines:
            self._tail.extend(piece.lines)
            self._plan.keep(piece.lines)
            if self._plan.filters:
                found = selected(piece.lines, self._plan.filters)
                self._filtered.write(b"".join(self._plan.prefix + line + b"\n" for line in found), len(found))

    def _show(self, text: bytes) -> None:
        console = self._plan.console
        if console is None:
            return
        try:
            console.write(self._consoles.shown(self._place, self, self._plan.prefix, text))
            console.flush()
        except (BlockingIOError, OSError, ValueError) as error:
            self._plan = dataclasses.replace(self._plan, console=None)
            self._warn(f"stopped writing worker output to the console ({error})")
