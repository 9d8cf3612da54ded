"""Allocates buffers before a commit needs them.

Large buffers take time, because the kernel has to clear their pages. A worker needs two (the newest commit, and the one
being written), and a third once its commits are read by the disk writer or the network.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

from edl.checkpoint.memory.buffer_table import SnapshotStream
from edl.checkpoint.memory.snapshot_pool import MemorySnapshotPool
from edl.tasks import BackgroundTasks

Run = Callable[[Callable[[], object]], Awaitable[object]]
"""Runs a function in a thread."""


class Preallocation:
    """Allocates a stream's next buffers ahead, one after the other. Call all methods on the event loop."""

    def __init__(self, snapshot_pool: MemorySnapshotPool, run: Run) -> None:
        self._snapshot_pool = snapshot_pool
        self._run = run
        self._background = BackgroundTasks()
        self._read: set[SnapshotStream] = set()
        self._busy: set[SnapshotStream] = set()
        self.idle = asyncio.Event()
        """Set while nothing is being allocated."""
        self.idle.set()

    def read(self, stream: SnapshotStream) -> None:
        """Note that the commits of this stream are read, so that it needs a third buffer."""
        self._read.add(stream)

    def look(self, stream: SnapshotStream, size: int) -> None:
        """Allocate the stream's next buffers if it has none to spare; it has just been given one of ``size`` bytes."""
        if stream not in self._busy:
            self._busy.add(stream)
            self.idle.clear()
            self._background.begin(self._make(stream, size))

    def _most(self, stream: SnapshotStream) -> int:
        return 3 if stream in self._read else 2

    def close(self) -> None:
        """Cancel all running and future allocations."""
        self._background.drop()

    async def _make(self, stream: SnapshotStream, size: int) -> None:
        made, most = True, 0
        try:
            while made or most < self._most(stream):  # it may have turned out meanwhile that its commits are read
                most = self._most(stream)
                made = bool(await self._run(functools.partial(self._snapshot_pool.ahead, stream, size, most)))
        finally:
            self._busy.discard(stream)
            if not self._busy:
                self.idle.set()
