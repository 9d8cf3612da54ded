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
