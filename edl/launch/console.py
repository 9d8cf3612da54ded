"""What a launcher says to the person who started it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

WAITING_BYTES = 8 << 20
"""Most that is kept for a console that takes nothing."""
FORMED = re.compile(r"round \d+: ")
"""How a line about a new world begins; there is one for each."""


def console(node: str) -> Callable[[str], None]:
    """Plain lines on stderr, with the time and the node, so that the output of several nodes can be read together.

    What the Master decides comes twice to its own launcher, as a decision and as an order; it is said once. Between the
    two other decisions may be said; the line about a new world is recognised beyond them.
    """
    last = last_round = ""

    def log(text: str) -> None:
        nonlocal last, last_round
        if text in (last, last_round):
            return
        last = text
        if FORMED.match(text):
            last_round = text
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


def open_console() -> None:
    """Right at the start: standard streams that whoever started this has closed lead nowhere. Otherwise the next files
    that are opened get their numbers, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 - to the end


@contextlib.contextmanager
def unblocked_console() -> Iterator[None]:
    """Meanwhile nothing that is written to stdout and stderr waits for the console: a terminal that was stopped with
    Ctrl-S, a pager, a collector of logs that hangs. A launcher that waited for one could not renew its lease.

    At the end everything is written, however long that takes.
    """
    writer, replaced = _Writer(), {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            stream.flush()
            into = io.TextIOWrapper(
                _Queued(writer, stream.fileno(), isatty=stream.isatty()),
                stream.encoding,
                stream.errors,
                line_buffering=True,
            )
        except (OSError, ValueError):
            continue  # something without a descriptor has been put there, or its reader has gone away
        replaced[name] = stream, into
        setattr(sys, name, into)
    try:
        yield
    finally:
        for name, (stream, into) in replaced.items():
            with contextlib.suppress(OSError, ValueError):
                into.flush()
            setattr(sys, name, stream)
        writer.close()


class _Queued(io.BufferedIOBase):
    """A descriptor that takes everything at once. Errors come with a later write."""

    def __init__(self, writer: _Writer, descriptor: int, *, isatty: bool) -> None:
        super().__init__()
        self._writer = writer
        self._descriptor = descriptor
        self._isatty = isatty

    @property
    def name(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        self._writer.put(self._descriptor, bytes(data))
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self._isatty


class _Writer:
    """Writes in a thread, in the order in which it is told to. Of more than ``WAITING_BYTES`` the oldest is left out,
    and that is told in its place."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._left_out: Counter[int] = Counter()
        self._failed: dict[int, OSError] = {}
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, data: bytes) -> None:
        """Any thread. Raises the ``OSError`` of an earlier write to this descriptor, once."""
        with self._changed:
            error = self._failed.pop(descriptor, None)
            if error is not None:
                raise OSError(error.errno, error.strerror)
            self._waiting.append((descriptor, data))
            self._bytes += len(data)
            while self._bytes > WAITING_BYTES and len(self._waiting) > 1:
                other, lost = self._waiting.popleft()
                self._bytes -= len(lost)
                self._left_out[other] += lost.count(b"\n")
            self._changed.notify()

    def close(self) -> None:
        """Wait until all is written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                descriptor, data = self._waiting.popleft()
                lines = self._left_out.pop(descriptor, 0)
            gap = f"[edl] {lines} lines are left out here: the console did not take them\n" if lines else ""
            try:
                _write_all(descriptor, gap.encode() + data)
            except OSError as error:
                with self._changed:
                    self._failed[descriptor] = error
            with self._changed:
                self._bytes -= len(data)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # somebody who has the same terminal does not want to wait for it
            select.select([], [descriptor], [])


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
