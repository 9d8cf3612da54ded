"""The launcher's console: log lines with time and node, and standard streams that never block."""

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
from typing import Any, NoReturn

from edl.agent.workers.console_lines import CONSOLES, place_of

WAITING_BYTES = 8 << 20
"""Limit in bytes on output that is queued while the console does not accept it."""
LAST_WORDS_S = 1.0
"""Seconds that a process which exits at once waits for the console to accept what is queued."""
FORMED = re.compile(r"round \d+: ")
"""Matches the log line about a new world."""


def console(node: str) -> Callable[[str], None]:
    """A log function that prints lines on stderr with time and node, so that the output of several nodes can be merged.

    A worker's unfinished line is ended first. A message is suppressed if it equals the previous line or the last line
    about a new world: the Master's own launcher logs each decision twice, once as the Master and once as an agent.
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
            before = CONSOLES.interrupt(place_of(sys.stderr)).decode()
            print(f"{before}[edl {stamp} {node}] {text}", file=sys.stderr, flush=True)

    return log


class ToConsole(logging.Handler):
    """Passes the log records of edl's modules, from level INFO, to the launcher's log function."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record. Called from any thread."""
        self._log(self.format(record))


def listen_to_modules(log: Callable[[str], None]) -> Callable[[], None]:
    """Print the log records of edl's modules with ``log``; returns a function that undoes this."""
    source, handler = logging.getLogger("edl"), ToConsole(log)
    source.addHandler(handler)
    source.setLevel(logging.INFO)
    source.propagate = False

    def end() -> None:
        source.removeHandler(handler)
        source.propagate = True

    return end


def open_console() -> None:
    """Open standard streams that are closed on the null device.

    Must be called before any file is opened: a file would get the descriptor of a closed stream, and receive what is
    printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 - to the end


@contextlib.contextmanager
def unblocked_console() -> Iterator[None]:
    """A context in which writes to stdout and stderr are queued instead of waiting for the console.

    A terminal that was stopped with Ctrl-S, a pager or a hanging log collector would otherwise block the launcher,
    which could then not renew its lease. On exit the queue is written completely, however long that takes.
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
            continue  # the stream has no descriptor, or its reader is gone
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
    """A stream that queues every write without blocking. An error is raised by a later write."""

    def __init__(self, writer: _Writer, descriptor: int, *, isatty: bool) -> None:
        super().__init__()
        self._writer = writer
        self._descriptor = descriptor
        self._isatty = isatty

    @property
    def name(self) -> int:
        return self._descriptor

    def drain(self, limit_s: float) -> None:
        """Wait until everything queued has been written, at most ``limit_s`` seconds."""
        self._writer.drain(limit_s)

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
    """Writes queued output in a thread, in order. If more than ``WAITING_BYTES`` are queued, the oldest output is
    dropped and replaced by a line that says how many lines are missing."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._dropped: Counter[int] = Counter()
        """Dropped lines by descriptor."""
        self._failed: dict[int, OSError] = {}
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def put(self, descriptor: int, data: bytes) -> None:
        """Queue data. Called from any thread. Raises the ``OSError`` of an earlier write to this descriptor, once."""
        with self._changed:
            error = self._failed.pop(descriptor, None)
            if error is not None:
                raise OSError(error.errno, error.strerror)
            self._waiting.append((descriptor, data))
            self._bytes += len(data)
            while self._bytes > WAITING_BYTES and len(self._waiting) > 1:
                other, lost = self._waiting.popleft()
                self._bytes -= len(lost)
                self._dropped[other] += lost.count(b"\n")
            self._changed.notify_all()

    def drain(self, limit_s: float) -> None:
        """Wait until all queued data has been written, at most ``limit_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, limit_s)

    def close(self) -> None:
        """Wait until all queued data has been written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                descriptor, data = self._waiting.popleft()
                lines = self._dropped.pop(descriptor, 0)
            gap = f"[edl] {lines} lines are missing here: the console did not accept them in time\n" if lines else ""
            try:
                _write_all(descriptor, gap.encode() + data)
            except OSError as error:
                with self._changed:
                    self._failed[descriptor] = error
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process has made the shared terminal non-blocking
            select.select([], [descriptor], [])


def exit_at_once(status: int) -> NoReturn:
    """Exit with this status, whatever is still running in this process. What has been printed is written first, unless
    the console does not accept it within ``LAST_WORDS_S`` seconds."""
    for stream in (sys.stdout, sys.stderr):
        queue = getattr(stream, "buffer", None)
        if isinstance(queue, _Queued):
            queue.drain(LAST_WORDS_S)
    os._exit(status)


def close_console() -> None:
    """Flush the standard streams; redirect those whose reader is gone (``edl-run … | head``) to the null device.

    Otherwise the interpreter would fail to flush them at exit, and end with status 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
