"""What a launcher says to the person who started it."""

from __future__ import annotations

import contextlib
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
