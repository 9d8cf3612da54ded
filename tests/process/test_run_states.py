"""Whether real processes run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from edl.adapters.run_states import run_states
from tests.process.harness import until


def test_a_stopped_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            assert not run_states([child.pid])[child.pid].stopped
            os.kill(child.pid, signal.SIGSTOP)
            until(lambda: run_states([child.pid])[child.pid].stopped, "stopped")
            os.kill(child.pid, signal.SIGCONT)
            until(lambda: not run_states([child.pid])[child.pid].stopped, "continued")
            assert run_states([child.pid])[child.pid].starved_s >= 0
        finally:
            child.kill()


def test_a_process_that_is_gone_is_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert run_states([child.pid, os.getpid()]).keys() == {os.getpid()}
