"""What outlives or leaves the job while this launcher is the Master: the history files, and traces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from edl.launch.history_recording import Recording
from edl.launch.settings import LaunchSettings
from edl.launch.trace_export import TraceExport
from edl.master.chronicle import WrittenStep


class Recorder(Protocol):
    """Takes in the steps of the Master."""

    def written(self, step: WrittenStep) -> None:
        """Record a step whose changes are in the store; does not block."""
        ...

    async def end(self) -> None:
        """Finish what has been recorded, within some seconds."""
        ...


class Recorders:
    """All recorders of one launcher."""

    def __init__(self, recorders: Sequence[Recorder] = ()) -> None:
        self._recorders = recorders

    def written(self, step: WrittenStep) -> None:
        """See ``Recorder``."""
        for recorder in self._recorders:
            recorder.written(step)

    async def end(self) -> None:
        """See ``Recorder``; all at the same time."""
        await asyncio.gather(*(recorder.end() for recorder in self._recorders))


def recorders(settings: LaunchSettings, run: str, log: Callable[[str], None]) -> Recorders:
    """Those that the settings ask for. ``run``: see ``Registration.run``."""
    made: list[Recorder] = []
    if settings.history.folder:
        made.append(Recording(settings, run, log))
    if settings.otlp_endpoint:
        made.append(TraceExport(settings, run, log))
    return Recorders(made)
