"""Runs external programs with a timeout, and reports failures with the program's own output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import IO

from edl.anonymous_file import anonymous_file
from edl.errors import SchedulerError
from edl.programs import LACKING, LOOK_S, TOO_MUCH, ending, is_too_much
from edl.subprocesses import start_program

MOST_SHOWN = 400
"""Limit on the characters of a program's output in an error message; the end is kept."""


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
    something for the moment), takes longer than ``timeout_s`` or prints too much; then it is killed with all its child
    processes.
    """
    try:
        return await _called(command, timeout_s, environment, written)
    except OSError as error:
        text = f"{command[0]} cannot be started: {error.strerror}"
        raise SchedulerError(text, retry=error.errno in LACKING) from error


async def _called(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None, written: str) -> str:
    with anonymous_file(written.encode()) as stdin, anonymous_file() as out, anonymous_file() as err:
        process = await start_program(
            *command,
            stdin=stdin,
            stdout=out,
            stderr=err,
            env=dict(environment) if environment is not None else None,
            start_new_session=True,
        )
        try:
            why = await _ended(process, timeout_s, out, err)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if why:
            raise SchedulerError(f"{command[0]} {why}", retry=True)
        if process.returncode:
            said = _shown(_read(err)) or _shown(_read(out)) or "nothing"
            code = process.returncode
            raise CommandFailed(f"{command[0]} {ending(code)} and said: {said}", code, said)
        return _read(out).decode(errors="replace")


async def _ended(process: asyncio.subprocess.Process, timeout_s: float, *printed: IO[bytes]) -> str:
    """Wait until the program has ended; returns why it must not go on, or an empty text."""
    ending = asyncio.ensure_future(process.wait())
    until_s = asyncio.get_running_loop().time() + timeout_s
    try:
        while not ending.done():
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return f"took longer than {timeout_s:g} s"
            await asyncio.wait({ending}, timeout=min(LOOK_S, left_s))
            if is_too_much(*printed):
                return TOO_MUCH
    finally:
        ending.cancel()
    return ""


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _shown(output: bytes) -> str:
    text = " ".join(output.decode(errors="replace").split())
    return text if len(text) <= MOST_SHOWN else f"…{text[-MOST_SHOWN:]}"
