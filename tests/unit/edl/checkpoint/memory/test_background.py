"""Work in threads, at a container's limit on processes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edl.checkpoint.memory import background
from edl.checkpoint.memory.background import in_thread


def test_it_waits_until_there_can_be_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 0
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(background, "THREAD_AGAIN_S", 0.0)
    assert asyncio.run(in_thread("edl-test", lambda: "written")) == "written"
    assert refused == 3


def test_an_error_of_the_work_is_passed_on() -> None:
    def fails() -> None:
        raise RuntimeError("of the work itself")

    with pytest.raises(RuntimeError, match="of the work itself"):
        asyncio.run(in_thread("edl-test", fails))
