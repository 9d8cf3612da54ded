"""One helper process, a child of the launcher: ``python -m data_service reader`` or ``python -m ps server``.

Launcher and process exchange lines over pipes. The launcher writes an order, one line of JSON with the secret that
clients must present, and then ``?`` every ``ASK_S`` seconds. The process writes one line of JSON once it listens, and
answers each ``?`` with a line that begins with ``!``. ``!0`` means that it has heard from no Master for a lease time;
``w`` at the end, that it may have to write something before it ends.
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
from edl.subprocesses import start_program
from edl.tasks import end

START_S = 60.0
"""Seconds that a process may take from its start until it listens. Importing its packages takes a second, and much
longer from a cold network disk."""
ASK_S = 2.0
"""Seconds between two checks that a process still answers."""
REAP_S = 5.0
"""Seconds to wait for a killed process. One that is blocked on I/O to a broken disk never ends, and does nothing more
either."""
FROZEN_S = 15.0
"""A process that does not answer for this many seconds is killed. Generous, because a user's function may hold the GIL
for a while."""


class HelperProcess:
    """A running helper process, created by ``start``. It is killed when this process dies."""

    def __init__(self, process: asyncio.subprocess.Process, ready: Mapping[str, Any]) -> None:
        self._process = process
        self.ready = ready
        """What it reported when it began to listen; ``port`` is always present."""
        self.masterless = False
        """Whether its last answer began with ``!0``."""
        self.writes = False
        """Whether its last answer ended with ``w``."""
        self._asking = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Process id of the helper."""
        return self._process.pid

    @classmethod
    async def start(
        cls, what: str, module: Sequence[str], order: Mapping[str, Any], log_file: str = ""
    ) -> HelperProcess:
        """Start ``python -m MODULE``; returns once it listens. Call it from the main thread only. Raises
        ``WorkerStartError``.

        ``what``: the kind of process, for the error. ``log_file``: file to append its stderr to; if it is empty or
        cannot be opened, stderr goes to the console.
        """
        wrapper = [sys.executable, "-I", "-S", edl.adapters.with_parent.__file__, str(os.getpid())]
        try:
            with _appending(log_file) as stderr:
                process = await start_program(
                    *wrapper,
                    *(sys.executable, "-m", *module),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    env=changed(environment(), dict.fromkeys(CREDENTIALS)),
                    start_new_session=True,  # only the launcher gets Ctrl-C; it ends the process gracefully
                )
        except OSError as error:  # no process, descriptor or memory is left, perhaps only for a moment
            advice = "Check the limits of processes and open files (ulimit -u, -n) and the free memory of this host"
            raise WorkerStartError(f"cannot start a {what} process: {error.strerror}. {advice}") from error
        try:
            ready = json.loads(await asyncio.wait_for(_exchange(process, json.dumps(order)), START_S))
            int(ready["port"])
            return cls(process, ready)
        except (OSError, ValueError, TypeError, KeyError, asyncio.TimeoutError) as error:
            await _kill(process)
            status = f"ended with status {process.returncode}" if not isinstance(error, asyncio.TimeoutError) else ""
            problem = status or f"did not listen within {START_S:g} s"
            where = f"in {log_file}" if log_file else "above"
            raise WorkerStartError(f"a {what} process {problem}. Its output is {where}") from error
        except BaseException:
            await _kill(process)
            raise

    async def ended(self) -> str:
        """Wait until the process has ended, and kill it if it does not answer; returns how it ended, for messages such
        as ``was killed by signal 9``."""
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
        """Check the process every ``ASK_S`` seconds; True once an answer is late, False once its pipes are closed."""
        while True:
            await asyncio.sleep(ASK_S)
            try:
                if not await asyncio.wait_for(self._ask(), FROZEN_S):
                    return False
            except asyncio.TimeoutError:
                return True

    async def look(self, limit_s: float) -> None:
        """Ask it now, and wait at most ``limit_s`` for the answer; without one, its last answer still counts."""
        await asyncio.wait({asyncio.ensure_future(self._ask())}, timeout=limit_s)

    async def _ask(self) -> bool:
        """Ask it, and keep the answer; False once its pipes are closed."""
        async with self._asking:
            with contextlib.suppress(OSError):
                answer = await _exchange(self._process, "?")
                if answer:
                    self.masterless, self.writes = answer.startswith(b"!0"), answer.strip().endswith(b"w")
                return bool(answer)
        return False

    def kill(self) -> None:
        """Send SIGKILL if the process is still running."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def ask_to_end(self) -> None:
        """Send SIGTERM: the process finishes its work and ends by itself."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """Close its input: it ends as if this launcher had ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def stop(self, grace_s: float, *, drains: bool = False) -> None:
        """Send SIGTERM, and SIGKILL after ``grace_s`` seconds. With 0 it is killed at once. ``drains``: SIGTERM only
        asks it to hand over its data, so its input is closed instead."""
        if self._process.returncode is None and grace_s > 0:
            (self.hang_up if drains else self.ask_to_end)()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        await _kill(self._process)


@contextlib.contextmanager
def _appending(path: str) -> Iterator[int | None]:
    """The descriptor of a file opened for appending; None if ``path`` is empty or cannot be opened."""
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


async def _exchange(process: asyncio.subprocess.Process, line: str) -> bytes:
    """Write a line and read the answer; returns an empty line if the process has closed its output."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101 - both are pipes
    process.stdin.write(f"{line}\n".encode())
    await process.stdin.drain()
    return await process.stdout.readline()


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Send SIGKILL if the process is still running, and reap it; waits at most ``REAP_S`` seconds."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    ended = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({ended}, timeout=REAP_S)
    finally:
        await end(ended)
