"""``--sync-dir`` with a plain script: its checkpoint outlives the node that wrote it, and newcomers get it first."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import WORKERS, Job, OutsideEtcd, until

SCRIPT = str(WORKERS / "saving_script.py")
PARTS = str(WORKERS / "parts_script.py")
OPTIONS = ("--sync-dir=out", "--lease-ttl=2", "--join-grace=0.5")


def start(job: Job, name: str) -> Path:
    """Start a node in a folder of its own; returns its synchronised directory."""
    here = job.folder / name
    here.mkdir()
    job.start(name, command=["env", "-C", str(here), *job.command(name)])
    return here / "out"


def loaded(job: Job, round: int) -> list[Any]:
    """What the ranks of a round have loaded."""
    return [json.loads(path.read_text()) for path in sorted(job.steps_folder.glob(f"*.{round}.*.loaded"))]


def latest(out: Path) -> int:
    """The step of the newest file ``latest`` in a directory; 0 if there is none."""
    file = out / "latest"
    return int(file.read_text() or 0) if file.exists() else 0


def same(notes: list[Any]) -> int:
    """The step that all have loaded. A node that was killed may have written the checkpoint, and not yet ``latest``."""
    assert all(note["whole"] for note in notes), notes
    (step,), (newest,) = {note["step"] for note in notes}, {note["latest"] for note in notes}
    assert int(newest or 0) in (step, step - 1), notes
    return int(step)


@pytest.mark.slow
def test_the_checkpoint_outlives_its_node_and_newcomers_get_it_first(tmp_path: Path, etcd: OutsideEtcd) -> None:
    with Job(tmp_path, [etcd.endpoint], nnodes="1:2", options=OPTIONS, script=[SCRIPT]) as job:
        outs = {"a": start(job, "a")}
        alone = job.wait_world(1)
        until(lambda: latest(outs["a"]) >= 3, "a checkpoint of node a")
        outs["b"] = start(job, "b")
        both = job.wait_world(2, after=alone.round)
        assert both.nodes[0] == "a"
        assert same(loaded(job, both.round)) >= 3  # b has never written one

        until(lambda: latest(outs["b"]) > same(loaded(job, both.round)), "a newer checkpoint on node b")
        job.kill("a")
        shutil.rmtree(outs["a"])
        copied = latest(outs["b"])
        without = job.wait_world(1, after=both.round)
        assert without.nodes == {0: "b"}
        assert same(loaded(job, without.round)) >= copied

        outs["c"] = start(job, "c")
        again = job.wait_world(2, after=without.round)
        assert set(again.nodes.values()) == {"b", "c"}
        assert same(loaded(job, again.round)) > copied

        last = job.end_soon(10)
        assert {name: code for name, code in job.exit_codes().items() if name != "a"} == {"b": 0, "c": 0}
        assert latest(outs["b"]) == latest(outs["c"]) >= last  # also what the last steps have saved
        assert (outs["b"] / "ckpt.bin").read_bytes() == (outs["c"] / "ckpt.bin").read_bytes()
        assert not list(outs["c"].glob(".edl-sync*"))


@pytest.mark.parametrize("lost", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_a_checkpoint_that_lacks_the_part_of_a_lost_node_is_not_loaded(
    tmp_path: Path, etcd: OutsideEtcd, lost: str
) -> None:
    """It saves faster than files are copied, so the newest folder lacks a part nearly always."""
    with Job(tmp_path, [etcd.endpoint], nnodes="1:2", options=OPTIONS, script=[PARTS]) as job:
        outs = {name: start(job, name) for name in ("a", "b")}
        both = job.wait_world(2)
        (kept,) = {"a", "b"} - {lost}
        until(lambda: len(list(outs[kept].glob("step-*/0-of-2"))) >= 3, "checkpoints on the node that stays")
        until(lambda: len(list(outs[kept].glob("step-*/1-of-2"))) >= 3, "parts of both ranks there")
        job.kill(lost)
        alone = job.wait_world(1, after=both.round)
        assert alone.nodes == {0: kept}
        (step,) = loaded(job, alone.round)
        assert step >= 3
        assert "is not whole" not in job.nodes[kept].text
        job.end_soon(3)
        assert job.exit_codes()[kept] == 0


def test_a_folder_that_all_nodes_see_is_left_alone(tmp_path: Path, etcd: OutsideEtcd) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "model.bin").write_bytes(b"x" * 100_000)
    options = (f"--sync-dir={shared}", "--lease-ttl=2")
    with Job(tmp_path, [etcd.endpoint], nnodes="2", options=options) as job:
        a, b = job.start("a"), job.start("b")
        job.wait_world(2)
        said = f"--sync-dir: {shared} is shared with node"
        until(lambda: said in a.text and said in b.text, "both nodes notice it")
        job.end_soon()
        assert job.exit_codes() == {"a": 0, "b": 0}
    assert sorted(path.name for path in shared.iterdir()) == ["model.bin"]


@pytest.mark.slow
def test_a_disk_that_is_too_small_for_the_files_fails_the_start_and_is_named(
    tmp_path: Path, etcd: OutsideEtcd, disk: Path
) -> None:
    options = ("--sync-dir=out", "--sync-timeout=3", "--max-restarts=0", "--lease-ttl=2", "--join-grace=0.5")
    with Job(tmp_path, [etcd.endpoint], nnodes="2", options=options, script=[SCRIPT]) as job:
        here = tmp_path / "a"
        (here / "out").mkdir(parents=True)
        (here / "out" / "old.bin").write_bytes(b"x" * 3_000_000)
        for name, folder in (("a", here), ("b", disk)):
            job.start(name, command=["env", "-C", str(folder), *job.command(name)])
        codes = job.exit_codes()
        assert set(codes.values()) == {1}
        assert not list(job.steps_folder.glob("*.loaded")), "no worker starts with other files than the rest"
        for node in job.nodes.values():  # whichever node gives up first
            cause = re.search(r"error *: (--sync-dir: .*nothing has moved for 3 s.*)", node.text)
            assert cause is not None
            assert "no space for 3000000 bytes in" in cause[1] and "node a" in cause[1]


@pytest.mark.parametrize("given", ["/", "..", "~x://y"])
def test_a_directory_that_holds_more_than_checkpoints_is_refused(tmp_path: Path, given: str) -> None:
    with Job(tmp_path, ["127.0.0.1:1"], options=(f"--sync-dir={given}",)) as job:
        node = job.start("a")
        assert node.exit_code() == 2
        assert f"--sync-dir={given}" in node.text
        assert "Name the folder" in node.text
