"""Children of the fork server: what it may ask them."""

from __future__ import annotations

import signal
import subprocess
import sys

from edl.worker.child_processes import ChildProcesses
from tests.support.named_process import CUT_NAME, process_named


def test_a_signal_without_a_handler_is_not_passed_on_whatever_the_process_is_called() -> None:
    children = ChildProcesses()
    with process_named(CUT_NAME) as pid:
        children.add(pid)
        assert not children.forward(pid, signal.SIGUSR1)
        assert "has not reached its script" in children.dump(pid, signal.SIGUSR1)


def test_a_signal_with_a_handler_is_passed_on() -> None:
    children = ChildProcesses()
    script = "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(7)); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children.add(process.pid)
        assert children.forward(process.pid, signal.SIGUSR1)
        assert process.wait(60) == 7
