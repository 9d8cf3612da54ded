"""Reads single keys from the terminal while an asyncio loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator

QUIT = b"qQ"


@contextlib.contextmanager
def quit_event() -> Iterator[asyncio.Event]:
    """An event that the key q sets, and Ctrl-C. Without a terminal on stdin only Ctrl-C does. The terminal's mode is
    restored at the end."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, over.set)
    loop.add_signal_handler(signal.SIGTERM, over.set)  # so that the terminal is restored
    descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
    saved = termios.tcgetattr(descriptor) if descriptor >= 0 else []
    try:
        if descriptor >= 0:
            tty.setcbreak(descriptor)
            loop.add_reader(descriptor, _read, descriptor, over, loop)
        yield over
    finally:
        if descriptor >= 0:
            loop.remove_reader(descriptor)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)


def _read(descriptor: int, over: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    try:
        typed = os.read(descriptor, 64)
    except OSError:  # the terminal is gone
        typed = b""
    if not typed:
        loop.remove_reader(descriptor)
        over.set()
    if any(key in QUIT for key in typed):
        over.set()
