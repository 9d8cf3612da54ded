"""Reads the clocks between which a thread's waits are counted."""

from __future__ import annotations

import time

from edl.worker.framework import Moment


def now() -> Moment:
    """The time on the monotonic clock, and the CPU time that this thread has used; both in seconds."""
    return time.monotonic(), time.thread_time()
