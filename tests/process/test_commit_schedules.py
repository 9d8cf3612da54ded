"""Runs of ``python -m edl.testing.commits`` on several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TIMEOUT_S = 120.0


def children(parent: int) -> set[int]:
    """Those that play; not the one that multiprocessing keeps for its books."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                command = (stat.parent / "cmdline").read_bytes()
                if b"spawn_main" in command:
                    found.add(int(stat.parent.name))
        except OSError:
            continue
    return found


def used_s(process: int) -> float:
    """CPU time of a process in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_run_on_several_processes_comes_to_its_end() -> None:
    command = [sys.executable, "-m", "edl.testing.commits", "--runs", "300", "--jobs", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (run.returncode, run.stdout.partition(",")[0]) == (0, "300 schedules"), run.stderr


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_plays_on_when_a_run_is_ended(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "edl.testing.commits", "--runs", "100000", "--jobs", "2"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as run:
        playing: set[int] = set()
        try:
            until(lambda: len(children(run.pid)) == 2)
            playing = children(run.pid)
            until(lambda: all(used_s(one) > 1 for one in playing))
            assert run.poll() is None
            run.send_signal(number)
            run.wait(TIMEOUT_S)
            until(lambda: all(gone(one) for one in playing))
        finally:
            run.kill()
            for one in playing:
                if not gone(one):
                    os.kill(one, signal.SIGKILL)
