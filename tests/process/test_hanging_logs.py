"""Logs on a disk that hangs: a file that takes for ever to open stands for it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import Job, OutsideEtcd, until


@pytest.mark.slow
def test_a_log_folder_that_hangs_costs_lines_and_no_node(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], options=("--redirects=3", "--lease-ttl=2")) as job:
        nodes = job.start("a"), job.start("b")
        before = job.wait_world(2)
        for node in nodes:
            (folder,) = node.folder.glob("*")
            for name in ("stdout.log", "stderr.log"):
                place = folder / "attempt_1" / "0" / name
                place.parent.mkdir(parents=True, exist_ok=True)
                os.mkfifo(place)  # opened for writing when somebody reads it: never
        os.kill(before.pids[0], signal.SIGKILL)
        after = job.wait_world(2, after=before.round)
        late = time.monotonic() + 3  # longer than a lease
        until(lambda: job.steps()[-1].t > late, "steps on")
        assert job.wait_steps(10) == after
        status = job.status()
        assert (status["round"], status["restarts_used"], len(status["nodes"])) == (after.round, 1, 2)
        job.end_soon()
        assert set(job.exit_codes().values()) == {ExitCode.OK}
        for node in nodes:
            assert "the log disk has not answered for 2 s" in node.text
            assert "was not running for" not in node.text and "was blocked for" not in node.text
