"""How a launcher's process ends when its work is done."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edl.agent.state import Outcome
from edl.launch import launcher as launcher_module
from edl.launch.launcher import Launcher, Parts

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


def test_a_report_on_a_disk_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    thawed = threading.Event()

    def keep(*_: Any) -> None:
        thawed.wait()

    reporter = SimpleNamespace(keep=keep, folder="/logs")
    parts = SimpleNamespace(reporter=reporter, candidate=SimpleNamespace(shell=None), log=said.append)
    monkeypatch.setattr(launcher_module, "REPORT_S", 0.0)

    async def scene() -> None:
        await Launcher(cast(Parts, parts))._report(1, Outcome(1, "failed"))
        thawed.set()

    asyncio.run(scene())
    assert said == ["/logs does not answer: not waiting for the report that goes there"]
