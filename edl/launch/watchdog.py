"""Says when the launcher's event loop has stood still, and where: leases are renewed on it, so a node that is "silent
for 3 s" may only have been busy. A thread of its own measures, since the loop cannot tell of itself.
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
"""Pause between two measurements."""
LIMIT_S = 1.0
"""Delay that is worth a line: a third of the usual lease."""
FROZEN_S = 0.5
"""Longer than that beyond its time, and this thread itself has stood still: the process has."""
FRAMES = 3


class LoopWatch:
    """Watches the running event loop until ``end``. ``log`` is called from its thread."""

    def __init__(self, log: Callable[[str], None], limit_s: float = LIMIT_S) -> None:
        self._log = log
        self._clock = SystemClock()
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="edl-watchdog", daemon=True).start()

    def end(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while not self._over.wait(LOOK_S):
                self._measure()

    def _measure(self) -> None:
        began_s, answered = self._clock.now_s(), threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        if answered.wait(self._limit_s):
            return
        where = self._stack()
        frozen = self._clock.now_s() - began_s > self._limit_s + FROZEN_S
        while not answered.wait(LOOK_S):
            if self._over.is_set():
                return
        delay_s = self._clock.now_s() - began_s
        if frozen:
            why = "stopped, suspended, or without a processor"
            self._log(f"this launcher has stood still for {delay_s:.1f} s ({why})")
        else:
            self._log(f"this launcher was busy for {delay_s:.1f} s, and deaf meanwhile; please report it: {where}")

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return "nowhere"
        frames = traceback.extract_stack(frame)[-FRAMES:]
        return " > ".join(f"{one.filename}:{one.lineno} in {one.name}" for one in frames)
