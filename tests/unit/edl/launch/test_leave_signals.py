"""A launcher that is still starting, or has just finished, gets a signal. Each runs in a process of its own, which a
signal without a handler would kill."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edl.exit_codes import ExitCode

STARTING = """
import asyncio, os, signal, sys
from edl.launch.leave_signals import cancelled_by_signals
from edl.launch.settings import LeaveSettings

first, later = sys.argv[1].split(","), sys.argv[2].split(",") if sys.argv[2] else []

async def work() -> int:
    for name in first:
        os.kill(os.getpid(), signal.Signals[name])
    try:
        await asyncio.Event().wait()
    finally:
        for name in later:
            os.kill(os.getpid(), signal.Signals[name])
            while signal.getsignal(signal.Signals[name]) is not signal.SIG_DFL:  # until it has been handled
                await asyncio.sleep(0)
        print("cleaned up")

wanted = LeaveSettings(passed=(signal.SIGXCPU,))
sys.exit(asyncio.run(cancelled_by_signals(work(), print, wanted)))
"""


@pytest.mark.parametrize(
    ("first", "later", "status", "named"),
    [
        ("SIGTERM", "", ExitCode.TERMINATED, "SIGTERM"),
        ("SIGINT", "", ExitCode.INTERRUPTED, "SIGINT"),
        pytest.param("SIGUSR2", "", ExitCode.TERMINATED, "SIGUSR2", id="a drain signal"),
        pytest.param("SIGXCPU", "", ExitCode.TERMINATED, "SIGXCPU", id="one of --signals-to-handle"),
        pytest.param("SIGUSR1,SIGTERM", "", ExitCode.TERMINATED, "SIGTERM", id="one to forward, ignored"),
        pytest.param("SIGUSR2", "SIGTERM", ExitCode.TERMINATED, "SIGUSR2", id="an announced one is the first"),
    ],
)
def test_a_launcher_that_is_still_starting_cleans_up(first: str, later: str, status: ExitCode, named: str) -> None:
    done = subprocess.run([sys.executable, "-c", STARTING, first, later], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout == f"cleaned up\n{named}: ended before this node took part in the job\n"


ENDING = """
import asyncio, os, signal, sys
from edl.launch import __main__ as program

number = signal.Signals[sys.argv[1]]

async def work() -> int:
    asyncio.get_running_loop().add_signal_handler(number, print, "heard")
    return 100

end = asyncio.SelectorEventLoop.close

def close(loop: asyncio.SelectorEventLoop) -> None:
    end(loop)
    os.kill(os.getpid(), number)  # the cluster takes the node of an ended job back at once

asyncio.SelectorEventLoop.close = close
program._run_and_exit(work())
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR2"])
def test_a_signal_between_the_end_of_the_loop_and_that_of_the_interpreter_does_not_change_the_status(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING, name], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (100, "", "")
