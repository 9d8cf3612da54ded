"""A scheduler in memory: provides and removes nodes at once, and fails on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from edl.errors import SchedulerError
from edl.schedulers.port import Disruption, Observation, SchedulerSize, Sized


class MemoryScheduler:
    """``edl.schedulers.port.Scheduler`` in memory. ``names``: the nodes that it has provided."""

    def __init__(self, *, indexed: bool = False, ask_none_at_end: bool = False) -> None:
        self.name = "memory"
        self.indexed = indexed
        self.ask_none_at_end = ask_none_at_end
        self.names: list[str] = []
        self.calls: list[str] = []
        """Every call so far, as text."""
        self.failure: SchedulerError | None = None
        """Raised by every call from now on."""
        self.silent = False
        """Whether calls never return."""
        self.closed = False
        self._made = 0
        self._watchers: list[asyncio.Queue[Observation]] = []

    async def current(self) -> SchedulerSize:
        """The requested size and the number of placed nodes."""
        await self._called("current")
        return self._size()

    async def request(self, nodes: int, reason: str) -> None:
        """Provide missing nodes, up to this number."""
        await self._called(f"request {nodes}")
        self.resize(max(nodes, len(self.names)))

    async def release(self, names: Sequence[str], nodes: int, reason: str) -> None:
        """Remove these nodes, then more until ``nodes`` are left."""
        await self._called(" ".join(["release", str(nodes), *names]))
        self.names = [name for name in self.names if name not in names]
        self.resize(min(nodes, len(self.names)))

    async def watch(self) -> AsyncIterator[Observation]:
        """Yields the size, then all changes."""
        if self.failure is not None and not self.failure.retry:
            raise self.failure
        observations: asyncio.Queue[Observation] = asyncio.Queue()
        self._watchers.append(observations)
        try:
            yield Sized(self._size())
            while True:
                yield await observations.get()
        finally:
            self._watchers.remove(observations)

    async def close(self) -> None:
        """Note that the scheduler was closed; nodes stay."""
        self.closed = True

    # --- what a test may do ----------------------------------------------------------------------------------------

    def resize(self, nodes: int) -> None:
        """Change the size, as a user of the scheduler would."""
        before = len(self.names)
        while len(self.names) < nodes:
            self.names.append(f"n-{self._made}")
            self._made += 1
        del self.names[nodes:]
        if len(self.names) != before:
            self._tell(Sized(self._size()))

    def doom(self, node: str, reason: str = "reclaimed", lead_s: float = 0.0) -> None:
        """Announce that a node will be removed in ``lead_s`` seconds."""
        self._tell(Disruption(node, reason, lead_s))

    def _size(self) -> SchedulerSize:
        return SchedulerSize(len(self.names), len(self.names))

    def _tell(self, observation: Observation) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(observation)

    async def _called(self, text: str) -> None:
        self.calls.append(text)
        await asyncio.sleep(0)
        if self.silent:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
