"""Helper processes that cannot be started."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest

from edl.errors import WorkerStartError
from edl.launch.helper_process import HelperProcess


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_a_host_without_processes_memory_or_descriptors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The launcher goes on renewing the keys of its other helpers, and tries again."""

    async def full(*command: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    with pytest.raises(WorkerStartError, match=f"cannot start a pserver process: {os.strerror(number)}"):
        asyncio.run(HelperProcess.start("pserver", ("ps", "server"), {"secret": "s"}))
