"""A helper process that cannot be ended holds nobody up."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
from typing import cast

import pytest

from edl.launch import helper_process
from edl.launch.helper_process import HelperProcess


class Blocked:
    """A process that waits for a disk, which not even SIGKILL ends."""

    pid = 7
    returncode = None
    killed = False

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


def test_one_that_its_disk_blocks_does_not_keep_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "REAP_S", 0.0)
    process = Blocked()
    helper = HelperProcess(cast(asyncio.subprocess.Process, process), {"port": 1})
    asyncio.run(asyncio.wait_for(helper.stop(0.0), 60))
    assert process.killed


class Piped:
    """A process that answers when the test says so."""

    pid, returncode = 7, None

    def __init__(self) -> None:
        self.asked = 0
        self.stdin, self.stdout = self, asyncio.StreamReader()

    def write(self, data: bytes) -> None:
        self.asked += data.count(b"?")

    async def drain(self) -> None:
        """Nothing is held back."""


def test_it_is_asked_at_once_and_its_last_word_counts_until_it_answers() -> None:
    async def main() -> None:
        process = Piped()
        helper = HelperProcess(cast(asyncio.subprocess.Process, process), {"port": 1})
        process.stdout.feed_data(b"!0\n")
        await helper.look(60.0)
        assert helper.masterless and not helper.writes
        await helper.look(0.0)
        assert helper.masterless, "no answer yet"
        later = asyncio.ensure_future(helper.look(60.0))
        await asyncio.sleep(0)
        process.stdout.feed_data(b"!w\n!w\n")
        await later
        assert not helper.masterless and helper.writes
        assert process.asked == 3, "each answer belongs to a question"
        process.stdout.feed_eof()
        await helper.look(60.0)
        assert not helper.masterless

    asyncio.run(asyncio.wait_for(main(), 60))
