"""How a launcher's process ends when its work is done."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, atexit, os, signal
from edl.launch import __main__ as program

async def work() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, print, "heard")
    return 100

for number in (signal.SIGTERM, signal.SIGINT):
    atexit.register(os.kill, os.getpid(), number)  # somebody takes the host away while the interpreter ends
program._to_the_end(work())
"""


def test_a_signal_after_the_end_does_not_change_the_status() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (100, "", "")
