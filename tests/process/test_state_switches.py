"""Checkpoints with and without a request, and workers that stand still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.exit_codes import ExitCode
from tests.process.harness import WORKERS, Job, OutsideEtcd, until
from tests.process.test_rejoin import finish, redone

# No framework has a part in any of this. What torch and Paddle save: test_rejoin.py.
SCRIPT = str(WORKERS / "rejoin_plain.py")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def job(etcd: OutsideEtcd, folder: Path, checkpoints: Path, *arguments: str, options: tuple[str, ...] = ()) -> Job:
    named = f"--checkpoint-dir={checkpoints}"
    return Job(folder, [etcd.endpoint], script=(SCRIPT,), arguments=arguments, options=(named, *options), name="kept")


def complete(checkpoints: Path) -> list[int]:
    """Commit numbers of the complete checkpoints."""
    return sorted(json.loads(done.read_text())["commit"] for done in checkpoints.glob("*/DONE"))


def edl(etcd: OutsideEtcd, *command: str) -> subprocess.CompletedProcess[str]:
    where = (f"--rdzv-endpoint=etcd://{etcd.endpoint}", "--rdzv-id=kept")
    return subprocess.run(
        [sys.executable, "-m", "edl.cli", command[0], *where, *command[1:]], capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_save_file_is_obeyed_once_and_so_is_the_command_line(
    etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path
) -> None:
    with job(etcd, tmp_path, checkpoints) as running:
        running.start("a", "b")
        running.wait_world(2)
        (checkpoints / "SAVE").write_text("before the maintenance")
        until(lambda: complete(checkpoints), "a checkpoint")
        until(lambda: not (checkpoints / "SAVE").exists(), "the end of the file")
        running.wait_steps(20)
        assert redone(running.steps()) == []
        (first,) = complete(checkpoints)

        saved = edl(etcd, "checkpoint")
        assert saved.returncode == 0, saved.stderr
        assert str(checkpoints) in saved.stdout and complete(checkpoints)[-1] > first
        running.wait_steps(3)
        assert len(complete(checkpoints)) == 2
        stopped = edl(etcd, "stop")
        assert stopped.returncode == 0, stopped.stderr
        assert set(running.exit_codes().values()) == {ExitCode.KILLED}
        assert complete(checkpoints)[-1] == max(step.step for step in running.steps())
        assert redone(running.steps()) == []


@pytest.mark.slow
def test_a_kill_file_ends_the_job_and_the_next_one(etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path) -> None:
    with job(etcd, tmp_path, checkpoints) as running:
        running.start("a", "b")
        running.wait_world(2)
        (checkpoints / "KILL").write_text("budget is spent")
        assert set(running.exit_codes().values()) == {ExitCode.KILLED}
        last = max(step.step for step in running.steps())
        assert complete(checkpoints)[-1] == last, "nothing that was trained is lost"
    with job(etcd, tmp_path / "again", checkpoints) as queued:
        node = queued.start("c")
        assert node.exit_code() == ExitCode.KILLED
        assert str(checkpoints / "KILL") in node.text and "budget is spent" in node.text
    (checkpoints / "KILL").unlink()
    steps = f"--steps={last + 10}"
    with OutsideEtcd(tmp_path / "etcd-2") as etcd, job(etcd, tmp_path / "later", checkpoints, steps) as resumed:
        resumed.start("d")
        assert resumed.exit_codes() == {"d": 0}
        assert min(step.step for step in resumed.steps()) == last + 1


def test_the_last_node_saves_before_it_goes(etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path) -> None:
    with job(etcd, tmp_path, checkpoints) as running:
        node = running.start("a")
        running.wait_world(1)
        running.wait_steps(10)
        node.send(signal.SIGTERM)
        assert node.exit_code() == ExitCode.TERMINATED
        assert complete(checkpoints) == [max(step.step for step in running.steps())]


def test_a_job_that_fails_saves_what_it_has(etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path) -> None:
    with job(etcd, tmp_path, checkpoints, options=("--max-restarts=0",)) as running:
        running.start("a")
        seen = running.wait_world(1)
        running.wait_steps(10)
        os.kill(seen.pids[0], signal.SIGKILL)
        assert running.nodes["a"].exit_code() == ExitCode.WORKER_FAILED
        last = max(step.step for step in running.steps())
        assert complete(checkpoints)[-1] in (last - 1, last)


@pytest.mark.slow
def test_workers_that_stand_still_are_shown_and_restarted(etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path) -> None:
    options = ("--hang-timeout=4", "--rejoin-timeout=8", "--shutdown-timeout=2")
    with job(etcd, tmp_path, checkpoints, "--hang-at=20", options=options) as running:
        running.start("a", "b")
        first = running.wait_world(2)
        after = running.wait_world(2, after=first.round)
        assert after.pids[0] == first.pids[0] or after.pids[1] == first.pids[1], "who did not hang keeps its process"
        running.wait_steps(5)
        text = "".join(node.text for node in running.nodes.values())
        assert "no commit() for" in text
        assert "time.sleep(3600)" in text or "in train" in text, "the stacks"
        finish(running)


def refused_to_another(etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path) -> None:
    """The directory of one job is not that of another."""
    other = Job(
        tmp_path / "other",
        [etcd.endpoint],
        script=(SCRIPT,),
        options=(f"--checkpoint-dir={checkpoints}",),
        name="other",
    )
    with other as running:
        node = running.start("b")
        assert node.exit_code() in (ExitCode.JOB_CONFLICT, ExitCode.CHECKPOINT_UNUSABLE)
        assert "kept" in node.text and str(checkpoints) in node.text


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over_and_anothers_directory_is_refused(
    etcd: OutsideEtcd, tmp_path: Path, checkpoints: Path
) -> None:
    with job(etcd, tmp_path, checkpoints, "--steps=20", "--save-every=10", "--pause=0.1") as running:
        running.start("a")
        assert running.exit_codes() == {"a": 0}
    assert complete(checkpoints) == [10, 20]
    refused_to_another(etcd, tmp_path, checkpoints)
    assert complete(checkpoints) == [10, 20]
    (newest,) = checkpoints.glob("commit-*0020.*/state.safetensors")
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    with OutsideEtcd(tmp_path / "etcd-2") as etcd, job(etcd, tmp_path / "again", checkpoints, "--steps=30") as running:
        node = running.start("b")
        assert running.exit_codes() == {"b": 0}
        assert min(step.step for step in running.steps()) == 11
        assert "checksum" in node.text
    for path in checkpoints.glob("commit-*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-10])
    with OutsideEtcd(tmp_path / "etcd-3") as etcd, job(etcd, tmp_path / "never", checkpoints) as running:
        node = running.start("c")
        assert node.exit_code() == ExitCode.CHECKPOINT_UNUSABLE
        assert str(checkpoints) in node.text
