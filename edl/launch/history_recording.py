"""Sets up the thread that writes the job's history to files while this launcher is the Master."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from edl import __version__
from edl.adapters.line_files import LineFolder
from edl.adapters.system_threads import SYSTEM_THREADS
from edl.agent.workers.writer_thread import said_by_loop
from edl.history.writer import HistoryFiles, WriterThread
from edl.launch.settings import LaunchSettings
from edl.master.chronicle import Chronicle, WrittenStep, step_lines
from edl.wire.history_lines import HistoryLine
from edl.wire.json_messages import to_plain

END_S = 5.0
"""Seconds that an ending launcher waits for the disk of the history."""


class Recording:
    """The history files of this launcher. Writes nothing unless it becomes the Master."""

    def __init__(self, settings: LaunchSettings, run: str, log: Callable[[str], None]) -> None:
        """``run``: see ``Registration.run``."""
        spec, wanted = settings.spec, settings.history
        digest = hashlib.sha256(f"history {run}".encode()).hexdigest()[:12]
        self._chronicle = Chronicle(spec.job, digest, settings.node.name, __version__, to_plain(spec))
        say = said_by_loop(log)
        files = HistoryFiles(LineFolder(Path(wanted.folder) / spec.job), digest, wanted.most_bytes, say)
        self._thread: WriterThread[WrittenStep] = WriterThread(SYSTEM_THREADS, files, self._lines_of, say)
        self._log = log
        self._folder = wanted.folder

    def written(self, step: WrittenStep) -> None:
        """Record a step of the Master; does not block."""
        self._thread.put(step)

    def _lines_of(self, step: WrittenStep) -> Sequence[HistoryLine]:
        """Called in the thread."""
        self._chronicle, lines = step_lines(self._chronicle, step)
        return lines

    async def end(self) -> None:
        """Write what is waiting, if the disk takes it within ``END_S``."""
        if not await asyncio.to_thread(self._thread.end, END_S):
            self._log(f"{self._folder} does not respond: the last lines of the history are lost")
