"""One process that helps a job, a launcher's child: ``python -m data_service reader`` or ``python -m ps server``.

The two talk in lines over pipes. The launcher writes an order, one line of JSON with the secret by which others are
known, and then ``?`` now and then; the process writes one line of JSON once it listens, and answers each ``?`` with a
line that begins with ``!``. ``!0`` says that no Master has been heard of lately.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import edl.adapters.with_parent
from edl.config import CREDENTIALS, changed, environment
from edl.errors import WorkerStartError
from edl.tasks import end

START_S = 60.0
"""From its start until it listens. Importing what it needs takes a second, much longer from a cold network disk."""
ASK_S = 2.0
"""Between two questions whether it still answers."""
FROZEN_S = 15.0
"""One that does not answer for so long is killed. A user's function may hold Python's lock for a while."""


class HelperProcess:
    """Made by ``start``. It dies with this process."""

    def __init__(self, process: asyncio.subprocess.Process, ready: Mapping[str, Any]) -> None:
        self._process = process
        self.ready = ready
        """What it has said once it listened."""
        self.masterless = False
        """No Master has been in touch with it, it says."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @classmethod
    async def start(
        cls, what: str, module: Sequence[str], order: Mapping[str, Any], log_file: str = ""
    ) -> HelperProcess:
        """``python -m MODULE``; returns once it listens, at a port of its choice. Only for the main thread. Raises
        ``WorkerStartError``, which says ``what`` could not be started.

        ``log_file``: what it says is appended there; empty, or where that cannot be: the console.
        """
        wrapper = [sys.executable, "-I", "-S", edl.adapters.with_parent.__file__, str(os.getpid())]
        with _appending(log_file) as stderr:
            process = await asyncio.create_subprocess_exec(
                *wrapper,
                *(sys.executable, "-m", *module),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=changed(environment(), dict.fromkeys(CREDENTIALS)),
                start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which ends it in good order
            )
        try:
            ready = json.loads(await asyncio.wait_for(_say(process, json.dumps(order)), START_S))
            int(ready["port"])
            return cls(process, ready)
        except (OSError, ValueError, TypeError, KeyError, asyncio.TimeoutError) as error:
            await _kill(process)
            status = f"ended with status {process.returncode}" if not isinstance(error, asyncio.TimeoutError) else ""
            told = status or f"did not listen within {START_S:g} s"
            where = f"in {log_file}" if log_file else "above"
            raise WorkerStartError(f"a {what} process {told}. What it says is {where}") from error
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
                answer = await asyncio.wait_for(_say(self._process, "?"), FROZEN_S)
                if not answer:
                    return False
                self.masterless = answer.startswith(b"!0")
            except asyncio.TimeoutError:
                return True
            except OSError:
                return False

    def kill(self) -> None:
        """SIGKILL if it still runs."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def ask_to_end(self) -> None:
        """SIGTERM: it ends by itself when nothing is left to do."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def stop(self, grace_s: float) -> None:
        """Let it finish what it does, for so long; 0: not at all."""
        if self._process.returncode is None and grace_s > 0:
            self.ask_to_end()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        await _kill(self._process)


@contextlib.contextmanager
def _appending(path: str) -> Iterator[int | None]:
    """The descriptor of a file to append to; None where there is none."""
    descriptor = None
    with contextlib.suppress(OSError):
        if path:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


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
