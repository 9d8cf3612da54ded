"""Stragglers in real jobs: exactly the slow rank is named, with its cause; healthy jobs name nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import ROOT, Job, OutsideEtcd, stragglers

WORKERS = ROOT / "tests" / "process" / "workers"
SCRIPT = str(WORKERS / "straggler_torch.py")
WINDOWS = 3
"""Half as many as by default, each of about 5 s."""


def job_of(
    folder: Path, etcd: OutsideEtcd, *arguments: str, nnodes: str = "2", mode: str = "report", script: str = SCRIPT
) -> Job:
    options = (f"--stragglers={mode}", f"--straggler-windows={WINDOWS}")
    return Job(folder, [etcd.endpoint], nnodes=nnodes, script=(script,), arguments=arguments, options=options)


@contextlib.contextmanager
def stopped_in_part(pid: int, stopped_s: float = 0.06, period_s: float = 0.1) -> Iterator[None]:
    """Stop a process for a part of each period."""
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(stopped_s)
                os.kill(pid, signal.SIGCONT)
                time.sleep(period_s - stopped_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def check_only(job: Job, rank: int, cause: str) -> None:
    """The alarm is about this rank and no other, in the status and in the history."""
    status = job.wait_status(lambda status: bool(stragglers(status)), "an alarm about a straggler")
    (alarm,) = stragglers(status)
    assert f"wait for rank {rank} " in alarm["text"], alarm
    assert f"cause {cause}:" in alarm["text"], alarm
    (node,) = [node for node in status["nodes"] if node["node"] == alarm["node"]]
    assert alarm["about"] == f"slot {node['places'][rank - node['first_rank']]}"
    raised = [event for event in job.events() if event["kind"] == "alarm"]
    assert [event["node"] for event in raised] == [alarm["node"]], raised
    assert "straggler" in job.cli("status").stdout


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.soak_but("2 ranks")
@pytest.mark.parametrize(("nodes", "nproc"), [("ab", 1), ("ab", 2)], ids=["2 ranks", "4 ranks"])
def test_a_worker_that_is_stopped_half_of_the_time(tmp_path: Path, etcd: OutsideEtcd, nodes: str, nproc: int) -> None:
    with job_of(tmp_path, etcd) as job:
        job.start(*nodes, nproc=nproc)
        seen = job.wait_world(2 * nproc)
        rank = 2 * nproc - 1
        with stopped_in_part(seen.pids[rank]):
            check_only(job, rank, "stopped")
        job.wait_status(lambda status: not stragglers(status), "the end of the alarm")
        assert any(event["kind"] == "alarm-cleared" for event in job.events())
        job.end_soon(5)
        assert set(job.exit_codes().values()) == {0}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.soak_but("compute")
@pytest.mark.parametrize("how", ["compute", "data"])
def test_a_rank_that_sleeps_in_each_step(tmp_path: Path, etcd: OutsideEtcd, how: str) -> None:
    with job_of(tmp_path, etcd, f"--slow=0:{how}:0.2") as job:
        job.start("a", "b")
        job.wait_world(2)
        check_only(job, 0, how)
        first = next(rank for node in job.status()["nodes"] for rank in node["ranks"] if node["first_rank"] == 0)
        assert first["peers_share"] < 0.5
        assert "Own time of a step" in job.cli("status").stdout


@pytest.mark.slow
@pytest.mark.torch
def test_a_healthy_job_names_nobody(tmp_path: Path, etcd: OutsideEtcd) -> None:
    """For twice as long as a straggler needs, as far as the ranks report."""
    with job_of(tmp_path, etcd) as job:
        job.start("a", "b")
        job.wait_world(2)
        reported: set[tuple[float, ...]] = set()

        def enough(status: Any) -> bool:
            assert not stragglers(status), status["alarms"]
            reported.update((rank["step_s"], rank["peers_share"]) for node in status["nodes"] for rank in node["ranks"])
            return len(reported) >= 2 * WINDOWS * 2

        job.wait_status(enough, "windows of both ranks")
        assert not [event for event in job.events() if event["kind"] == "alarm"]


@pytest.mark.slow
@pytest.mark.torch
def test_on_request_a_straggler_is_excluded(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd, "--slow=1:compute:0.2", nnodes="1:2", mode="exclude") as job:
        job.start("a", "b")
        seen = job.wait_world(2)
        out = seen.nodes[1]
        seen = job.wait_world(1, after=seen.round)
        assert seen.nodes[0] != out
        status = job.wait_status(lambda status: not stragglers(status), "an alarm that is over")
        (dropped,) = status["dropped"]
        assert (dropped["node"], dropped["slot"]) == (out, 0)
        assert "is a straggler" in dropped["why"]


@pytest.mark.slow
@pytest.mark.paddle
def test_with_paddle_the_ring_knows_who_waits(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with job_of(tmp_path, etcd, "--slow=1", script=str(WORKERS / "straggler_paddle.py")) as job:
        job.start("a", "b")
        job.wait_world(2)
        check_only(job, 1, "compute")
