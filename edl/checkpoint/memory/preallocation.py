"""Buffers that are made before a commit waits for them.

The pages of a large buffer take time: the kernel has to clear them. A worker needs two (the newest commit, and the one
that it writes), and a third once something reads them: the disk, or the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from edl.checkpoint.memory.buffer_table import Stream
from edl.checkpoint.memory.snapshot_pool import SnapshotPool
from edl.tasks import BackgroundTasks

Run = Callable[[Callable[[], object]], Awaitable[object]]
"""In a thread."""


class Ahead:
    """Makes what a stream is going to need. Everything is called on the event loop."""

    def __init__(self, snapshot_pool: SnapshotPool, run: Run) -> None:
        self._snapshot_pool = snapshot_pool
        self._run = run
        self._background = BackgroundTasks()
        self._read: set[Stream] = set()
        self._busy: set[Stream] = set()
        self.idle = asyncio.Event()
        """Nothing is being made."""
        self.idle.set()

    def read(self, line: Stream) -> None:
        """Something reads the commits of this stream from now on."""
        self._read.add(line)

    def look(self, line: Stream, size: int) -> None:
        """The stream has been given a buffer for so many bytes: make the next one if it has none to spare."""
        if line not in self._busy:
            self._busy.add(line)
            self.idle.clear()
            self._background.begin(self._make(line, size))

    def close(self) -> None:
        """Make no more."""
        self._background.drop()

    async def _make(self, line: Stream, size: int) -> None:
        try:
            most = 3 if line in self._read else 2
            await self._run(lambda: self._snapshot_pool.ahead(line, size, most))
        finally:
            self._busy.discard(line)
            if not self._busy:
                self.idle.set()
