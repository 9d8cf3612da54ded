"""The thread that writes the workers' files."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edl.agent.workers.writer_thread import Scribe


def test_a_function_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    written: list[int] = []

    def fails() -> None:
        raise UnicodeEncodeError("ascii", "進", 0, 1, "not in this encoding")

    async def scenario() -> None:
        scribe = Scribe(most_bytes=10)
        assert scribe.do(fails, 10)
        assert await scribe.done(60)
        assert scribe.do(lambda: written.append(1), 10), "what has failed holds no bytes any more"
        assert await scribe.done(60)

    asyncio.run(scenario())
    assert written == [1]
    assert "UnicodeEncodeError" in caplog.text


def test_what_is_queued_while_there_can_be_no_thread_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        scribe = Scribe()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            assert scribe.do(lambda: written.append(1), 10)
            assert not await scribe.done(0.01)
        assert scribe.do(lambda: written.append(2), 10)
        assert await scribe.done(60)

    asyncio.run(scenario())
    assert written == [1, 2]
