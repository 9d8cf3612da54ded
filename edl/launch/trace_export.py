"""Sends traces of the changes of the world while this launcher is the Master (``--otlp-endpoint``)."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable

from edl import __version__
from edl.agent.workers.writer_thread import said_by_loop
from edl.launch.settings import LaunchSettings
from edl.master.chronicle import Chronicle, WrittenStep, step_lines
from edl.traces.spans import TraceState, spans

END_S = 5.0
"""Seconds that an ending launcher waits for the collector."""


class TraceExport:
    """The traces of this launcher. Sends nothing unless it becomes the Master."""

    def __init__(self, settings: LaunchSettings, run: str, log: Callable[[str], None]) -> None:
        """``run``: see ``Registration.run``."""
        from edl.traces.otlp import OtlpExport  # an extra

        spec, node, self._log = settings.spec, settings.node.name, log
        digest = hashlib.sha256(f"traces {run}".encode()).hexdigest()[:12]
        self._chronicle = Chronicle(spec.job, digest, node, __version__, {})
        self._pending = TraceState()
        about = {"edl.job": str(spec.job), "edl.master": node}
        self._export = OtlpExport(settings.otlp_endpoint, about, said_by_loop(log))

    def written(self, step: WrittenStep) -> None:
        """Send what a step of the Master completes; does not block."""
        self._chronicle, lines = step_lines(self._chronicle, step)
        for line in lines:
            self._pending, completed = spans(self._pending, line, reports=step.state.record.rejoins)
            self._export.send(completed)

    async def end(self) -> None:
        """Send what waits, if the collector takes it within ``END_S``."""
        # A daemon: a collector that does not answer must not keep the launcher from exiting.
        ending = threading.Thread(target=self._export.end, name="edl-traces", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, END_S)
        if ending.is_alive():
            self._log("the collector of traces does not respond: the last ones are lost")
