"""Restoring a checkpoint of parameter servers: the next losses are equal bit for bit, on any number of pservers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import WORKERS, Job, Node, OutsideEtcd, until

pa = pytest.importorskip("pyarrow")
pytest.importorskip("torch")
pytest.importorskip("numba")
pytestmark = pytest.mark.torch
RECORDS = 4000
SCRIPT = str(WORKERS / "ps_restored.py")
COUNTER = str(WORKERS / "ps_counter.py")


@pytest.fixture
def files(tmp_path: Path) -> str:
    table = pa.table({"id": np.arange(RECORDS)})
    with pa.OSFile(str(tmp_path / "0.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(tmp_path / "0.arrow")


class Losses(Job):
    """A job of one trainer and some pservers on one node."""

    def train(self, pservers: int) -> Node:
        return self.start("a", options=(f"--servers={pservers}:{pservers}", f"--servers-per-node={pservers}"))

    def lines(self) -> list[dict[str, Any]]:
        """Entries of the trainers' logs, in order."""
        files = sorted(self.steps_folder.glob("*.losses"), key=lambda path: path.stat().st_ctime)
        texts = [line for path in files for line in path.read_bytes().splitlines(keepends=True)]
        return [json.loads(line) for line in texts if line.endswith(b"\n")]

    def pids(self, which: str) -> list[int]:
        """Process ids of the node's pservers, or of its trainers."""
        children = psutil.Process(self.nodes["a"].process.pid).children(recursive=True)
        return [one.pid for one in children if which in " ".join(one.cmdline()[1:4])]

    def folder_of(self, step: int) -> Path:
        """Folder of the checkpoint written at this step."""
        told = self.steps_folder / f"saved-{step}"
        until(lambda: told.exists() and told.read_text(), f"the checkpoint at step {step}")
        return self.folder / "checkpoints" / self.name / told.read_text()


def losses(folder: Path, etcd: OutsideEtcd, files: str, *arguments: str, name: str, **more: Any) -> Losses:
    fixed = (
        "--run-mode=ps",
        "--lease-ttl=2",
        "--pserver-memory=200M",
        f"--checkpoint-dir={folder / 'checkpoints' / name}",
    )
    options = (*fixed, *more.pop("options", ()))
    return Losses(
        folder, [etcd.endpoint], options=options, script=(SCRIPT,), name=name,
        arguments=(f"--files={files}", *arguments), **more,
    )  # fmt: skip


def run(folder: Path, etcd: OutsideEtcd, files: str, pservers: int, *arguments: str, name: str) -> list[dict[str, Any]]:
    """A whole job; what it did."""
    with losses(folder, etcd, files, *arguments, name=name) as job:
        job.train(pservers)
        assert job.exit_codes() == {"a": ExitCode.OK}
        return job.lines()


def of(lines: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [line[name] for line in lines]


def keep_together(folder: Path) -> None:
    """The folders that the harness makes are named for the job; a job that begins again needs new ones."""
    for path in [*folder.glob("steps-*"), *folder.glob("tmp-*"), *folder.glob("logs-*")]:
        path.rename(path.with_name(f"old-{len(list(folder.iterdir()))}-{path.name}"))


@pytest.mark.soak_but("more")
@pytest.mark.parametrize("pservers", [3, 1], ids=["more", "fewer"])
def test_restored_on_more_and_on_fewer(tmp_path: Path, etcd: OutsideEtcd, files: str, pservers: int) -> None:
    first = run(tmp_path, etcd, files, 2, "--save-at=30", "--steps=45", name="restore-2")
    assert of(first, "step") == list(range(45))
    keep_together(tmp_path)
    with OutsideEtcd(tmp_path / "etcd-again") as another:
        again = run(tmp_path, another, files, pservers, "--steps=45", name="restore-2")
    assert of(again, "step") == list(range(30, 45))
    assert of(again, "loss") == of(first[30:], "loss")
    used = [one for line in (*first[:30], *again) for one in line["records"]]
    assert len(set(used)) == len(used) == 45 * 4, "the data go on where the parameters do"


@pytest.mark.soak
def test_a_checkpoint_of_another_model(tmp_path: Path, etcd: OutsideEtcd, files: str) -> None:
    run(tmp_path, etcd, files, 1, "--save-at=5", "--steps=6", name="restore-other")
    keep_together(tmp_path)
    with (
        OutsideEtcd(tmp_path / "etcd-again") as another,
        losses(tmp_path, another, files, "--dim=4", name="restore-other") as job,
    ):
        node = job.train(1)
        assert node.exit_code() == ExitCode.WORKER_FAILED
        assert "table factors: dim 4 here, 8 there" in node.text, node.text
        assert not job.lines()


@pytest.mark.soak
def test_a_damaged_checkpoint(tmp_path: Path, etcd: OutsideEtcd, files: str) -> None:
    with losses(tmp_path, etcd, files, "--save-at", "10", "20", "--steps=25", name="restore-damaged") as job:
        job.train(2)
        assert job.exit_codes() == {"a": ExitCode.OK}
        first, newest = job.lines(), job.folder_of(20)
        older = job.folder_of(10)
    damaged = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    keep_together(tmp_path)
    with (
        OutsideEtcd(tmp_path / "etcd-again") as another,
        losses(tmp_path, another, files, "--steps=25", name="restore-damaged") as job,
    ):
        node = job.train(2)
        assert job.exit_codes() == {"a": ExitCode.OK}
        again = job.lines()
        told = next(line for line in node.text.splitlines() if "cannot be restored" in line or "is not used" in line)
        assert newest.name in told and "checksum" in told, told
    assert of(again, "step") == list(range(10, 25))
    assert {Path(one).name for one in of(again, "from")} == {older.name}
    assert of(again, "loss") == of(first[10:], "loss")


@pytest.mark.soak
def test_all_pservers_die_at_once(tmp_path: Path, etcd: OutsideEtcd, files: str) -> None:
    expected = run(tmp_path, etcd, files, 2, "--steps=60", name="restore-undisturbed")
    more = ("--save-at=20", "--steps=60", "--pause=0.05")
    with losses(tmp_path, etcd, files, *more, name="restore-killed") as job:
        node = job.train(2)
        checkpoint = job.folder_of(20)
        until(lambda: len(job.lines()) > 25, "some steps after the checkpoint")
        for pid in job.pids("ps server"):
            os.kill(pid, signal.SIGKILL)
        assert job.exit_codes() == {"a": ExitCode.OK}, node.text
        lines = job.lines()
    begun = next(n for n, line in enumerate(lines) if line["from"])
    assert begun > 25 and {Path(one).name for one in of(lines[begun:], "from")} == {checkpoint.name}
    assert of(lines[begun:], "step") == list(range(20, 60))
    assert of(lines[:20] + lines[begun:], "loss") == of(expected, "loss")
    used = [one for line in (*lines[:20], *lines[begun:]) for one in line["records"]]
    assert len(set(used)) == len(used) == 60 * 4
    assert "rolling all parameters back to the last complete checkpoint" in node.text


@pytest.mark.slow
def test_all_pservers_die_and_there_is_no_checkpoint(tmp_path: Path, etcd: OutsideEtcd, files: str) -> None:
    # No framework has a part in it, nor has numba.
    with losses(tmp_path, etcd, files, name="restore-nothing") as job:
        job.script, job.arguments, job.environment = (COUNTER,), (), {"EDL_PS_KERNELS": "numpy"}
        node = job.train(2)
        until(lambda: len(job.steps()) > 5, "some steps")
        for pid in job.pids("ps server"):
            os.kill(pid, signal.SIGKILL)
        assert node.exit_code() == ExitCode.WORKER_FAILED
        assert "there is no complete checkpoint" in node.text, node.text
        assert "--checkpoint-dir" in node.text, node.text
