"""Whether processes run, as the kernel shows it."""

from __future__ import annotations

import os
import signal

from edl.adapters.run_states import run_states
from tests.support.named_process import CUT_NAME, process_named


def test_running_and_gone() -> None:
    with process_named(b"w (1) R") as pid:
        assert set(run_states([os.getpid(), pid])) == {os.getpid(), pid}
        assert not run_states([pid])[pid].stopped
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert run_states([pid])[pid].stopped
    assert run_states([pid]) == {}


def test_a_name_that_ends_in_the_middle_of_a_character() -> None:
    with process_named(CUT_NAME) as pid:
        assert not run_states([pid])[pid].stopped
