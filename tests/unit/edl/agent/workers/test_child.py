"""SIGTERM in the processes that a launcher starts beside its workers."""

from __future__ import annotations

import subprocess
import sys

# The main thread has its signal taken, and waits in a call that nothing ends: a Python handler would never run.
SCRIPT = """
import os, signal, threading
from edl.adapters.child import at_sigterm
at_sigterm(lambda: os._exit(7))
other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
os.read(0, 1)
"""


def test_sigterm_is_heard_whatever_the_main_thread_waits_for() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        process.terminate()
        assert process.wait(60) == 7
