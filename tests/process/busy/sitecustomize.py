"""On the path of a launcher: SIGRTMIN keeps its event loop busy for as long as EDL_TEST_BUSY_S says."""

import os
import signal
import time


def _compute(number: int, frame: object) -> None:
    until_s = time.monotonic() + float(os.environ["EDL_TEST_BUSY_S"])
    while time.monotonic() < until_s:
        sum(range(1000))


if "EDL_TEST_BUSY_S" in os.environ:
    signal.signal(signal.SIGRTMIN, _compute)
