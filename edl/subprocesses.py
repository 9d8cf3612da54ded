"""Starts programs for an event loop, also where a container's limit on processes or descriptors keeps asyncio from
waiting for them."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import errno
from typing import Any

READ_AHEAD = 1 << 16
"""Bytes of output that are kept in advance, as by ``asyncio.create_subprocess_exec``."""


class _StartedProgram(asyncio.subprocess.SubprocessStreamProtocol):
    """Kills its program if nobody can wait for it."""

    def __init__(self) -> None:
        super().__init__(READ_AHEAD, asyncio.get_running_loop())
        self.abandoned = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called once the pipes are connected, which may be after ``start_program`` has failed."""
        super().connection_made(transport)
        if self.abandoned:
            transport.close()


async def start_program(*command: str, **how: Any) -> asyncio.subprocess.Process:
    """``asyncio.create_subprocess_exec``, with an ``OSError`` also where there is no thread or descriptor left to wait
    for the program. asyncio finds that out when it runs already, and would leave it behind."""
    loop, protocol = asyncio.get_running_loop(), _StartedProgram()
    streams = {"stdin": None, "stdout": None, "stderr": None}  # the loop's own default is a pipe for each
    try:
        transport, _ = await loop.subprocess_exec(lambda: protocol, *command, **{**streams, **how})
    except BaseException as error:
        protocol.abandoned = True
        if isinstance(error, RuntimeError):  # before Python 3.12, a thread waits for each program
            raise OSError(errno.EAGAIN, str(error)) from error
        raise
    return asyncio.subprocess.Process(transport, protocol, loop)
