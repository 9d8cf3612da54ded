"""Logs when the launcher's event loop was blocked, and by which code. The lease is renewed on the loop, so a node that
was "silent for 3 s" may only have been busy. A separate thread measures the delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable

from edl.adapters.clock import SystemClock

LOOK_S = 0.25
"""Seconds between two measurements."""
LIMIT_S = 1.0
"""Delay in seconds from which a line is logged: a third of the default lease."""
FROZEN_S = 0.5
"""If a wait of this thread takes this many seconds longer than its timeout, the whole process was not running."""
FRAMES = 3
"""Number of stack frames in the log line."""


def waited_for_a_core_s(thread: int) -> float:
    """Seconds that a thread of this process (its native id) was ready to run and did not get a core; 0 if the kernel
    does not count them."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class LoopWatch:
    """Watches the running event loop in a thread until ``end``. ``limit_s``: delay in seconds from which a line is
    logged. ``log`` is called from the thread."""

    def __init__(self, log: Callable[[str], None], limit_s: float = LIMIT_S) -> None:
        self._log = log
        self._clock = SystemClock()
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._watched, self._thread = threading.get_ident(), threading.get_native_id()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="edl-watchdog", daemon=True).start()

    def end(self) -> None:
        """Let the watching thread end. Does not wait for it."""
        self._over.set()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while not self._over.wait(LOOK_S):
                self._measure()

    def _measure(self) -> None:
        began_s, waited_s, answered = self._clock.now_s(), waited_for_a_core_s(self._thread), threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        if answered.wait(self._limit_s):
            return
        where = self._stack()
        frozen = self._clock.now_s() - began_s > self._limit_s + FROZEN_S
        while not answered.wait(LOOK_S):
            if self._over.is_set():
                return
        delay_s = self._clock.now_s() - began_s
        starved_s = waited_for_a_core_s(self._thread) - waited_s
        if frozen or delay_s - starved_s < self._limit_s:
            why = "stopped, suspended, or starved of CPU time"
            self._log(f"this launcher was not running for {delay_s:.1f} s ({why})")
        else:
            self._log(f"this launcher's event loop was blocked for {delay_s:.1f} s. Please report it: {where}")

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return "unknown place"
        frames = traceback.extract_stack(frame)[-FRAMES:]
        return " > ".join(f"{one.filename}:{one.lineno} in {one.name}" for one in frames)
