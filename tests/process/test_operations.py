"""Commands that watch a running job, with real launchers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.process.harness import DEADLINE_S, WORKERS, Job, OutsideEtcd, until


class Terminal:
    """A command at a terminal of 80 columns and 24 lines, and everything that it has drawn so far."""

    def __init__(self, words: Sequence[str], job: Job) -> None:
        self.mine, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.mode = termios.tcgetattr(self.theirs)
        where = [f"--rdzv-endpoint={','.join(job.endpoints)}", f"--rdzv-id={job.name}"]
        command = [sys.executable, "-m", "edl.cli", *words, *where]
        environment = {**job.base_environment(), "TERM": "xterm"}
        self.process = subprocess.Popen(
            command, stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, env=environment
        )
        self.drawn = ""

    def wait_for(self, text: str) -> None:
        """Wait until this is drawn after what was waited for before."""
        until_s = time.monotonic() + DEADLINE_S
        while text not in self.drawn:
            assert time.monotonic() < until_s, f"{text!r} was not drawn: {self.drawn[-4000:]!r}"
            ready, _, _ = select.select([self.mine], [], [], 0.1)
            if ready:
                self.drawn += os.read(self.mine, 65536).decode(errors="replace")
        self.drawn = self.drawn[self.drawn.index(text) + len(text) :]

    def press(self, keys: str) -> int:
        """Press keys that end the command; returns its status."""
        os.write(self.mine, keys.encode())
        return self.end()

    def end(self) -> int:
        """Wait for the command's end; returns its status. The terminal has its former mode then."""
        until(self._ended, "the end of the command")
        assert termios.tcgetattr(self.theirs)[:4] == self.mode[:4]
        return self.process.wait()

    def _ended(self) -> bool:
        ready, _, _ = select.select([self.mine], [], [], 0)
        if ready:
            self.drawn += os.read(self.mine, 65536).decode(errors="replace")
        return self.process.poll() is not None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.mine)
        os.close(self.theirs)


@contextlib.contextmanager
def terminal(words: Sequence[str], job: Job) -> Iterator[Terminal]:
    at = Terminal(words, job)
    try:
        yield at
    finally:
        at.close()


@pytest.fixture
def committing(tmp_path: Path, etcd: OutsideEtcd) -> Iterator[Job]:
    """A job whose workers commit at each step."""
    with Job(tmp_path, [etcd.endpoint], script=(str(WORKERS / "rejoin_plain.py"),), options=("--lease-ttl=2",)) as job:
        yield job


def test_top_watches_a_job_whose_master_goes(committing: Job) -> None:
    job = committing
    job.start("a")
    job.wait_world(1)
    job.start("b", "c")
    job.wait_world(3)
    job.wait_status(lambda status: all(node["step_s"] > 0 for node in status["nodes"]), "step times of all nodes")
    once = job.cli("top", "--once")
    assert once.returncode == 0, once.stderr
    lines = once.stdout.splitlines()
    assert lines[0].startswith(f"{job.name}  running  round ")
    assert " steps/s  step " in once.stdout
    assert [line.split()[:3] for line in lines if line[:2] in ("a ", "b ", "c ")] == [
        ["a", "running", "0"], ["b", "running", "1"], ["c", "running", "2"]]  # fmt: skip
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    plain = json.loads(job.cli("top", "--once", "--json").stdout)
    assert plain["status"]["job"] == job.name
    assert plain["pace"]["nodes"] == 3
    assert "Pace: " in job.cli("status").stdout
    with terminal(["top", "-n", "0.2"], job) as screen:
        screen.wait_for(f"{job.name}  running")
        screen.wait_for("Master a")
        job.kill("a")
        screen.wait_for("looking for the Master")
        screen.wait_for("2 workers on 2 nodes")
        assert screen.press("q") == 0
    with terminal(["top"], job) as screen:
        screen.wait_for("2 workers on 2 nodes")
        screen.process.send_signal(signal.SIGINT)  # this terminal does not control it, so Ctrl-C would not reach it
        assert screen.end() == 0


def test_errors_after_failed_workers(tmp_path: Path, etcd: OutsideEtcd) -> None:
    arguments = ("--fail=1:5:raise", "--fail-rounds=2")
    with Job(tmp_path, [etcd.endpoint], options=("--slot-strikes=0",), arguments=arguments) as job:
        job.start("a", "b")
        job.wait_world(2, after=2)
        shown = job.cli("errors")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("Incident in round 2, ")
        assert "rank      : 1 (local_rank: 0)" in shown.stdout
        assert "(node: b)" in shown.stdout
        assert "traceback : Traceback (most recent call last):" in shown.stdout
        assert shown.stdout.splitlines()[-1] == "1 earlier incident: edl errors --all"
        plain = json.loads(job.cli("errors", "--all", "--json").stdout)
        assert [incident["round"] for incident in plain["incidents"]] == [2, 1]
        assert plain["incidents"][0]["failures"][0]["node"] == "b"
        assert "restart 1 of 3" in plain["incidents"][1]["events"][0]["text"]
