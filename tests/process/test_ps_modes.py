"""Each mode of a job with parameter servers, with checkpoints taken while trainers of different speed train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import WORKERS, Job, OutsideEtcd, until

pytest.importorskip("numba")
WORKER = str(WORKERS / "ps_modes.py")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--ps-mode=sync",),
        ("--ps-mode=async", "--staleness=2"),
        pytest.param(("--ps-mode=async",), marks=pytest.mark.soak),
        ("--ps-mode=geo", "--geo-steps=5"),
    ],
    ids=" ".join,
)
def test_trainers_stop_for_checkpoints_and_every_push_counts(
    tmp_path: Path, etcd: OutsideEtcd, options: tuple[str, ...]
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    fixed = (
        "--run-mode=ps", "--servers=2:2", "--servers-per-node=2", "--pserver-memory=200M", "--lease-ttl=2",
        f"--checkpoint-dir={saved}", "--ps-save-every=1",
    )  # fmt: skip
    with Job(tmp_path, [etcd.endpoint], options=(*fixed, *options), script=(WORKER,)) as job:
        job.start("a", nproc=3)
        until(lambda: len(list(saved.rglob("checkpoint.json"))) >= 2, "two checkpoints")
        made = len(job.steps())
        until(lambda: len(job.steps()) > made + 30, "steps after them")
        (job.steps_folder / "last-step").write_text("0")
        until(lambda: len(list(job.steps_folder.glob("*.pushed.npy"))) == 3, "all at rest")
        (job.steps_folder / "read").touch()
        assert job.exit_codes() == {"a": ExitCode.OK}
        pushed = np.sum([np.load(path) for path in job.steps_folder.glob("*.pushed.npy")], axis=0)
        held = np.load(next(job.steps_folder.glob("*.held.npy")))
        assert pushed.sum() > 30 * 256 and (held == held[:, :1]).all()
        if "--ps-mode=geo" in options:  # differences are averaged
            assert pushed.sum() / 3 * 0.99 < held[:, 0].sum() < pushed.sum()
        else:
            assert (held[:, 0] == pushed).all()
