"""A script that swallows the failure of a collective trains on with garbage: none of it may become a commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd

STEPS = 40
"""As in the script."""


@pytest.mark.parametrize(
    ("framework", "way"),
    [
        pytest.param("torch", "call", marks=pytest.mark.torch),
        pytest.param("torch", "backward", marks=[pytest.mark.torch, pytest.mark.soak]),
        pytest.param("torch", "subgroup", marks=[pytest.mark.torch, pytest.mark.soak]),
        pytest.param("paddle", "call", marks=[pytest.mark.paddle, pytest.mark.soak]),
        pytest.param("paddle", "backward", marks=pytest.mark.paddle),
    ],
)
def test_a_step_that_failed_is_not_committed(etcd: OutsideEtcd, tmp_path: Path, framework: str, way: str) -> None:
    pytest.importorskip(framework)
    script = (str(WORKERS / "swallow_worker.py"),)
    arguments = (f"--framework={framework}", f"--way={way}")
    with Job(tmp_path, [etcd.endpoint], nnodes="3", script=script, arguments=arguments) as job:
        job.start("a", "b", "c")  # each of which keeps the commits of its worker
        assert job.exit_codes() == {"a": 0, "b": 0, "c": 0}
        assert (job.steps_folder / "killed").exists()
        found = [json.loads(path.read_text()) for path in sorted(job.steps_folder.glob("*.result"))]
    assert found == [{"weight": STEPS * (STEPS + 1) / 2, "step": STEPS}] * 3
