"""A program of the user's that gets each notification as JSON on its standard input."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from edl.anonymous_file import anonymous_file
from edl.config import CREDENTIALS, environment
from edl.errors import NotificationError
from edl.notify.notification import Notification
from edl.programs import LACKING, LOOK_S, TOO_MUCH, ending, is_too_much
from edl.rendezvous.phrases import one_line

MOST_SHOWN = 200
"""Limit on the characters of the program's output in an error; the end is kept."""


@dataclass(frozen=True, slots=True)
class NotifyProgram:
    """One program, which is started without a shell and without arguments."""

    path: str
    label: str
    environment: Mapping[str, str] = field(repr=False)

    def send(self, notification: Notification, now_s: float, limit_s: float) -> None:
        """Run the program to its end. Raises ``NotificationError`` if it cannot be started, exits with a status other
        than 0, or takes longer than ``limit_s``; then it is killed with all its child processes."""
        try:
            with anonymous_file(notification.document() + b"\n") as given, anonymous_file() as said:
                self._run(given, said, limit_s)
        except OSError as error:
            text = f"it cannot be started: {error.strerror}"
            raise NotificationError(text, retry=error.errno in LACKING) from None

    def _run(self, given: IO[bytes], said: IO[bytes], limit_s: float) -> None:
        process = subprocess.Popen(
            [self.path], stdin=given, stdout=said, stderr=said, env=dict(self.environment), start_new_session=True
        )
        try:
            status = _ended(process, said, limit_s)
        except NotificationError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if status:
            size = said.seek(0, os.SEEK_END)
            said.seek(max(0, size - MOST_SHOWN))
            text = one_line(said.read().decode(errors="replace")) or "nothing"
            raise NotificationError(f"it {ending(status)} and said: {text}", retry=True)


def _ended(process: subprocess.Popen[bytes], said: IO[bytes], limit_s: float) -> int:
    """The program's exit status. Raises ``NotificationError`` if it must be killed."""
    for _ in range(max(1, math.ceil(limit_s / LOOK_S))):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(LOOK_S, limit_s))
        if is_too_much(said):
            raise NotificationError(f"it {TOO_MUCH} and was killed", retry=True)
    raise NotificationError(f"it took longer than {limit_s:g} s and was killed", retry=True)


def program_environment() -> dict[str, str]:
    """The environment of programs that are notified: this process's, without its credentials."""
    return {name: value for name, value in environment().items() if name not in CREDENTIALS}
