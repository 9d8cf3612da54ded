"""What the detection of hangs looks at on this node: processes, collectives, devices."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence

from edl.adapters.activity import activity
from edl.adapters.device_load import devices_busy
from edl.agent.workers.collective_reports import CollectiveReports
from edl.agent.workers.hang import Watched
from edl.agent.workers.workers import WorkerGroup
from edl.ports import Activity
from edl.wire.collective_wait import CollectiveWait
from edl.wire.node_requests import OutputLine, StacksRequest

WRITTEN_S = 3.0
"""Seconds that workers get to write what their flight recorders hold."""
PAUSE_S = 0.1


class LocalHangSources:
    """``edl.agent.workers.hang_shell.HangSources`` of this launcher. ``address``: the worker server's. ``devices``:
    UUIDs of the node's devices, as far as they are known."""

    def __init__(
        self, workers: WorkerGroup, address: str, now_s: Callable[[], float], devices: Sequence[str] = ()
    ) -> None:
        self._workers = workers
        self._reports = CollectiveReports(address, now_s)
        self._devices = tuple(uuid for uuid in devices if uuid)

    def open(self) -> None:
        """Receive what workers report."""
        self._reports.open()

    def close(self) -> None:
        """Stop that."""
        self._reports.close()

    def workers(self) -> Mapping[int, Watched]:
        """The workers that have a process, by slot."""
        return self._workers.watched()

    def activity(self, pids: Collection[int]) -> Mapping[int, Activity]:
        """The resources that they have used so far. Blocks."""
        return activity(pids)

    def waits(self) -> Mapping[int, CollectiveWait]:
        """The collectives that workers wait for, by pid."""
        return self._reports.waits()

    async def stacks(self) -> Collection[OutputLine]:
        """The stacks of all workers."""
        return (await self._workers.stacks(StacksRequest())).lines

    async def flight_recorders(self, pids: Collection[int]) -> Collection[str]:
        """Let workers write what their flight recorders hold into their log folders; returns the files."""
        paths = {pid: self._workers.flight_recorder(pid) for pid in pids}
        asked = [path for pid, path in paths.items() if path and self._reports.ask_dump(pid, path)]
        for _ in range(round(WRITTEN_S / PAUSE_S) if asked else 0):
            if await asyncio.to_thread(_exist, asked):
                break
            await asyncio.sleep(PAUSE_S)
        return [path for path in asked if await asyncio.to_thread(os.path.exists, path)]

    def devices_busy(self) -> bool:
        """Whether an accelerator of this node computes. Blocks."""
        return devices_busy(self._devices)


def _exist(paths: Sequence[str]) -> bool:
    return all(os.path.exists(path) for path in paths)
