"""What a launcher says to the person who started it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable


def console(node: str) -> Callable[[str], None]:
    """Plain lines on stderr, with the time and the node, so that the output of several nodes can be read together.

    What the Master decides comes twice to its own launcher, as a decision and as an order; it is said once.
    """
    last = ""

    def log(text: str) -> None:
        nonlocal last
        if text == last:
            return
        last = text
        stamp = time.strftime("%H:%M:%S")
        with contextlib.suppress(OSError, ValueError):
            print(f"[edl {stamp} {node}] {text}", file=sys.stderr, flush=True)

    return log


class ToConsole(logging.Handler):
    """What edl's own modules log beside the launcher's work goes the same way."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Any thread."""
        self._log(self.format(record))


def listen_to_modules(log: Callable[[str], None]) -> Callable[[], None]:
    """Show what edl's modules log; returns what ends that."""
    source, handler = logging.getLogger("edl"), ToConsole(log)
    source.addHandler(handler)
    source.setLevel(logging.INFO)
    source.propagate = False

    def end() -> None:
        source.removeHandler(handler)
        source.propagate = True

    return end


def let_go_of_console() -> None:
    """Before the end: a console that went away (``edl-run … | head``) must not decide the exit status.

    The interpreter writes what is left in the buffers when it ends, and ends with 120 when it cannot.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
