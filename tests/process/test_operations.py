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


@pytest.mark.slow
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
    rows = [line.split()[:3] for line in lines if line[:2] in ("a ", "b ", "c ")]
    assert [row[1:] for row in rows] == [["running", "0"], ["running", "1"], ["running", "2"]]
    assert rows[0][0] == "a"  # the other two joined in any order
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


@pytest.mark.slow
def test_errors_after_failed_workers(tmp_path: Path, etcd: OutsideEtcd) -> None:
    arguments = ("--fail=1:5:raise", "--fail-rounds=2")
    with Job(tmp_path, [etcd.endpoint], options=("--slot-strikes=0",), arguments=arguments) as job:
        job.start("a", "b")
        failing = job.wait_world(2, after=2).nodes[1]
        shown = job.cli("errors")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("Incident in round 2, ")
        assert "rank      : 1 (local_rank: 0)" in shown.stdout
        assert f"(node: {failing})" in shown.stdout
        assert "traceback : Traceback (most recent call last):" in shown.stdout
        assert shown.stdout.splitlines()[-1] == "1 earlier incident: edl errors --all"
        plain = json.loads(job.cli("errors", "--all", "--json").stdout)
        assert [incident["round"] for incident in plain["incidents"]] == [2, 1]
        assert plain["incidents"][0]["failures"][0]["node"] == failing
        assert "restart 1 of 3" in plain["incidents"][1]["events"][0]["text"]


@pytest.mark.slow
def test_logs_and_stacks_of_nodes_that_are_not_the_master(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """Without a shared directory, and without files at all."""
    arguments = ("--say=\x1b[31mhello\x1b[0m", "--free")
    with Job(tmp_path, [etcd.endpoint], arguments=arguments, options=("--log-dir=/dev/null",)) as job:
        job.start("a")
        job.wait_world(1)
        job.start("b", "c")
        seen = job.wait_world(3)
        rank = seen.ranks("b")[0]
        shown = job.cli("logs", f"--rank={rank}")
        assert shown.returncode == 0, shown.stderr
        assert f"[{rank}@b]: hello" in shown.stdout.splitlines()
        assert "@a]" not in shown.stdout and "@c]" not in shown.stdout
        assert "\x1b[31mhello" in job.cli("logs", "--node=b", "--raw").stdout
        assert {line.partition("@")[2][0] for line in job.cli("logs").stdout.splitlines()} == {"a", "b", "c"}
        plain = [json.loads(line) for line in job.cli("logs", "--json", "--node=c", "--lines=1").stdout.splitlines()]
        assert {(line["node"], line["stderr"]) for line in plain} == {("c", True)}
        stacks = job.cli("stacks", "--node=b")
        assert stacks.returncode == 0, stacks.stderr
        assert f"[{rank}@b]: Current thread " in stacks.stdout
        assert "plain.py" in stacks.stdout
        job.wait_steps(5, 3)  # they train on
        with terminal(["logs", "-f", "--node=c", "--lines=1"], job) as screen:
            screen.wait_for("@c]: hello")
            job.start("d")  # a new world, in which each worker says it again
            screen.wait_for("@c]: hello")
            job.end_soon()
            until(screen._ended, "the end of logs -f with the job")
            assert screen.process.wait() == 0
        assert set(job.exit_codes().values()) == {0}
