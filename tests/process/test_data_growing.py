"""Files that join a data set of a real job while launchers, workers and the Master are killed."""

from __future__ import annotations

import collections
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.process.harness import Job, OutsideEtcd, until
from tests.process.test_data import NODES, committed, end_soon, job, lines

FIRST, MORE, EACH = 1200, 10, 60
"""Records at first; files that are added, and the records of each."""
ALL = FIRST + MORE * EACH


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[OutsideEtcd]:
    with OutsideEtcd(tmp_path / "etcd") as store:
        yield store


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        write(folder / f"{number}.arrow", number * FIRST // 3, FIRST // 3)
    return folder


def write(path: Path, first: int, count: int) -> None:
    ids = np.arange(first, first + count)
    table = pa.table({"id": ids, "x": (ids % 7).astype(np.float32)})
    with pa.OSFile(f"{path}.writing", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    os.rename(f"{path}.writing", path)


def more(folder: Path) -> Path:
    """Ten files that are not where the data set looks."""
    folder.mkdir()
    for number in range(MORE):
        write(folder / f"{number}.arrow", FIRST + number * EACH, EACH)
    return folder


def consists(found: dict[int, list[int]], records: dict[int, int]) -> None:
    """Each epoch of these records, each once: counted from what the workers have written down, not by edl."""
    for epoch, count in records.items():
        times = collections.Counter(found[epoch])
        twice = [record for record, number in times.items() if number > 1]
        lacking = sorted(set(range(count)) - set(times))
        assert not twice and not lacking, f"epoch {epoch}: twice {twice[:20]}, lacking {lacking[:20]}"
        assert set(times) == set(range(count)), f"epoch {epoch}: {sorted(set(times) - set(range(count)))[:20]} too many"


def counts(running: Job) -> Any:
    """The Master's counts for the data set."""
    (view,) = (one for one in running.status()["services"] if one["name"] == "train")
    return {count["name"]: count["value"] for count in view["counts"]}


def kill_a_worker(running: Job, rank: int) -> None:
    seen = running.wait_steps(2)
    os.kill(seen.pids[rank % len(seen.pids)], signal.SIGKILL)
    running.wait_world(len(NODES), after=seen.round)


def kill_the_master(running: Job) -> None:
    seen = running.wait_steps(2)
    name = running.status()["master"]
    running.kill(name)
    running.start(name)
    running.wait_world(len(NODES), after=seen.round)


@pytest.mark.slow
@pytest.mark.soak_but("torch")
def test_ten_files_join_an_epoch_with_three_kills(
    etcd: OutsideEtcd, tmp_path: Path, framework: str, files: Path
) -> None:
    with job(etcd, tmp_path, framework, files, "--pause=0.3") as running:
        running.start(*NODES)
        running.wait_world(len(NODES))
        kill_a_worker(running, 0)  # rank 0 lists the files
        added = running.cli("data", "add", "train", str(more(tmp_path / "more")))
        assert added.returncode == 0, added.stderr
        assert "10 files, 20 shards, 600 records added, from epoch 0 on" in added.stdout
        kill_the_master(running)
        told = counts(running)
        assert (told["epoch"], told["records"]) == (0, ALL), "the next Master knows them, in the epoch under way"
        kill_a_worker(running, 1)
        again = running.cli("data", "add", "train", str(tmp_path / "more"))
        assert again.returncode == 0 and "nothing was added: 10 files already listed" in again.stdout
        told = counts(running)
        assert (told["epoch"], told["records"]) == (0, ALL), "all of it in one epoch"
        shown = running.cli("data").stdout
        assert all(f"train     {name}" in shown for name in NODES), "which nodes read"
        epochs = end_soon(running, 1)
        assert set(running.exit_codes().values()) == {0}
        found = committed(running.steps_folder)
        assert sorted(found) == list(range(epochs))
        consists(found, dict.fromkeys(range(epochs), ALL))


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_a_resumed_job_takes_the_files_that_have_come_since(
    etcd: OutsideEtcd, tmp_path: Path, framework: str, files: Path
) -> None:
    options = (f"--checkpoint-dir={tmp_path / 'checkpoints'}",)
    with job(etcd, tmp_path, framework, files, "--save-every=7", options=options, name="lasting") as running:
        running.start("a", "b")
        running.wait_world(2)
        until(lambda: len(list((tmp_path / "checkpoints").glob("*/DONE"))) >= 2, "two checkpoints")
        for name in "ab":
            running.kill(name)
        before = running.steps_folder
    for number in range(MORE):
        write(files / f"more-{number}.arrow", FIRST + number * EACH, EACH)
    with (
        OutsideEtcd(tmp_path / "another-etcd") as other,
        job(other, tmp_path / "again", framework, files, "--save-every=7", options=options, name="lasting") as running,
    ):
        running.start("c", "d", "e")
        running.wait_world(3)
        epochs = end_soon(running)
        assert set(running.exit_codes().values()) == {0}
        found = committed(running.steps_folder, before)
        assert len([line for line in lines(running.steps_folder) if line.get("epoch") == 0]) > 0
        consists(found, dict.fromkeys(range(epochs), ALL))


@pytest.mark.slow
@pytest.mark.soak_but("paddle")
def test_a_folder_is_looked_at_again(etcd: OutsideEtcd, tmp_path: Path, framework: str, files: Path) -> None:
    options = ("--max-restarts=10000",)
    with job(etcd, tmp_path, framework, files, options=options) as running:
        running.options = [f"--data=train={files}/*;rescan=0.3", *running.options[-1:]]
        running.start("a", "b")
        running.wait_world(2)
        running.wait_steps(2)
        for number in range(MORE):
            write(files / f"more-{number}.arrow", FIRST + number * EACH, EACH)
        until(lambda: counts(running)["records"] == ALL, "all files in the epoch")
        epochs = end_soon(running)
        assert set(running.exit_codes().values()) == {0}
        found = committed(running.steps_folder)
        consists(found, dict.fromkeys(range(epochs), ALL))
