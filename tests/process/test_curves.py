"""E3: a job whose size changes all the time has the loss curve of one that was left alone. Real launchers."""

from __future__ import annotations

import collections
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd, until

pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow

SCRIPTS = {"torch": WORKERS / "curves_torch.py", "paddle": WORKERS / "curves_paddle.py"}
STEPS = 200
SLOW_S = 1.0
"""Pause after a step while a change of the world is awaited."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


def pace(job: Job, seconds: float) -> None:
    file = job.steps_folder / "pace"
    file.with_suffix(".new").write_text(str(seconds))
    file.with_suffix(".new").replace(file)


def reach(job: Job, step: int) -> None:
    """Train until this step."""
    pace(job, 0.01)
    until(lambda: max((one.step for one in job.steps()), default=0) >= step, f"step {step}")
    pace(job, SLOW_S)


def losses(job: Job) -> dict[int, float]:
    """The curve, as rank 0 has written it; all ranks must have written the same."""
    found: dict[int, float] = {}
    written: dict[tuple[int, int], set[float]] = collections.defaultdict(set)
    for one in job.steps():
        written[one.round, one.step].add(one.loss)
        found[one.step] = one.loss
    assert all(len(values) == 1 for values in written.values()), "the workers of a world know one loss"
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def both(etcd: OutsideEtcd, folder: Path, framework: str, *options: str) -> tuple[dict[int, float], dict[int, float]]:
    """The curve of one worker that is left alone, and the one through 2, 5, 1 and 3 workers."""
    named: dict[str, Any] = {"script": (str(SCRIPTS[framework]),), "options": options}
    with (
        Job(
            folder / "alone", [etcd.endpoint], nnodes="1", arguments=(f"--steps={STEPS}", "--batch=128"), **named
        ) as one,
        Job(folder / "changing", [etcd.endpoint], nnodes="1:3", arguments=(f"--steps={STEPS}",), **named) as job,
    ):
        one.start("alone")
        through_2_5_1_3(job)
        assert set(job.exit_codes().values()) == {0}
        assert one.exit_codes() == {"alone": 0}
        worlds = {step.world for step in job.steps()}
        assert {1, 2, 3, 5} <= worlds
        return losses(one), losses(job)


def through_2_5_1_3(job: Job) -> None:
    pace(job, SLOW_S)
    job.start("a", "b")
    seen = job.wait_world(2)
    job.start("c", nproc=3)
    reach(job, 40)
    seen = job.wait_world(5, after=seen.round)
    reach(job, 80)
    job.nodes["b"].send(signal.SIGTERM)
    job.nodes["c"].send(signal.SIGTERM)
    seen = job.wait_world(1, after=seen.round)
    job.start("d", nproc=2)
    assert [job.nodes.pop(name).exit_code() for name in "bc"] == [0, 0]
    reach(job, 120)
    job.wait_world(3, after=seen.round)
    pace(job, 0.0)


@pytest.mark.torch
@pytest.mark.soak
def test_a_kept_global_batch_keeps_the_curve(etcd: OutsideEtcd, tmp_path: Path) -> None:
    """In 32 bits, after 200 steps; 97 samples a step are split unevenly by every size."""
    pytest.importorskip("torch")
    expected, found = both(etcd, tmp_path, "torch", "--global-batch=97")
    assert expected[STEPS] < 0.5 * expected[1]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), step


@pytest.mark.soak
def test_logical_ranks_keep_every_bit(etcd: OutsideEtcd, tmp_path: Path, framework: str) -> None:
    """Also with dropout and batch normalisation."""
    expected, found = both(etcd, tmp_path, framework, "--global-batch=90", "--logical-ranks=9")
    assert {step: loss.hex() for step, loss in found.items()} == {step: loss.hex() for step, loss in expected.items()}
