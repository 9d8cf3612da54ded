"""Fetches a snapshot in ranges, over several connections at once.

One connection is limited by what one processor can copy and check. The first connection ends the transfer; the others
only help it: what a helper has not fetched when its connection ends is fetched by another. If the first one breaks,
another takes its place, and what has been fetched stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from edl.adapters.copy_connection import CopyConnection, check_sum, count_in
from edl.errors import CheckpointError, ProtocolError

log = logging.getLogger(__name__)

RANGE_BYTES = 64 << 20
MOST_CONNECTIONS = 8
Connect = Callable[[], AbstractContextManager[CopyConnection]]
"""Opens another connection on which the same snapshot can be asked for. Raises ``CheckpointError``."""


def connections_for(size: int) -> int:
    """How many connections to use for so many bytes: as many as half of the processors can serve."""
    return max(1, min(MOST_CONNECTIONS, (os.cpu_count() or 1) // 2, -(-size // RANGE_BYTES)))


class RangeFetch:
    """One transfer into ``view``."""

    def __init__(self, view: memoryview, what: str) -> None:
        """``what`` names the snapshot in errors."""
        self._view = view
        self._what = what
        self._left = deque(range(0, len(view), RANGE_BYTES))
        self._changed = threading.Condition()
        self._fetching: set[CopyConnection] = set()
        """The helpers' connections."""
        self._over = False
        self._done = 0
        """Number of ranges that have been fetched."""

    def run(self, line: CopyConnection, connect: Connect, replace: Connect) -> None:
        """Fetch everything, with helpers on further connections (``connect``); returns when all bytes are there, and no
        thread writes to the view any more. Raises ``OSError``, ``ProtocolError`` or ``CheckpointError``, as does the
        first connection, or the last one that took its place (``replace``)."""
        try:
            self._begin_helping(connect)
            self._lead(line, replace)
        finally:
            with self._changed:
                self._over = True  # a helper that is not connected yet will not write
                for one in self._fetching:
                    one.hang_up()
                self._changed.wait_for(lambda: not self._fetching)

    def _lead(self, line: CopyConnection, replace: Connect) -> None:
        """Fetch all on the first connection. If that breaks, go on with another one, unless nothing has come since the
        last time."""
        fruitless = False
        with contextlib.ExitStack() as opened:
            while True:
                before = self._done
                try:
                    return self._fetch_all(line)
                except (OSError, ProtocolError) as error:
                    if fruitless and self._done == before:
                        raise
                    fruitless = self._done == before
                    log.info("Snapshot copies: %s: a connection broke, trying another one: %s", self._what, error)
                line = opened.enter_context(replace())

    def _begin_helping(self, connect: Connect) -> None:
        try:
            for _ in range(connections_for(len(self._view)) - 1):
                threading.Thread(target=self._help, args=(connect,), name="edl-fetch-range", daemon=True).start()
        except RuntimeError as error:  # no further thread can be started
            log.debug("Snapshot copies: fewer connections help: %s", error)

    def _fetch_all(self, line: CopyConnection) -> None:
        while True:
            self._fetch_some(line)
            with self._changed:
                if self._left:
                    continue
                if not self._fetching:
                    break
                self._changed.wait(line.limits.silence_s / 3)
            line.send_frame({"wait": True})
        line.send_frame({"done": True})

    def _help(self, connect: Connect) -> None:
        try:
            with connect() as line:
                with self._changed:
                    if self._over or not self._left:
                        return
                    self._fetching.add(line)
                try:
                    self._fetch_some(line)
                finally:
                    with self._changed:
                        self._fetching.discard(line)
                        self._changed.notify_all()
                line.send_frame({"done": True})
        except (OSError, ProtocolError, CheckpointError) as error:
            log.debug("Snapshot copies: a helping connection ended: %s", error)

    def _fetch_some(self, line: CopyConnection) -> None:
        """Fetch ranges until none is left to begin with."""
        while True:
            with self._changed:
                if self._over or not self._left:
                    return
                start = self._left.popleft()
            try:
                self._fetch(line, start)
            except BaseException:
                with self._changed:
                    self._left.appendleft(start)
                    self._changed.notify_all()
                raise
            with self._changed:
                self._done += 1

    def _fetch(self, line: CopyConnection, start: int) -> None:
        part = self._view[start : start + RANGE_BYTES]
        line.send_frame({"start": start, "size": len(part)})
        line.within(line.time_for(len(part)))
        crc32 = line.read_into(part)
        check_sum(self._what, crc32, count_in(line.receive_answer(), "crc32"), f" from byte {start} on")
