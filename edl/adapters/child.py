"""What processes that a launcher starts, and talks to in lines, have in common."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from edl.errors import ProtocolError


def private_stdout() -> TextIO:
    """The launcher's pipe for ourselves; what users' functions print goes to standard error."""
    mine = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(mine, "w")


def at_sigterm(leave: Callable[[], None]) -> None:
    """Call this once, in a thread of its own, when SIGTERM comes; later ones do nothing. For the main thread.

    A handler in Python would run when the main thread gets to it: if the signal comes just before that one begins to
    wait for something else, only after that has come.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)

    def wait() -> None:
        while os.read(reading, 1) != bytes([signal.SIGTERM]):
            pass
        leave()

    threading.Thread(target=wait, name="edl-sigterm", daemon=True).start()


def secret_line(who: str, option: str) -> str:
    """The secret of ``order_line``."""
    return order_line(who, option)["secret"]


def order_line(who: str, option: str) -> dict[str, str]:
    """The first line of standard input: ``{"secret": …}``, perhaps with more. Raises ``ProtocolError``, naming ``who``
    this is for and the option of the launcher that starts them."""
    order = sys.stdin.readline()
    try:
        told = json.loads(order)
        return {**{name: str(value) for name, value in told.items()}, "secret": str(told["secret"])}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(
            f'the first line of standard input must be {{"secret": "…"}}. {who} are started by a launcher: '
            f"python -m edl.launch {option}"
        ) from error
