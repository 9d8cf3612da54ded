"""Runs external programs with a timeout, and reports failures with the program's own output."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from edl.errors import SchedulerError

MOST_SHOWN = 400
"""Limit on the characters of a program's output in an error message; the end is kept."""
MOST_READ = 4 * 1024 * 1024
"""Limit on the bytes that are read from a program's output."""
_LACKING = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ETXTBSY)
"""Errors of a host that has no process, memory, descriptor or space left, perhaps only for a moment."""


class CommandFailed(SchedulerError):
    """A program exited with a status other than 0, or was killed by a signal (negative ``status``). ``said``: its
    output, shortened."""

    def __init__(self, message: str, status: int, said: str) -> None:
        super().__init__(message, retry=True)
        self.status = status
        self.said = said


async def call(
    command: Sequence[str], timeout_s: float, *, environment: Mapping[str, str] | None = None, written: str = ""
) -> str:
    """Run a program to its end; returns its standard output. ``written``: text for its standard input.

    Raises ``CommandFailed``, and ``SchedulerError`` if it cannot be started (``retry`` false, unless the host lacks
    something for the moment) or takes longer than ``timeout_s``; then it is killed with all its child processes.
    """
    try:
        return await _called(command, timeout_s, environment, written)
    except OSError as error:
        text = f"{command[0]} cannot be started: {error.strerror}"
        raise SchedulerError(text, retry=error.errno in _LACKING) from error


async def _called(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None, written: str) -> str:
    # Files instead of pipes: a program may leave background processes behind, which would keep a pipe open.
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(written.encode())
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=out,
            stderr=err,
            env=dict(environment) if environment is not None else None,
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except asyncio.TimeoutError:
            raise SchedulerError(f"{command[0]} took longer than {timeout_s:g} s", retry=True) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            said = _shown(_read(err)) or _shown(_read(out)) or "nothing"
            code = process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
            raise CommandFailed(f"{command[0]} {how} and said: {said}", code, said)
        return _read(out).decode(errors="replace")


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MOST_READ)


def _shown(output: bytes) -> str:
    text = " ".join(output.decode(errors="replace").split())
    return text if len(text) <= MOST_SHOWN else f"…{text[-MOST_SHOWN:]}"
