"""Launchers without a temporary folder, with a store that keeps ending, a disk that hangs, a signal at the very end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edl.agent.machine.state import Outcome
from edl.errors import StoreError
from edl.exit_codes import ExitCode
from edl.launch import __main__ as program
from edl.launch import launcher as launcher_module
from edl.launch.launcher import Launcher, LauncherDeps
from edl.testing.clock import FakeClock

PROGRAM = """
import asyncio, atexit, os, signal
from edl.launch import __main__ as program

async def work() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, print, "heard")
    return 100

for number in (signal.SIGTERM, signal.SIGINT):
    atexit.register(os.kill, os.getpid(), number)  # somebody takes the host away while the interpreter ends
program._run_and_exit(work())
"""


def test_a_signal_after_the_end_does_not_change_the_status() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (100, "", "")


TALKER = """
import asyncio, sys
from edl.launch import __main__ as program

async def work() -> int:
    sys.stdout.write("x" * 1_000_000 + "the last words")
    return 7

program.THREADS_S = 0.1
program._run_and_exit(work())
"""


def test_a_pager_gets_all_that_a_launcher_has_printed_however_late_it_reads() -> None:
    with subprocess.Popen([sys.executable, "-c", TALKER], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as talker:
        assert talker.stdout is not None
        text = os.read(talker.stdout.fileno(), 1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            talker.wait(0.5)  # longer than its threads may take
        rest, errors = talker.communicate(timeout=60)
    assert (text + rest)[-14:] == b"the last words"
    assert (len(text + rest), errors, talker.returncode) == (1_000_014, b"", 7)


def test_a_signal_ends_the_wait_for_a_console_that_takes_nothing() -> None:
    """As a log collector that hangs: the status stays what it was."""
    with subprocess.Popen([sys.executable, "-c", TALKER], stdout=subprocess.PIPE) as talker:
        assert talker.stdout is not None
        os.read(talker.stdout.fileno(), 1)
        while talker.poll() is None:
            if _handles_sigterm(talker.pid):
                talker.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                talker.wait(0.1)
        assert talker.returncode == 7


def _handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) & 1 << (signal.SIGTERM - 1))


def test_a_report_on_a_disk_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    thawed = threading.Event()

    def keep(*_: Any) -> None:
        thawed.wait()

    reporter = SimpleNamespace(keep=keep, folder="/logs")
    parts = SimpleNamespace(reporter=reporter, candidate=SimpleNamespace(shell=None), log=said.append)
    monkeypatch.setattr(launcher_module, "REPORT_S", 0.0)

    async def scenario() -> None:
        await Launcher(cast(LauncherDeps, parts))._report(1, Outcome(1, "failed"))
        thawed.set()

    asyncio.run(scenario())
    assert said == ["/logs does not respond: not waiting for the report to be written there"]


class Ending:
    """An etcd that ends as soon as it runs, when it can be started at all."""

    def __init__(self, starts: bool) -> None:
        self._starts = starts

    async def wait_exit(self) -> int:
        return 1

    def start(self) -> None:
        if not self._starts:
            raise StoreError("cannot find etcd")

    def failure(self) -> StoreError:
        return StoreError("etcd member a ended with status 1")


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        (True, "the embedded etcd keeps ending: etcd member a"),
        (False, "cannot start the embedded etcd: cannot find etcd"),
    ],
)
def test_a_store_that_keeps_ending_is_started_at_growing_pauses_and_says_why(
    monkeypatch: pytest.MonkeyPatch, starts: bool, said: str
) -> None:
    lines: list[str] = []
    paused: list[float] = []
    clock = FakeClock()

    async def pause(seconds: float) -> None:
        paused.append(seconds)
        clock.advance(seconds)
        if len(paused) == 7:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pause)
    parts = SimpleNamespace(member=Ending(starts), clock=clock, log=lines.append)

    async def scenario() -> None:
        with pytest.raises(asyncio.CancelledError):
            await Launcher(cast(LauncherDeps, parts))._keep_member()

    asyncio.run(scenario())
    assert paused == [1, 2, 4, 8, 16, 30, 30]
    assert any(line.startswith(said) for line in lines), lines


def test_a_host_without_a_temporary_folder_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/nowhere']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["edl-run", "--standalone", "train.py"])
    with pytest.raises(SystemExit) as left:
        program.main()
    assert left.value.code == ExitCode.USAGE
    assert "TMPDIR=/nowhere: no folder for temporary files can be written to. Name one, or " in capsys.readouterr().err
