"""Whether real processes run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from edl.adapters.run_states import run_states

LIMIT_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_stopped_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            assert not run_states([child.pid])[child.pid].stopped
            os.kill(child.pid, signal.SIGSTOP)
            until(lambda: run_states([child.pid])[child.pid].stopped)
            os.kill(child.pid, signal.SIGCONT)
            until(lambda: not run_states([child.pid])[child.pid].stopped)
            assert run_states([child.pid])[child.pid].starved_s >= 0
        finally:
            child.kill()


def test_a_process_that_is_gone_is_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert run_states([child.pid, os.getpid()]).keys() == {os.getpid()}
