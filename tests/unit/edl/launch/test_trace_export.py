"""The end of a launcher that sends traces."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from edl.launch import trace_export
from edl.launch.trace_export import TraceExport


class Silent:
    """An export whose collector does not answer."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def end(self) -> None:
        self.released.wait()


def test_a_collector_that_does_not_answer_does_not_keep_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_export, "END_S", 0.01)
    said: list[str] = []
    silent = Silent()
    export: Any = TraceExport.__new__(TraceExport)
    export._export, export._log = silent, said.append
    try:
        asyncio.run(export.end())  # also waits for the threads of its executor
        assert said == ["the collector of traces does not respond: the last ones are lost"]
    finally:
        silent.released.set()
