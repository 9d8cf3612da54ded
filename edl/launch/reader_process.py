"""One reader process, a launcher's child: ``python -m data_service reader``; see ``data_service/serve.py``."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import json
import os
import secrets
import signal
import sys

import edl.adapters.with_parent
from edl.errors import WorkerStartError
from edl.tasks import end

START_S = 60.0
"""From its start until it listens. Importing pyarrow takes a second, much longer from a cold network disk."""
ASK_S = 2.0
"""Between two questions whether it still answers."""
FROZEN_S = 15.0
"""One that does not answer for so long is killed. A user's function may hold Python's lock for a while."""


class ReaderProcess:
    """Made by ``start``. It dies with this process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, secret: str) -> None:
        self._process = process
        self.port = port
        self.secret = secret
        """Whoever knows it is served."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @classmethod
    async def start(cls, host: str, capacity: int, grace_s: float) -> ReaderProcess:
        """Returns once it listens, at a port of its choice. Only for the main thread. Raises ``WorkerStartError``."""
        wrapper = [sys.executable, "-I", "-S", edl.adapters.with_parent.__file__, str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *wrapper,
            *(sys.executable, "-m", "data_service", "reader"),
            *(f"--host={host}", f"--capacity={capacity}", f"--grace={grace_s:g}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which ends it in good order
        )
        secret = secrets.token_hex(16)
        try:
            first = await asyncio.wait_for(_say(process, json.dumps({"secret": secret})), START_S)
            return cls(process, int(json.loads(first)["port"]), secret)
        except (OSError, ValueError, TypeError, KeyError, asyncio.TimeoutError) as error:
            await _kill(process)
            status = f"ended with status {process.returncode}" if not isinstance(error, asyncio.TimeoutError) else ""
            raise WorkerStartError(
                f"a reader process {status or f'did not listen within {START_S:g} s'}. What it says is above"
            ) from error
        except BaseException:
            await _kill(process)
            raise

    async def ended(self) -> str:
        """Until it has ended, killed by this method if it is frozen; how it ended, for people."""
        frozen = asyncio.ensure_future(self._frozen())
        over = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({frozen, over}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done() and frozen.result():
                await _kill(self._process)
                return f"did not answer for {FROZEN_S:g} s and was killed"
            code = await over
            return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        finally:
            await end(frozen)
            await end(over)

    async def _frozen(self) -> bool:
        """Ask now and then; True when no answer has come in time, False when its pipes are closed."""
        while True:
            await asyncio.sleep(ASK_S)
            try:
                if not await asyncio.wait_for(_say(self._process, "?"), FROZEN_S):
                    return False
            except asyncio.TimeoutError:
                return True
            except OSError:
                return False

    def kill(self) -> None:
        """SIGKILL if it still runs."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, grace_s: float) -> None:
        """Let it finish what it streams, for so long."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        await _kill(self._process)


async def _say(process: asyncio.subprocess.Process, line: str) -> bytes:
    """Write a line, read the answer; empty when there will be none."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101 - both are pipes
    process.stdin.write(f"{line}\n".encode())
    await process.stdin.drain()
    return await process.stdout.readline()


async def _kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL if it still runs, and reap it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()
