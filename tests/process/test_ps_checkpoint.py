"""Checkpoints of real jobs with parameter servers: what is restored holds just the records that its data say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edl.adapters.files import PlainFiles
from edl.exit_codes import ExitCode
from ps.checkpoint.directory import CheckpointDirectory
from tests.process.harness import WORKERS, Job, OutsideEtcd, until
from tests.support.data_fixture import write_ipc

pytest.importorskip("numba")
RECORDS, EPOCHS = 4000, 2
LEDGER = str(WORKERS / "ps_ledger.py")
NAME = "counted"


class Ledger(Job):
    """Trainers and pservers on one node."""

    def __enter__(self) -> Ledger:
        super().__enter__()
        return self

    def checkpoints(self, saved: Path) -> list[int]:
        """Numbers of the complete checkpoints, newest first."""
        return [one.number for one in CheckpointDirectory(PlainFiles(saved), NAME).find().checkpoints]

    def pservers(self) -> list[psutil.Process]:
        children = psutil.Process(self.nodes["a"].process.pid).children(recursive=True)
        return [one for one in children if one.cmdline()[1:4] == ["-m", "ps", "server"]]

    def logs(self) -> list[str]:
        return [line for path in self.steps_folder.glob("*.log") for line in path.read_text().splitlines()]

    def end(self, trainers: int) -> None:
        """All epochs are over: each record has been counted once in each, in the parameters that there are."""
        until(lambda: len(list(self.steps_folder.glob("*.rests"))) == trainers, "the end of the data")
        (self.steps_folder / "read").touch()
        files = until(lambda: list(self.steps_folder.glob("*.counted.npy")), "what the pservers hold")
        counts = np.load(files[0])[:, 0]
        wrong = {int(key): float(counts[key]) for key in np.flatnonzero(counts != EPOCHS)[:10]}
        assert not wrong, (
            f"{(counts < EPOCHS).sum()} records lost, {(counts > EPOCHS).sum()} counted too often: {wrong}"
        )
        assert self.exit_codes() == {"a": ExitCode.OK}


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Ledger]:
    for number in range(4):
        write_ipc(tmp_path / f"{number}.arrow", number * RECORDS // 4, RECORDS // 4)

    def make(folder: str, etcd: OutsideEtcd, trainers: int, servers: int, **more: Any) -> Ledger:
        options = (
            "--run-mode=ps", "--lease-ttl=2", "--shutdown-timeout=10", "--max-restarts=20", "--pserver-memory=200M",
            "--slot-strikes=0",
            f"--servers-per-node={servers}", f"--checkpoint-dir={tmp_path / 'saved'}", "--ps-save-every=1",
            f"--nproc-per-node={trainers}",
        )  # fmt: skip
        arguments = (f"--data={tmp_path}/*.arrow", f"--records={RECORDS}", f"--epochs={EPOCHS}")
        (tmp_path / folder).mkdir()
        return Ledger(
            tmp_path / folder,
            [etcd.endpoint],
            options=options,
            script=(LEDGER,),
            arguments=arguments,
            name=NAME,
            **more,
        )

    return make


@pytest.mark.soak
def test_a_job_that_was_lost_goes_on_elsewhere(tmp_path: Path, job: Callable[..., Ledger]) -> None:
    """With another store, another number of pservers and of trainers; and then loses all its pservers at once."""
    saved = tmp_path / "saved"
    with OutsideEtcd(tmp_path / "etcd-1") as etcd:
        before = lose(job("first", etcd, 2, 2), saved, 2)
    with OutsideEtcd(tmp_path / "etcd-2") as etcd, job("second", etcd, 3, 3) as second:
        second.start("a", nproc=3)
        until(lambda: second.checkpoints(saved)[0] > before, "another checkpoint")
        begun = len(second.logs())
        assert begun == 3 and all(f"from ps/{NAME}/checkpoint-" in line for line in second.logs()), second.logs()
        for one in second.pservers():
            one.kill()
        until(lambda: len(second.logs()) >= 2 * begun, "trainers that start over")
        second.end(3)


@pytest.mark.soak
def test_a_job_that_was_lost_is_started_again(tmp_path: Path, job: Callable[..., Ledger]) -> None:
    """Its store knows positions in the data that are further than the checkpoint, and pservers that are no more."""
    with OutsideEtcd(tmp_path / "etcd") as etcd:
        lose(job("first", etcd, 2, 2), tmp_path / "saved", 2)
        with job("second", etcd, 2, 1) as second:
            second.start("a", nproc=2)
            second.end(2)
            assert any(f"from ps/{NAME}/checkpoint-" in line for line in second.logs()), second.logs()


def lose(job: Ledger, saved: Path, trainers: int) -> int:
    """Let it train until there are two checkpoints, and kill all of it; the newest one."""
    with job:
        job.start("a", nproc=trainers)
        until(lambda: len(job.checkpoints(saved)) >= 2, "two checkpoints")
        job.kill("a")
    return job.checkpoints(saved)[0]
