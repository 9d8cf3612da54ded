"""Shared code of helper processes that talk to their launcher line by line, over stdin and stdout."""

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
    """The pipe to the launcher. Stdout is redirected to stderr, so that nothing that user functions print gets into the
    pipe."""
    mine = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(mine, "w")


def at_sigterm(leave: Callable[[], None]) -> None:
    """Call ``leave`` once, on a separate thread, when SIGTERM arrives; later signals are ignored. Call this from the
    main thread.

    A Python signal handler only runs when the main thread executes bytecode again: if the signal arrives just before
    the main thread blocks, the handler waits until the blocking call returns.
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
    """The secret from the first line of standard input; see ``order_line``."""
    return order_line(who, option)["secret"]


def order_line(who: str, option: str) -> dict[str, str]:
    """Read the first line of standard input: ``{"secret": …}``, possibly with more fields. Raises ``ProtocolError``
    that names the kind of process (``who``) and the launcher option that starts it."""
    order = sys.stdin.readline()
    try:
        fields = json.loads(order)
        return {**{name: str(value) for name, value in fields.items()}, "secret": str(fields["secret"])}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(
            f'the first line of standard input must be {{"secret": "…"}}. {who} are started by a launcher: '
            f"python -m edl.launch {option}"
        ) from error
