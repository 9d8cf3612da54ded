"""What a launcher says to the person who started it."""

from __future__ import annotations

import contextlib
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
