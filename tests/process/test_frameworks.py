"""Unmodified training scripts of both frameworks, through the same faults."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd

EACH = pytest.mark.parametrize(
    "script",
    [
        pytest.param("ddp_torch.py", id="torch", marks=pytest.mark.torch),
        pytest.param("dp_paddle.py", id="paddle", marks=pytest.mark.paddle),
    ],
)


@pytest.fixture(autouse=True)
def only_with_the_framework(request: pytest.FixtureRequest) -> None:
    for name in ("torch", "paddle"):
        if request.node.get_closest_marker(name):
            pytest.importorskip(name)


@EACH
@pytest.mark.soak_but("torch")
def test_a_script_survives_a_worker_a_node_and_a_newcomer(tmp_path: Path, etcd: OutsideEtcd, script: str) -> None:
    with Job(tmp_path, [etcd.endpoint], script=(str(WORKERS / script),)) as job:
        job.start("a", "b", "c")
        first = job.wait_world(3)
        job.wait_steps(3)
        os.kill(first.pids[1], signal.SIGKILL)
        second = job.wait_world(3, after=first.round)
        assert second.nodes == first.nodes
        status = job.status()
        assert status["restarts_used"] == 1
        root = min(status["failures"], key=lambda failure: failure["peer_loss"])
        assert (root["rank"], root["what"]) == (1, "was killed by SIGKILL")

        victim = second.nodes[0]  # it serves the group's own store
        job.kill(victim)
        third = job.wait_world(2, after=second.round)
        assert job.status()["restarts_used"] == 1

        job.start("d")
        fourth = job.wait_world(3, after=third.round)
        assert fourth.nodes == {**third.nodes, 2: "d"}
        last = job.end_soon()
        del job.nodes[victim]
        assert set(job.exit_codes().values()) == {0}
        made = [step.step for step in job.steps() if step.rank == 0]
        assert sorted(set(made)) == list(range(1, last + 1))
        assert len(made) <= last + 3, "more than the interrupted step was done again"
        assert 0 <= float((job.steps_folder / "result").read_text()) < 0.5


@EACH
@pytest.mark.soak_but("torch")
def test_one_node_with_a_store_of_its_own(tmp_path: Path, script: str) -> None:
    with Job(tmp_path, [], "etcd-embedded", nnodes="1", script=(str(WORKERS / script),)) as job:
        job.arguments = ("--steps=20", "--pause=0")
        job.start("a", nproc=2)
        assert job.exit_codes() == {"a": 0}
        assert {step.world for step in job.steps()} == {2}
        assert "Traceback" not in job.nodes["a"].text


@EACH
@pytest.mark.soak_but("paddle")
def test_a_world_of_one(tmp_path: Path, script: str) -> None:
    with Job(tmp_path, [], "etcd-embedded", nnodes="1", script=(str(WORKERS / script),)) as job:
        job.arguments = ("--steps=5", "--pause=0")
        job.start("a")
        assert job.exit_codes() == {"a": 0}
        assert [step.step for step in job.steps()] == [1, 2, 3, 4, 5]
