"""Sharded training with Paddle: worlds of any size begin from memory, in the same processes, or from a directory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import ROOT, WORKERS, OutsideEtcd
from tests.process.test_sharded import Sharded, ended

pytestmark = [pytest.mark.paddle, pytest.mark.slow]
SCRIPT = WORKERS / "sharded_paddle.py"


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    """Losses by step, of a single process that has everything."""
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), f"--folder={folder}", f"--steps={steps}", "--pause=0"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    lines = [json.loads(line) for path in folder.glob("*.steps") for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def compare(job: Sharded, right: dict[int, float]) -> None:
    steps = job.steps()
    assert {step.step for step in steps} <= right.keys()
    wrong = [one for one in steps if not math.isclose(one.loss, right[one.step], rel_tol=1e-5, abs_tol=1e-5)]
    assert not wrong, (wrong[:5], {one.step: right[one.step] for one in wrong[:5]})


@contextlib.contextmanager
def sharded(folder: Path, nnodes: str, *arguments: str, options: tuple[str, ...] = ()) -> Iterator[Sharded]:
    """A job of the script, with an etcd of its own."""
    (folder / "job").mkdir(parents=True)
    named: dict[str, Any] = {"name": "padjob", "nnodes": nnodes, "script": (str(SCRIPT),), "options": options}
    with (
        OutsideEtcd(folder / "etcd") as etcd,
        Sharded(folder / "job", [etcd.endpoint], **named, arguments=arguments) as job,
    ):
        yield job


@pytest.mark.parametrize(
    "level", ["os", pytest.param("os_g", marks=pytest.mark.soak), pytest.param("p_g_os", marks=pytest.mark.soak)]
)
def test_worlds_of_any_size_begin_from_memory(tmp_path: Path, level: str) -> None:
    """2 → 3 → 2 nodes: a join, and a killed launcher. No checkpoint directory, and no process ends but the killed."""
    with sharded(tmp_path, "1:3", f"--level={level}") as job:
        job.start("a", "b")
        job.wait_world(2)
        job.wait_steps(5)
        job.start("c")
        grown = job.wait_world(3)
        job.wait_steps(5)
        job.kill("c")
        del job.nodes["c"]
        shrunk = job.wait_world(2, after=grown.round)
        job.wait_steps(5)
        last = job.end_soon()
        began = ended(job)
        assert sorted(began) == [1, grown.round, shrunk.round]
        for node in ("a", "b"):
            assert len({tuple(seen.pids_of(node)) for seen in job.rounds()}) == 1, "it keeps its process"
        assert began[grown.round]["step"] > 0 and began[shrunk.round]["step"] >= began[grown.round]["step"]
        compare(job, undisturbed(tmp_path / "alone", last))


@pytest.mark.soak
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_a_lost_worker_is_replaced(tmp_path: Path, level: str) -> None:
    """A world of the same size: each worker restores its own part."""
    with sharded(tmp_path, "2", f"--level={level}") as job:
        job.start("a", "b")
        first = job.wait_world(2)
        job.wait_steps(5)
        (lost,) = first.pids_of("b")
        os.kill(lost, signal.SIGKILL)
        second = job.wait_world(2, after=first.round)
        assert second.pids_of("a") == first.pids_of("a"), "it keeps its process"
        job.wait_steps(5)
        last = job.end_soon()
        assert ended(job)[second.round]["step"] > 0
        compare(job, undisturbed(tmp_path / "alone", last))


@pytest.mark.soak
@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_a_step_that_a_worker_votes_against_is_made_again(tmp_path: Path, level: str) -> None:
    with sharded(tmp_path, "2", f"--level={level}", "--refuse-at=6", "--steps=12") as job:
        job.start("a", "b")
        ended(job)
        made = [step.step for step in job.steps() if step.rank == 0]
        assert made == [*range(1, 7), *range(6, 13)], made
        compare(job, undisturbed(tmp_path / "alone", 12))


@pytest.mark.soak
def test_a_checkpoint_is_read_at_another_size(tmp_path: Path) -> None:
    """Written by two workers, and read by three, with another level."""
    directory = f"--checkpoint-dir={tmp_path / 'checkpoints'}"
    jobs: list[Sharded] = []
    began: dict[int, dict[str, Any]] = {}
    for nodes, steps, level in (("ab", 10, "os"), ("abc", 16, "p_g_os")):
        arguments = (f"--level={level}", f"--steps={steps}", "--save-every=5")
        with sharded(tmp_path / f"run-{steps}", "1:3", *arguments, options=(directory,)) as job:
            job.start(*nodes)
            began = ended(job)
            jobs.append(job)
    assert {one["step"] for one in began.values()} == {10}
    right = undisturbed(tmp_path / "alone", 16)
    for job in jobs:
        compare(job, right)
