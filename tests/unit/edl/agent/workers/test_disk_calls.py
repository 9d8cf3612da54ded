"""A disk that hangs does not take the launcher's threads."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edl.agent.workers.disk_calls import DiskCalls
from edl.agent.workers.log_paths import Attempt
from edl.agent.workers.outputs import Outputs
from edl.config import LogPlan
from edl.types import Round

SOON_S = 30.0


def test_error_files_on_a_disk_that_hangs_hold_one_thread(tmp_path: Path) -> None:
    """All workers of a node end at each incident, and each has such a file."""

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(3))
        outputs = Outputs(LogPlan(str(tmp_path)), "a", {}, lambda text: None)
        workers = [outputs.open(outputs.files(Attempt(Round(1), slot, slot)), {}) for slot in range(4)]
        for worker in workers:
            os.makedirs(os.path.dirname(worker.error_file), exist_ok=True)
            os.mkfifo(worker.error_file)  # opening it waits for a writer
        assert await asyncio.gather(*(worker.last_error(0.2) for worker in workers)) == [None] * 4
        try:
            assert await asyncio.wait_for(asyncio.to_thread(int), SOON_S) == 0
        finally:
            for worker in workers:
                os.close(os.open(worker.error_file, os.O_RDWR))
                os.unlink(worker.error_file)
                Path(worker.error_file).write_text("the reason")  # noqa: ASYNC240 - a small file
        assert await workers[1].last_error(SOON_S) == "the reason"
        for worker in workers:
            worker.close()

    asyncio.run(whole())


def test_errors_are_the_callers() -> None:
    def fail() -> None:
        raise OSError("no")

    async def whole() -> None:
        disk = DiskCalls()
        with pytest.raises(OSError, match="no"):
            await disk.call(fail, SOON_S)
        assert await asyncio.gather(*(disk.call(int, SOON_S) for _ in range(5))) == [0] * 5

    asyncio.run(whole())
