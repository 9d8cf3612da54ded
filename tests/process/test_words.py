"""Commands for users: list of commands, confirmation of ``stop``, unresponsive nodes."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import DEADLINE_S, Job, OutsideEtcd


def test_no_command_is_mistaken_for_another(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """The nearest name to ``sop`` would be ``stop``."""
    with Job(tmp_path, [etcd.endpoint]) as job:
        asked = job.cli("sop")
        assert asked.returncode == ExitCode.USAGE
        assert "no such command: sop. Commands: " in asked.stderr and "`edl status` shows a job" in asked.stderr
        assert "mean" not in asked.stderr


def at_a_terminal(words: list[str], job: Job, typed: str) -> tuple[int, str]:
    """Run a command as a person does, who types this when asked."""
    mine, theirs = pty.openpty()
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=job.base_environment())
    os.close(theirs)
    seen, answered, until_s = "", False, time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        ready, _, _ = select.select([mine], [], [], 0.1)
        if ready:
            try:
                seen += os.read(mine, 4096).decode()
            except OSError:  # the other side is closed
                break
        if not answered and "[y/N]" in seen:
            answered = True
            os.write(mine, typed.encode())
    os.close(mine)
    return process.wait(DEADLINE_S), seen


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [sys.executable, "-m", "edl.cli", "stop", "--no-wait"]


def test_stop_asks_a_person_and_does_not_ask_a_program(tmp_path: Path, etcd: OutsideEtcd, words: list[str]) -> None:
    with Job(tmp_path, [etcd.endpoint]) as job:
        job.start("a", nproc=2)
        before = job.wait_world(2)
        where = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={job.name}"]
        status, seen = at_a_terminal([*words, *where], job, "n\n")
        assert status == ExitCode.INTERRUPTED
        assert f"End job {job.name} (running, 2 workers on a)? [y/N]" in seen
        assert job.wait_steps(5) == before
        assert job.cli("stop", "--no-wait").returncode == 0
        assert job.nodes["a"].exit_code() == ExitCode.KILLED


def test_stop_does_not_ask_who_is_sure(tmp_path: Path, etcd: OutsideEtcd, words: list[str]) -> None:
    with Job(tmp_path, [etcd.endpoint]) as job:
        job.start("a")
        job.wait_world(1)
        where = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={job.name}"]
        status, seen = at_a_terminal([*words, "--yes", *where], job, "")
        assert (status, "[y/N]" in seen) == (0, False), seen
        assert job.nodes["a"].exit_code() == ExitCode.KILLED


def test_a_frozen_master_is_told_from_one_that_has_gone(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], options=("--lease-ttl=60",)) as job:
        node = job.start("a")
        job.wait_world(1)
        node.send(signal.SIGSTOP)
        try:
            asked = job.cli("status")
        finally:
            node.send(signal.SIGCONT)
        assert asked.returncode == ExitCode.STORE_UNREACHABLE
        assert f"the Master of job {job.name} on node a (" in asked.stderr
        assert "does not answer: its host or its launcher is frozen, overloaded or unreachable" in asked.stderr
        node.kill()
        gone = job.cli("status")
        assert "has exited; another launcher takes over when its lease expires" in gone.stderr, gone.stderr
        with contextlib.suppress(AssertionError):
            job.check_nothing_left(1)
